"""``x * number + y`` => `add` with ``alpha``, one kernel for two, in any order; also ``y - x * number``.

The product is not rounded on its way to the sum (CANN operator documentation, aclnnAdd: ``out = self + alpha * other``). In
bfloat16 CANN multiplies and adds by two kernels on A2 and A3 (ops-math, ``math/add/op_api/aclnn_add.cpp``), which saves nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.fusion.rules.muls_add import is_exact
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Emit, Proposal

_aten = torch.ops.aten
_PRODUCTS = (_aten.mul.Tensor, _aten.mul.Scalar)
_TAKEN = (torch.float16, torch.float32)


class _ScaledSum:
    """The form."""

    name = "lift_scaled_sum"
    ends_with = frozenset({_aten.add.Tensor, _aten.sub.Tensor})

    def read(self, node: fx.Node) -> Proposal | None:
        """The sum that is ``node``."""
        if len(node.args) != 2 or node.kwargs:
            return None
        minus = node.target is _aten.sub.Tensor
        for scaled, other in (node.args[::-1],) if minus else (node.args[::-1], node.args):
            factor = terms.number(scaled.args[1]) if terms.calls(scaled, *_PRODUCTS) else None
            values = [terms.tensor(one) for one in (node, other, scaled.args[0] if factor is not None else None)]  # type: ignore[union-attr]
            if factor is not None and all(value is not None for value in values):
                dtypes = {value.dtype for value in values if value is not None}
                return _with_alpha(node, scaled.args[0], other, -factor if minus else factor, dtypes)  # type: ignore[union-attr,arg-type]
        return None


def _with_alpha(node: fx.Node, x: fx.Node, other: fx.Node, factor: float, dtypes: set[torch.dtype]) -> Proposal | None:
    dtype = node.meta["val"].dtype
    if dtypes != {dtype} or dtype not in _TAKEN or not is_exact(factor, dtype):  # alpha would be rounded to the dtype
        return None

    def build(emit: Emit, x: fx.Node, other: fx.Node) -> tuple[fx.Node, ...]:
        return (emit(_aten.add.Tensor, other, x, alpha=factor),)

    return Proposal((x, other), (node,), (build,), rounds_elsewhere=True)


FORM = _ScaledSum()
