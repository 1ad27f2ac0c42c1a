"""Gradients that torch_npu has as operators of their own and the CPU has not, by their derivatives."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.kernels.transforms import TRANSFORM_GRADIENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["GRADIENTS"]

_MEAN = 1
"""torch's number for `reduction="mean"`; "none" and "sum" pass the gradient on as it is."""


def _matmul(
    grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of `left @ right`, of any ranks and with broadcast batches, as far as `mask` wants them."""
    rows = left.unsqueeze(0) if left.dim() == 1 else left
    columns = right.unsqueeze(-1) if right.dim() == 1 else right
    if left.dim() == 1:
        grad = grad.unsqueeze(-1 if right.dim() == 1 else -2)
    if right.dim() == 1:
        grad = grad.unsqueeze(-1)
    to_left = (grad @ columns.mT).sum_to_size(rows.shape).reshape(left.shape) if mask[0] else None
    to_right = (rows.mT @ grad).sum_to_size(columns.shape).reshape(right.shape) if mask[1] else None
    return to_left, to_right


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
    """Return the derivative by the target; where that is not positive, log(target) counts as if it were constant."""
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


def _gather(
    grad: torch.Tensor,
    size: Sequence[int],
    dim: int,
    index: torch.Tensor,
    sparse_grad: bool,  # noqa: FBT001 - as above
) -> torch.Tensor:
    """Return the gradient of `gather`: each element of `grad` added where it was taken from."""
    del sparse_grad  # a hint, which gives a sparse result elsewhere
    return grad.new_zeros(size).scatter_add(dim, index, grad)


def _repeat_int(grad: torch.Tensor, given: torch.Tensor, repeats: int, dim: int | None = None) -> torch.Tensor:
    """Return the gradient of `repeat_interleave` by a number: the sum over each element's copies."""
    if dim is None:
        return grad.reshape(given.numel(), repeats).sum(-1).reshape(given.shape)
    behind = dim % given.dim() + 1
    return grad.reshape(*given.shape[:behind], repeats, *given.shape[behind:]).sum(behind)


def _repeat_tensor(
    grad: torch.Tensor, given: torch.Tensor, repeats: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    """Return the same where each element has a number of copies of its own."""
    size, place = (given.numel(), 0) if dim is None else (given.shape[dim], dim)
    source = torch.arange(size, device=grad.device).repeat_interleave(repeats.expand(size))
    found = grad.new_zeros((size,) if dim is None else given.shape).index_add(place, source, grad)
    return found.reshape(given.shape)


def _norm_slope(given: torch.Tensor, norm: torch.Tensor, p: float, dims: list[int]) -> torch.Tensor:
    """Return the derivative of the p-norm over `dims` by the elements that it is taken of."""
    if p == math.inf:
        largest = given.abs() == norm
        return given.sgn() * largest / largest.sum(dims, keepdim=True)
    return given.sgn() * torch.pow(given.abs() / norm, p - 1)


def _renorm(grad: torch.Tensor, given: torch.Tensor, p: float, dim: int, maxnorm: float) -> torch.Tensor:
    """Return the gradient of `renorm`, x * maxnorm / (|x|_p + 1e-7) in slices of `dim` whose norm is above `maxnorm`."""
    others = [other for other in range(given.dim()) if other != dim % given.dim()]
    norm = torch.linalg.vector_norm(given, p, others, keepdim=True)
    along = (given.conj() * grad).real.sum(others, keepdim=True)
    safe = norm + 1e-7
    scaled = maxnorm / safe * (grad - _norm_slope(given, norm, p, others) * along / safe)
    return torch.where(norm > maxnorm, scaled, grad)


def _dtype_cast(grad: torch.Tensor, dtype: torch.dtype, *ignored: object, **also_ignored: object) -> torch.Tensor:
    """Return the gradient in the dtype that was cast from."""
    del ignored, also_ignored
    return grad.to(dtype)


GRADIENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **TRANSFORM_GRADIENTS,
        "aten::matmul_backward": _matmul,
        "npu::npu_gather_backward": _gather,
        "npu::_npu_dtype_cast_backward": _dtype_cast,
        "npu::npu_dtype_cast_backward": _dtype_cast,
        "npu::repeat_interleave_backward_int": _repeat_int,
        "npu::repeat_interleave_backward_tensor": _repeat_tensor,
        "npu::npu_renorm_backward": _renorm,
        "npu::l1_loss_backward": _l1_loss,
        "npu::kl_div_backward": _kl_div,
        "npu::kl_div_target_backward": _kl_div_target,
        "npu::npu_binary_cross_entropy_with_logits_backward": _bce_with_logits,
    }
)
