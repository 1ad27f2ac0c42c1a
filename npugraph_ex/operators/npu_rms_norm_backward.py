"""The gradients of RMS normalisation, the first quantised on demand.

Formula (CANN operator documentation, aclnnRmsNormGrad), with n the normalised elements of a row::

    x^     = x * rstd
    dx     = (dy * gamma - x^ * mean(dy * gamma * x^)) * rstd       mean over the dimensions that gamma has
    dgamma = sum(dy * x^)                                           over the other dimensions

    quantised (aclnnRmsNormGradQuant): round(dx / scale_x + offset_x), or dx * scale_x without div_mode
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS, compute_dtype, round_to, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_quantize import affine


@Operator(
    name="npu::npu_rms_norm_backward",
    source="CANN operator documentation, aclnnRmsNormGrad",
    dtypes=FLOATS,
    floats_only=True,
    alike=Alike(shape=("dy", "input"), dtype=("dy", "input", "gamma"), besides={"gamma": (torch.float32,)}),
    examples=(
        lambda: call(
            torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.randn(16).half(), torch.rand(3, 1) + 0.5
        ),
    ),
)
def npu_rms_norm_backward(
    dy: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gamma: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx, dgamma)``: dx like ``input``; dgamma in the shape of ``gamma``, float32 (float64 for float64)."""
    dx, dgamma = _gradients(dy, input, gamma, rstd)
    return stored_like(input, dx, input.dtype), dgamma


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx, dgamma)`` in the precision of the computation."""
    dtype = compute_dtype(dy, x, gamma)
    rank = gamma.dim()
    if rstd.dim() < x.dim():
        rstd = rstd.reshape(*rstd.shape, *(1 for _ in range(x.dim() - rstd.dim())))
    normal = x.to(dtype) * rstd.to(dtype)
    wide = dy.to(dtype)
    scaled = wide * gamma.to(dtype)
    mean = (scaled * normal).mean(dim=tuple(range(-rank, 0)), keepdim=True)
    dx = (scaled - normal * mean) * rstd.to(dtype)
    dgamma = wide * normal
    for _ in range(x.dim() - rank):
        dgamma = dgamma.sum(0)
    return dx, dgamma


_QUANT = "_npu_rms_norm_backward_quant"
_OUTPUTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@Operator(
    name="npu::_npu_rms_norm_backward_quant",
    source="CANN operator documentation, aclnnRmsNormGradQuant",
    absent_on=("A2", "A3"),
    alike=Alike(
        shape=("dy", "x"),
        dtype=("dy", "x", "gamma", "scale_x"),
        besides={"gamma": (torch.float32,), "scale_x": (torch.float32,)},
    ),
    examples=(
        lambda: call(
            *(torch.randn(3, 16).half() for _ in range(2)),
            torch.rand(3) + 0.5,
            torch.randn(16).half(),
            torch.tensor([0.1]),
        ),
    ),
)
def _npu_rms_norm_backward_quant(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    gamma: torch.Tensor,
    scale_x: torch.Tensor,
    *,
    offset_x: torch.Tensor | None = None,
    div_mode: bool | None = True,
    quant_mode: str = "static",
    dst_type: int | None = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx, dgamma)``: dx of 8 bits and the shape of ``dy``, contiguous; dgamma as in ``npu_rms_norm_backward``."""
    target = torch.int8 if dst_type is None else dtype_of(dst_type, _QUANT, "dst_type")
    if target not in _OUTPUTS:
        raise unsupported(_QUANT, "dst_type", dst_type, ", ".join(map(str, _OUTPUTS)))
    if quant_mode != "static":
        raise unsupported(_QUANT, "quant_mode", quant_mode, "'static'")
    dx, dgamma = _gradients(dy, x, gamma, rstd)
    return round_to(target, affine(dx, scale_x, offset_x, divide=div_mode is not False)).contiguous(), dgamma
