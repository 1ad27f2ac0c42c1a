"""RMS normalisation and static quantisation in one operator, two versions.

Formula (CANN operator documentation, aclnnRmsNormQuant and aclnnRmsNormQuantV3)::

    n = x / sqrt(mean(x_i^2) + epsilon) * gamma + beta          mean over the last dimension
    y = round(n / scale + offset)                               half to even, saturated;  n * scale in v2 without div_mode

The operator documentation of ``torch_npu.npu_rms_norm_quant`` writes a product with the scale; CANN's document and op-plugin's
test divide, and so does this formula. Int4 outputs (``torch.quint4x2``) are packed, eight in one int32; hifloat8
lies in uint8.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._hifloat8 import HIFLOAT8, encode
from npugraph_ex.operators._int4 import INT4, pack
from npugraph_ex.operators._precision import HALVES, compute_dtype, round_to, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_quantize import affine
from npugraph_ex.operators.npu_rms_norm import normalise

_OUTPUTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _normalised(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(n, rstd)`` in the precision of the computation; gamma and beta are [N] or [1, N]."""
    dtype = compute_dtype(x, gamma, beta)
    n, rstd = normalise(x, gamma.reshape(-1), epsilon, dtype)
    return (n if beta is None else n + beta.reshape(-1).to(dtype)), rstd


def _stored(operator: str, quotient: torch.Tensor, dst_dtype: int | torch.dtype | None) -> torch.Tensor:
    """The rounded output, contiguous."""
    if dst_dtype in INT4:
        return pack(operator, round_to(torch.int8, quotient))
    if dst_dtype == HIFLOAT8:
        return encode(quotient, saturate=True).contiguous()
    target = torch.int8 if dst_dtype is None else dtype_of(dst_dtype, operator, "dst_dtype")
    if target not in _OUTPUTS:
        raise unsupported(
            operator, "dst_dtype", dst_dtype, f"None, torch.quint4x2, {HIFLOAT8}, {', '.join(map(str, _OUTPUTS))}"
        )
    return round_to(target, quotient).contiguous()


@Operator(
    name="npu::npu_rms_norm_quant",
    dtypes=HALVES,
    source="CANN operator documentation, aclnnRmsNormQuant; operator documentation of torch_npu.npu_rms_norm_quant",
    alike=Alike(dtype=("x", "gamma", "beta", "scale"), besides={"scale": (torch.float32,)}),
    examples=(
        lambda: call(
            torch.randn(3, 16).half(),
            *(torch.randn(16).half() for _ in range(2)),
            torch.tensor([0.1]).half(),
            torch.tensor([3], dtype=torch.int8),
        ),
        lambda: call(
            torch.randn(3, 16).bfloat16(),
            *(torch.randn(1, 16).bfloat16() for _ in range(2)),
            torch.tensor([0.1]).bfloat16(),
            torch.tensor([3], dtype=torch.int8),
            dst_dtype=16,
        ),
    ),
)
def npu_rms_norm_quant(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    epsilon: float = 1e-6,
    *,
    dst_dtype: int | None = None,
) -> torch.Tensor:
    """Of the shape of ``x``, contiguous: int8 or an 8-bit float, or int32 with an eighth of its last dimension for int4."""
    n, _ = _normalised(x, gamma, beta, epsilon)
    return _stored("npu_rms_norm_quant", affine(n, scale, offset, divide=True), dst_dtype)


@Operator(
    name="npu::npu_rms_norm_quant_v2",
    dtypes=HALVES,
    source="CANN operator documentation, aclnnRmsNormQuantV3",
    alike=Alike(dtype=("x", "gamma", "beta", "scale"), besides={"scale": (torch.float32,)}),
    examples=(
        lambda: call(
            torch.randn(3, 16).half(),
            torch.randn(16).half(),
            torch.rand(16) + 0.5,
            offset=torch.ones(16),
            beta=torch.ones(16).half(),
        ),
    ),
)
def npu_rms_norm_quant_v2(
    x: torch.Tensor,
    gamma: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)``: y as in ``npu_rms_norm_quant``; rstd float32, 1 in the last dimension. scale and offset are [1] or [N]."""
    n, rstd = _normalised(x, gamma, beta, epsilon)
    quotient = affine(n, scale.reshape(-1), None if offset is None else offset.reshape(-1), divide=div_mode)
    return _stored("npu_rms_norm_quant_v2", quotient, dst_dtype), rstd.contiguous()
