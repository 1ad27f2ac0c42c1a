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
_LOSS_OF_POSITIONS = _aten.nll_loss2d_forward.default
_LOSSES = (_aten.nll_loss_forward.default, _LOSS_OF_POSITIONS)


def _build(reduction: int, ignored: int, shape: torch.Size, sign: int = -1) -> Build:
    """The loss of each row, in ``shape``, or reduced; times minus ``sign``."""

    def build(emit: Emit, x: fx.Node, target: fx.Node, *weight: fx.Node) -> tuple[fx.Node, ...]:
        logits = x if x.meta["val"].dim() == 2 else emit(_aten.view.default, x, [-1, x.meta["val"].shape[-1]])
        classes = target if target.meta["val"].dim() == 1 else emit(_aten.view.default, target, [-1])
        operands = (logits, classes, weight[0] if weight else None)
        made = emit(torch.ops.npu.npu_cross_entropy_loss.default, *operands, _REDUCTIONS[reduction], ignored)
        loss = emit(getitem, made, 0)
        if reduction or len(shape) != 1:
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
    build = _build(reduction, _IGNORED, value.shape, found.sign)
    target = next((one for one in terms.reshaped_from(found.target) if one.meta["val"].dim() == 1), found.target)
    return Proposal((found.x, target), (node,), (build,), sums_rows=True)


def _is_log_softmax(node: fx.Node) -> bool:
    return terms.calls(node, LOG_SOFTMAX)


def _logits(softmax: fx.Node) -> fx.Node | None:
    """Logits [B, L, C] whose classes and positions changed places, as torch's loss wants them."""
    turned = terms.core(softmax.args[0])  # type: ignore[arg-type]
    value = terms.tensor(turned)
    if value is None or value.dim() != 3 or softmax.args[1] not in {1, -2}:
        return None
    dims = tuple(turned.args[1:]) if terms.calls(turned, _aten.transpose.int) else ()
    exchanged = {dim % 3 for dim in dims} == {1, 2}  # type: ignore[operator]
    if terms.calls(turned, _aten.permute.default):
        exchanged = [dim % 3 for dim in turned.args[1]] == [0, 2, 1]  # type: ignore[union-attr,operator]
    return turned.args[0] if exchanged else None  # type: ignore[return-value]


def _of_torchs_loss(node: fx.Node, loss: fx.Node, x: Any, given: dict[str, Any]) -> Proposal | Unlike:
    """The operator for torch's own loss of logits whose last dimension has the classes."""
    value, weight = x.meta["val"], given["weight"]
    dtypes = {one.meta["val"].dtype for one in (x, weight, node) if one is not None}
    if dtypes - {value.dtype} or value.dtype not in _TAKEN:
        return Unlike(loss, f"logits, weight and loss are {', '.join(sorted(map(str, dtypes)))}")
    if weight is not None and value.dtype != torch.float32:
        return Unlike(loss, f"the weight is {value.dtype}; the operator takes torch.float32")
    operands = (x, given["target"]) if weight is None else (x, given["target"], weight)
    build = _build(given["reduction"], given["ignore_index"], node.meta["val"].shape)
    return Proposal(operands, (node,), (build,), sums_rows=True)


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
        if node.args[1] != 0 or not terms.calls(loss, *_LOSSES):
            return None
        given = terms.arguments(loss)
        softmax = next(filter(_is_log_softmax, terms.reshaped_from(given["self"])), None)
        if softmax is None:
            return Unlike(loss, f"the loss is of {terms.core(given['self']).name}, which is no logarithm of a softmax")
        x = _logits(softmax) if loss.target is _LOSS_OF_POSITIONS else softmax.args[0]
        value = terms.tensor(x)
        if loss.target is _LOSS_OF_POSITIONS:
            if value is None or not _is_dense(value) or sum(not isinstance(size, int) for size in value.shape) > 1:
                return Unlike(
                    loss, "the classes, dimension 1, are not the last of dense logits [B, L, C] that were transposed"
                )
        elif value is None or value.dim() != 2 or not terms.is_last(softmax.args[1], softmax):
            return Unlike(loss, "the softmax is not over the second of two dimensions")
        return _of_torchs_loss(node, loss, x, given)


FORM = _CrossEntropy()
