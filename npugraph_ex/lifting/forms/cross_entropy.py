"""Cross entropy of class indices, as an evaluation has it => `npu_cross_entropy_loss`; with a weight, and each reduction.

The operator takes a weight in float32 alone (CANN operator documentation, aclnnCrossEntropyLoss), so the loss
of half-precision logits with a weight, which eager mode takes in half precision, stays.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_REDUCTIONS = ("none", "mean", "sum")
"""By the number that torch gives them."""


def _build(reduction: int, ignored: int) -> Build:
    def build(emit: Emit, x: fx.Node, target: fx.Node, *weight: fx.Node) -> tuple[fx.Node, ...]:
        operands = (x, target, weight[0] if weight else None)
        made = emit(torch.ops.npu.npu_cross_entropy_loss.default, *operands, _REDUCTIONS[reduction], ignored)
        loss = emit(getitem, made, 0)
        return (emit(_aten.view.default, loss, []) if reduction else loss,)

    return build


class _CrossEntropy:
    """The form."""

    name = "lift_cross_entropy"
    ends_with = frozenset({getitem})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The loss that is ``node``."""
        loss = node.args[0]
        if node.args[1] != 0 or not terms.calls(loss, _aten.nll_loss_forward.default):
            return None
        given = terms.arguments(loss)
        softmax = terms.core(given["self"])
        if not terms.calls(softmax, _aten._log_softmax.default):  # noqa: SLF001 - the operator's name
            return Unlike(loss, f"the loss is of {softmax.name}, which is no logarithm of a softmax")
        x: Any = softmax.args[0]
        target, weight = given["target"], given["weight"]
        value = terms.tensor(x)
        if value is None or value.dim() != 2 or not terms.is_last(softmax.args[1], softmax):
            return Unlike(loss, "the softmax is not over the second of two dimensions")
        dtypes = {one.meta["val"].dtype for one in (x, weight, node) if one is not None}
        if dtypes - {value.dtype} or value.dtype not in _TAKEN:
            return Unlike(loss, f"logits, weight and loss are {', '.join(sorted(map(str, dtypes)))}")
        if weight is not None and value.dtype != torch.float32:
            return Unlike(loss, f"the weight is {value.dtype}; the operator takes torch.float32")
        operands = (x, target) if weight is None else (x, target, weight)
        build = _build(given["reduction"], given["ignore_index"])
        return Proposal(operands, (node,), (build,), sums_rows=True)


FORM = _CrossEntropy()
