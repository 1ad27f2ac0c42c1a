"""The gradient of `matmul` as one operator, which torch_npu has and the CPU has not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["matmul_backward"]


def matmul_backward(
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
