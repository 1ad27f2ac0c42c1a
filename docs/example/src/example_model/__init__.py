"""A model that uses the NPU: a norm whose result is quantised, as at the entrance of an int8 layer."""

from __future__ import annotations

import torch
import torch_npu


class QuantisedNorm(torch.nn.Module):
    """Add the residual, normalise, and quantise each row to int8."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(size, dtype=torch.float16))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the int8 rows, their scales, and the sum."""
        y, _, added = torch_npu.npu_add_rms_norm(x, residual, self.gamma)
        quantised, scale = torch_npu.npu_dynamic_quant(y)
        return quantised, scale, added
