"""Residual sum, RMS normalisation and up to two static quantisations in one operator.

Formula (CANN operator documentation, aclnnAddRmsNormQuant and its V2)::

    x   = x1 + x2
    y   = x / sqrt(mean(x_i^2) + epsilon) * gamma + beta
    y_k = round(y / scales_k + zero_points_k)       div_mode=True;  half to even, saturated
    y_k = round(y * scales_k + zero_points_k)       div_mode=False

In the published AscendC kernels (ops-nn, norm/add_rms_norm_quant) float16 sums and norms are rounded to float16 on the
way, as in ``npu_add_rms_norm``; bfloat16 ones stay in float32 up to the quotient (with ``beta`` the sum is rounded).
So in bfloat16 the operator is more accurate than ``npu_add_rms_norm`` followed by ``npu_quantize``, and the two may
differ by one step near a tie.

The second quantisation exists when ``scales2`` is given; without it the meta function still allocates y2, and nothing
is written there on the device. Here it is zeros.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._hifloat8 import HIFLOAT8, encode
from npugraph_ex.operators._precision import compute_dtype, round_to, rounded, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_quantize import affine
from npugraph_ex.operators.npu_rms_norm import normalise

_NAME = "npu_add_rms_norm_quant"
_ThreeTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


_OUTPUTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


def _target(dst_type: int | None) -> torch.dtype:
    """The dtype of the quantised outputs; uint8 holds hifloat8."""
    if dst_type == HIFLOAT8:
        return torch.uint8
    if dst_type == 0:  # uint8 itself
        raise unsupported(_NAME, "dst_type", dst_type, f"None, {', '.join(map(str, _OUTPUTS[:-1]))}, {HIFLOAT8}")
    return torch.int8 if dst_type is None else dtype_of(dst_type, _NAME, "dst_type")


def _refuse(axis: int, dst_type: int | None, scales2: torch.Tensor | None, zero_points2: torch.Tensor | None) -> None:
    """Raise for what the documentation forbids or the formula does not cover."""
    if axis != -1:
        raise ValueError(f"{_NAME}: axis must be -1, the only one documented; it is {axis}.")
    if _target(dst_type) not in _OUTPUTS:
        raise unsupported(_NAME, "dst_type", dst_type, f"None, {', '.join(map(str, _OUTPUTS[:-1]))}, {HIFLOAT8}")
    if zero_points2 is not None and scales2 is None:
        raise ValueError(f"{_NAME}: zero_points2 needs scales2; pass both.")


def before_rounding(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    beta: torch.Tensor | None = None,
    scales2: torch.Tensor | None = None,
    zero_points2: torch.Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> _ThreeTensors:
    """As the operator, with float32 (float64 for float64 inputs) values in place of y1 and y2."""
    _refuse(axis, dst_type, scales2, zero_points2)
    dtype = compute_dtype(x1, x2, gamma, scales1, beta)
    total = x1.to(dtype) + x2.to(dtype)
    # This operator's meta function allocates every output contiguous, whatever the layout of x1.
    x = stored_like(torch.empty(x1.shape, device=x1.device), total, x1.dtype)
    unrounded = x1.dtype == torch.bfloat16 and beta is None
    y, _ = normalise(total if unrounded else x, gamma, epsilon, dtype)
    if x1.dtype == torch.float16:
        y = y.to(torch.float16).to(dtype)
    if beta is not None:
        y = y + beta.to(dtype)
    first = affine(y, scales1, zero_points1, divide=div_mode)
    second = torch.zeros_like(first) if scales2 is None else affine(y, scales2, zero_points2, divide=div_mode)
    return first.contiguous(), second.contiguous(), x


def _store(target: torch.dtype, quotient: torch.Tensor) -> torch.Tensor:
    return encode(quotient, saturate=True) if target == torch.uint8 else round_to(target, quotient)


npu_add_rms_norm_quant = Operator(
    name="npu::npu_add_rms_norm_quant",
    source="CANN operator documentation, aclnnAddRmsNormQuantV2",
    dtypes=(torch.float16, torch.bfloat16),
    before_rounding=before_rounding,
    synonyms={"dst_type": {1: None}},
    alike=Alike(shape=("x1", "x2"), dtype=("x1", "x2", "gamma", "beta")),
    examples=(
        lambda: call(
            torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.randn(16).half(), torch.rand(16) + 0.5, None
        ),
    ),
)(rounded(before_rounding, results=2, target=lambda kwargs: _target(kwargs.get("dst_type")), store=_store))
"""``(y1, y2, x)`` of the shape of ``x1``, contiguous: y1 and y2 int8, 8-bit floats, or hifloat8 in uint8; x like ``x1``."""
