"""Static quantisation of the ATB library, with a scale and an offset for the tensor or for each of its channels.

Formula (op-plugin's test of ``torch_npu._npu_quantize_per_tensor``; ATB library, Elewise, ELEWISE_QUANT_PER_CHANNEL)::

    y = round(x / scale) + zero_point       rounded half to even, saturated

``scale`` and ``zero_point`` broadcast to ``x``; an empty ``zero_point`` is none.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import HALVES, RefusedArgumentError, compute_dtype, round_to_int8
from npugraph_ex.operators._record import Operator, call

_NAME = "_npu_quantize_per_tensor"
_MOST_DIMENSIONS = 8


def _constraints(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, y: torch.Tensor) -> None:
    for tensor in (x, scale, zero_point, y):
        if tensor.dim() > _MOST_DIMENSIONS:
            raise RefusedArgumentError(f"{_NAME}: ATB tensor supports at most 8 dimensions, but got {tensor.dim()}.")


@Operator(
    name=f"atb::{_NAME}",
    source="op-plugin, ops/atb/QuantPerTensorAtb.cpp and its test; ATB library, Elewise, ELEWISE_QUANT_PER_CHANNEL",
    dtypes=HALVES,
    constraints=_constraints,
    examples=(
        lambda: call(
            torch.randn(2, 3, 16).half(), torch.full((16,), 0.5).half(), torch.randint(-5, 5, (16,)).to(torch.int8),
            torch.zeros(2, 3, 16, dtype=torch.int8),
        ),
    ),
)  # fmt: skip
def npu_quantize_per_tensor(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, y: torch.Tensor) -> None:
    """Write to ``y``, int8 of the shape of ``x``; ``zero_point`` is int8."""
    wide = compute_dtype(x, scale)
    quotient = (x.to(wide) / scale.to(wide)).round()
    y.copy_(round_to_int8(quotient if zero_point.numel() == 0 else quotient + zero_point.to(wide)))
