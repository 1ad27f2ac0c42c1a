"""SiLU of a group norm => `npu_group_norm_silu`, as the blocks of a UNet have it. The norm is not rounded in between.

So a norm and a SiLU in float32, of 16 bits that are cast there and back, are it too.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)


def _build(group: int, epsilon: float) -> Build:
    def build(emit: Emit, *inputs: fx.Node) -> tuple[fx.Node, ...]:
        return (emit(getitem, emit(torch.ops.npu.npu_group_norm_silu.default, *inputs, group, epsilon), 0),)

    return build


class _GroupNormSilu:
    """The form."""

    name = "lift_group_norm_silu"
    ends_with = frozenset({_aten.silu.default, _aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The activation that is ``node``, or that it casts back, with the norm in front of it."""
        active = terms.before_a_cast_back(node)
        first = active.args[0] if terms.calls(active, _aten.silu.default) else None
        norm = first.args[0] if isinstance(first, fx.Node) and first.target is getitem and first.args[1] == 0 else None
        if not terms.calls(norm, _aten.native_group_norm.default):
            return None
        given = terms.arguments(norm)
        value = node.meta["val"]
        wide = [one for one in (given["input"], given["weight"], given["bias"]) if one is not None]
        operands = [terms.of_dtype(one, value.dtype) or one for one in wide]
        dtypes = {one.meta["val"].dtype for one in operands}
        if len(operands) < 3:
            return Unlike(norm, "the norm has no weight or no bias")
        if dtypes != {value.dtype} or value.dtype not in _TAKEN:
            return Unlike(norm, f"what is normalised, weight and bias are {', '.join(sorted(map(str, dtypes)))}")
        group, epsilon = given["group"], given["eps"]
        if not isinstance(group, int) or not isinstance(epsilon, float):
            return Unlike(norm, f"{group} groups and the epsilon {epsilon} are not both numbers at compile time")

        return Proposal(tuple(operands), (node,), (_build(group, epsilon),))


FORM = _GroupNormSilu()
