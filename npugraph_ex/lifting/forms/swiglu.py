"""``silu(a) * b`` of the two halves of one tensor => `npu_swiglu`, as models with one projection for both have it.

The operator takes the first half as the gate (operator documentation of ``torch_npu.npu_swiglu``). Two separate projections stay:
to join them costs the kernel that the operator would save.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)


class _SwiGlu:
    """The form."""

    name = "lift_swiglu"
    ends_with = frozenset({_aten.mul.Tensor})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The product that is ``node``."""
        for gate, up in (node.args, node.args[::-1]):
            if not isinstance(gate, fx.Node) or not isinstance(up, fx.Node):
                return None
            activated = terms.core(gate)
            if not terms.calls(activated, _aten.silu.default):
                continue
            first, second = (terms.part_of(terms.core(one)) for one in (activated.args[0], up))  # type: ignore[arg-type]
            if first is None or second is None or first[0] is not second[0]:
                return None
            return _halves(node, first[0], first[1:], second[1:])
        return None


def _halves(node: fx.Node, x: fx.Node, gate: tuple[int, int, int], up: tuple[int, int, int]) -> Proposal | Unlike:
    value, whole = node.meta["val"], x.meta["val"]
    size = whole.shape[-1]
    if gate != (0, size // 2, 1) or up != (size // 2, size, 1):
        return Unlike(
            node,
            f"the gate is the elements {slice(*gate)} of {size} and the other factor {slice(*up)}; "
            "the operator takes the first half as the gate",
        )
    if whole.dtype != value.dtype or value.dtype not in _TAKEN:
        return Unlike(node, f"the halves are {whole.dtype} and the product {value.dtype}")

    def build(emit: Emit, x: fx.Node) -> tuple[fx.Node, ...]:
        return (emit(torch.ops.npu.npu_swiglu.default, x, -1),)

    return Proposal((x,), (node,), (build,), (size, size // 2))


FORM = _SwiGlu()
