"""Gradient operators of torch_npu without a CPU kernel, from their derivatives."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.kernels.widening import rounding_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["GRADIENTS"]

_MEAN = 1
"""torch's number for `reduction="mean"`; "none" and "sum" do not change the gradient."""


def _matmul(
    grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of `left @ right`, of any ranks and with broadcast batches; `mask` selects them.

    The device sums a gradient over the other factor's batches only for a factor that is one matrix. Otherwise autograd does,
    so that a gradient may have more dimensions than its factor; torch_npu's meta function says the same.
    """
    rows, columns = left, right
    if right.dim() == 1:
        columns, grad = right.unsqueeze(-1), grad.unsqueeze(-1)
    if left.dim() == 1:
        rows, grad = left.unsqueeze(0), grad.unsqueeze(-2)
    to_left = to_right = None
    if mask[0]:
        to_left = grad @ columns.mT
        if columns.dim() > 2 and _is_one_matrix(rows):
            to_left = to_left.sum_to_size(rows.shape).reshape(left.shape)
    if mask[1]:
        to_right = rows.mT @ grad
        if rows.dim() > 2 and _is_one_matrix(columns):
            to_right = to_right.sum_to_size(columns.shape).reshape(right.shape)
        elif right.dim() == 1:
            to_right = to_right.squeeze(-1)
    return to_left, to_right


def _is_one_matrix(factor: torch.Tensor) -> bool:
    return math.prod(factor.shape[:-2]) == 1


def _cdist(
    grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """Return the gradient by `left`; for p = inf of differences not below the distance, which may be rounded and equal none."""
    if p != math.inf:
        found: torch.Tensor = torch.ops.aten._cdist_backward(grad.contiguous(), left, right, p, distances)  # noqa: SLF001
        return found
    differences = left.unsqueeze(-2) - right.unsqueeze(-3)
    largest = differences.abs() >= distances.unsqueeze(-1)
    return (grad.unsqueeze(-1) * differences.sign() * largest).sum(-2)


def _reduced(gradient: torch.Tensor, reduction: int) -> torch.Tensor:
    return gradient / gradient.numel() if reduction == _MEAN else gradient


def _l1_loss(grad: torch.Tensor, given: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    """Return grad * sign(given - target), the derivative of |given - target|."""
    return _reduced(grad * torch.sign(given - target), reduction)


def _kl_div(
    grad: torch.Tensor, given: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN, *, log_target: bool = False
) -> torch.Tensor:
    """Return -grad * target: the loss is target * (log(target) - given), and 0 where target is not positive."""
    weight = target.exp() if log_target else target.clamp(min=0)
    return _reduced((-grad * weight).expand_as(given), reduction)


def _kl_div_target(
    grad: torch.Tensor, given: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN, *, log_target: bool = False
) -> torch.Tensor:
    """Return the derivative by the target; where that is not positive, log(target) counts as constant."""
    if log_target:
        return _reduced(grad * target.exp() * (target - given + 1), reduction)
    return _reduced(grad * (torch.where(target > 0, torch.log(target) + 1, 0) - given), reduction)


def _bce_with_logits(
    grad: torch.Tensor,
    given: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    pos_weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    """Return the derivative of -w (p t log s + (1 - t) log(1 - s)) with s = sigmoid(given), p = pos_weight, t = target."""
    positive = target if pos_weight is None else pos_weight * target
    slope = (positive + 1 - target) * torch.sigmoid(given) - positive
    return _reduced(grad * slope if weight is None else grad * slope * weight, reduction)


_BY_NAME: Mapping[str, Callable[..., Any]] = {
    "aten::_cdist_backward": _cdist,
    "aten::matmul_backward": _matmul,
    "npu::l1_loss_backward": _l1_loss,
    "npu::kl_div_backward": _kl_div,
    "npu::kl_div_target_backward": _kl_div_target,
    "npu::npu_binary_cross_entropy_with_logits_backward": _bce_with_logits,
}
GRADIENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: rounding_once(gradient) for name, gradient in _BY_NAME.items()}
)
