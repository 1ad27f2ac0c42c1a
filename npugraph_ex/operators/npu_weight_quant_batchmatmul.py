"""Matrix product with a weight that is int8 or int4 and scaled to floating point on the way.

Formula (operator documentation of ``torch_npu.npu_weight_quant_batchmatmul``)::

    w = (weight + antiquant_offset) * antiquant_scale              of the tensor, of each column, or of each group of rows
    y = x @ w + bias
    y = round(y * quant_scale + quant_offset) to int8               where there is a quant_scale

Int4 weights are packed in int32, see ``_int4``; ``npu_convert_weight_to_int4pack`` makes them. A weight that is transposed from
[n, k] has its scales transposed as well. An int64 ``quant_scale`` is one of ``npu_trans_quant_param``, with its offset, and so is
an int64 ``antiquant_scale``. ``weight_dtype`` names 4-bit floats and hifloat8 in uint8 (``_floating_products``).
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._floating_products import FloatingOperand, values_of
from npugraph_ex.operators._integers import matrix_of, offset_of, scale_of
from npugraph_ex.operators._precision import compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_weight_quant_batchmatmul"


def antiquantised(weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    """``(weight + offset) * scale`` for [..., k, n] and scales [1], [n], [1, n] or [groups, n]."""
    k = weight.shape[-2]
    if scale.dim() >= 2 and scale.shape[-2] > 1:
        rows = torch.arange(k, device=weight.device) // -(-k // scale.shape[-2])
        scale = scale[..., rows, :]
        offset = None if offset is None else offset[..., rows, :]
    values = weight.to(scale.dtype) if offset is None else weight.to(scale.dtype) + offset.to(scale.dtype)
    return values * scale


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_weight_quant_batchmatmul",
    source="operator documentation of torch_npu.npu_weight_quant_batchmatmul; aclnnWeightQuantBatchMatmulV3",
    covers={"inner_precise": (0, 1)},
    dtypes=(torch.float16, torch.bfloat16),
    first_factor=0,
    alike=Alike(
        shape=("antiquant_scale", "antiquant_offset"),
        dtype=("x", "antiquant_scale", "antiquant_offset", "bias"),
        besides={
            "antiquant_scale": (torch.int64, torch.float8_e8m0fnu),
            "antiquant_offset": (torch.int32,),
            "bias": (torch.float32,),
        },
    ),
    examples=(
        lambda: call(torch.randn(3, 16).half(), _small(16, 8), torch.rand(8).half(), torch.randn(8).half()),
        lambda: call(
            torch.randn(3, 64).half(),
            torch.randint(-(2**31), 2**31, (64, 1)).int(),
            torch.rand(2, 8).half(),
            bias=torch.randn(8).half(),
            antiquant_group_size=32,
        ),
        lambda: call(
            torch.randn(3, 16).half(),
            _small(16, 8),
            torch.rand(8).half(),
            quant_scale=torch.rand(8),
            quant_offset=torch.randn(8),
        ),
    ),
)
def npu_weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """[..., m, n] like x, or int8 with quant_scale. x: [..., m, k]; weight: [..., k, n] int8, or int32 with packed int4."""
    operand, k = FloatingOperand(weight, weight_dtype, None, "weight_dtype"), x.shape[-1]
    if not operand.floating and (weight_dtype is not None or weight.dtype not in {torch.int8, torch.int32}):
        only = "int8, int32 with packed int4, 8-bit floats, and uint8 with 4-bit floats or hifloat8"
        raise unsupported(_NAME, "weight and weight_dtype", (weight.dtype, weight_dtype), only)
    if not antiquant_scale.is_floating_point() and antiquant_scale.dtype != torch.int64:
        only = "floating-point tensors, and int64 ones of npu_trans_quant_param"
        raise unsupported(_NAME, "antiquant_scale", antiquant_scale.dtype, only)
    matrix = values_of(_NAME, operand, torch.float64, k) if operand.floating else matrix_of(weight, k)
    antiquant_scale = scale_of(antiquant_scale)
    groups = antiquant_scale.shape[-2] if antiquant_scale.dim() >= 2 else 1
    if antiquant_group_size and groups != -(-k // antiquant_group_size):
        raise ValueError(
            f"{_NAME}: with antiquant_group_size {antiquant_group_size} the {k} rows of weight make "
            f"{-(-k // antiquant_group_size)} groups; antiquant_scale has shape {tuple(antiquant_scale.shape)}."
        )
    wide = compute_dtype(x, antiquant_scale, bias)
    offset = None if antiquant_offset is None else antiquant_offset.to(wide)
    out = torch.matmul(x.to(wide), antiquantised(matrix, antiquant_scale.to(wide), offset))
    if bias is not None:
        out = out + bias.to(wide)
    if quant_scale is None:
        return out.to(x.dtype)
    out = out * scale_of(quant_scale).to(wide)
    shift = offset_of(quant_scale) if quant_offset is None else quant_offset
    return round_to_int8(out if shift is None else out + shift.to(wide))
