"""Cross entropy of class indices, as an evaluation has it => `npu_cross_entropy_loss`; with a weight, and each reduction.

It is torch's own loss, or the logarithms of `_chosen_logarithms.py`, as they are, or their mean or sum. Those have no class that is
ignored, so the operator ignores -100, which `gather` refuses.

The operator takes a weight in float32 alone (CANN operator documentation, aclnnCrossEntropyLoss), so the loss
of half-precision logits with a weight, which eager mode takes in half precision, stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._chosen_logarithms import LOG_SOFTMAX, ChosenLogarithm, chosen_logarithm, minus_of
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_REDUCTIONS = ("none", "mean", "sum")
"""By the number that torch gives them."""
_NONE, _MEAN, _SUM = range(3)
_REDUCED = {
    _aten.mean.default: _MEAN, _aten.mean.dim: _MEAN, _aten.sum.default: _SUM, _aten.sum.dim_IntList: _SUM,
}  # fmt: skip
_IGNORED = -100


def _build(reduction: int, ignored: int) -> Build:
    def build(emit: Emit, x: fx.Node, target: fx.Node, *weight: fx.Node) -> tuple[fx.Node, ...]:
        operands = (x, target, weight[0] if weight else None)
        made = emit(torch.ops.npu.npu_cross_entropy_loss.default, *operands, _REDUCTIONS[reduction], ignored)
        loss = emit(getitem, made, 0)
        return (emit(_aten.view.default, loss, []) if reduction else loss,)

    return build


def _build_of_rows(reduction: int, sign: int, shape: torch.Size) -> Build:
    """The loss of each row, in ``shape``, or reduced; times minus ``sign``."""
    loss_of = _build(reduction, _IGNORED)

    def build(emit: Emit, x: fx.Node, target: fx.Node) -> tuple[fx.Node, ...]:
        logits = x if x.meta["val"].dim() == 2 else emit(_aten.view.default, x, [-1, x.meta["val"].shape[-1]])
        classes = target if target.meta["val"].dim() == 1 else emit(_aten.view.default, target, [-1])
        (loss,) = loss_of(emit, logits, classes)
        if not reduction and len(shape) != 1:
            loss = emit(_aten.view.default, loss, [size if isinstance(size, int) else -1 for size in shape])
        return (loss if sign < 0 else emit(_aten.neg.default, loss),)

    return build


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a view can join the dimensions before the last."""
    strides, sizes = value.stride(), value.shape
    return all(
        terms.same_size(sizes[dim], 1) or terms.same_size(strides[dim], sizes[dim + 1] * strides[dim + 1])
        for dim in range(value.dim() - 2)
    )


def _of_rows(node: fx.Node) -> Proposal | Unlike | None:
    """The loss of logarithms that are chosen by `gather`."""
    value = node.meta["val"]
    minus = minus_of(node)
    whole = node if minus is None else minus
    reduction = _NONE if value.dim() else _REDUCED.get(whole.target, _NONE)  # type: ignore[call-overload]
    # A mean of minus the logarithms, or minus their mean.
    found = chosen_logarithm(whole.args[0] if reduction else node)  # type: ignore[arg-type]
    if reduction and minus is not None and isinstance(found, ChosenLogarithm):
        found = replace(found, sign=-found.sign)
    if not isinstance(found, ChosenLogarithm):
        return found
    x = terms.tensor(found.x)
    if x is None or x.dtype not in _TAKEN or x.dtype != value.dtype:
        return Unlike(node, f"logits and loss are {x.dtype if x is not None else None} and {value.dtype}")
    if sum(not isinstance(size, int) for size in x.shape[:-1]) > 1 or not isinstance(x.shape[-1], int):
        return Unlike(node, f"the logits are {list(x.shape)}, of more than one symbol")
    if not _is_dense(x):
        return Unlike(
            node, f"the logits are {list(x.shape)} with strides {list(x.stride())}, and no view joins their rows"
        )
    build = _build_of_rows(reduction, found.sign, value.shape)
    target = next((one for one in terms.reshaped_from(found.target) if one.meta["val"].dim() == 1), found.target)
    return Proposal((found.x, target), (node,), (build,), sums_rows=True)


class _CrossEntropy:
    """The form."""

    name = "lift_cross_entropy"
    ends_with: frozenset[Callable[..., Any]] = frozenset(
        {getitem, _aten.neg.default, _aten.sub.Tensor, _aten.gather.default, _aten.index.Tensor, *_REDUCED}
    )

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The loss that is ``node``."""
        if node.target is not getitem:
            return _of_rows(node)
        loss = node.args[0]
        if node.args[1] != 0 or not terms.calls(loss, _aten.nll_loss_forward.default):
            return None
        given = terms.arguments(loss)
        softmax = terms.core(given["self"])
        if not terms.calls(softmax, LOG_SOFTMAX):
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
