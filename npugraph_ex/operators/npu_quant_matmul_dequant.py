"""Quantises rows to int8, multiplies them with an int8 weight, and scales back; of one weight, or of one for each group of rows.

Formula (CANN operator documentation, aclnnQuantMatmulDequant and aclnnQuantGroupedMatmulDequant)::

    x       = x * smooth_scale
    x_scale = max(abs(x)) / 127 of each row, where none is given
    q       = round(x / x_scale)                                       half to even, saturated
    out     = (q @ weight^T + bias) * weight_scale * x_scale

In groups, the rows up to ``group_list[g]`` take weight, scales and bias g. Rows behind the last group are 0.

Not covered: ``x_offset``, and per-tensor quantisation without ``x_scale``.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._integers import product
from npugraph_ex.operators._precision import compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._routing import dynamic_quotient

_NAME = "npu_quant_matmul_dequant"
_GROUPED = "npu_quant_grouped_matmul_dequant"


def _refuse(name: str, x_scale: torch.Tensor | None, x_offset: torch.Tensor | None, quant_mode: str | None) -> None:
    if x_offset is not None:
        raise unsupported(name, "x_offset", "a tensor", "None")
    if quant_mode not in {"pertoken", "pertensor"} or (quant_mode == "pertensor" and x_scale is None):
        raise unsupported(name, "quant_mode", quant_mode, "'pertoken', and 'pertensor' with x_scale")


def _multiplied(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    smooth: torch.Tensor | None,
) -> torch.Tensor:
    """x: [m, k]; weight: [n, k]; weight_scale, bias: [n]; x_scale: [m] or [1]; smooth: [k]. [m, n] like x."""
    wide = compute_dtype(x, weight_scale)
    rows = x.to(wide) if smooth is None else x.to(wide) * smooth.to(wide)
    if x_scale is None:
        quotient, scales = dynamic_quotient(rows)
    else:
        scales = x_scale.to(wide).reshape(-1)
        quotient = rows / scales.unsqueeze(-1)
    total = product(round_to_int8(quotient), weight.t())
    total = total if bias is None else total + bias
    return (total.to(wide) * weight_scale.to(wide) * scales.unsqueeze(-1)).to(x.dtype)


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_quant_matmul_dequant",
    source="CANN operator documentation, aclnnQuantMatmulDequant",
    absent_on=("A2", "A3", "950"),
    dtypes=(torch.float16,),
    examples=(
        lambda: call(torch.randn(3, 16).half(), _small(8, 16), torch.rand(8)),
        lambda: call(
            torch.randn(3, 16).half(),
            _small(8, 16),
            torch.rand(8),
            x_scale=torch.tensor([0.02]),
            quant_mode="pertensor",
        ),
    ),
)
def npu_quant_matmul_dequant(
    x: torch.Tensor,
    quantized_weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    x_offset: torch.Tensor | None = None,
    smooth_scale: torch.Tensor | None = None,
    quant_mode: str | None = "pertoken",
) -> torch.Tensor:
    """[m, n] like x. x: [m, k] float16; quantized_weight: [n, k] int8; weight_scale: [n] float32; bias: [n] int32."""
    _refuse(_NAME, x_scale, x_offset, quant_mode)
    return _multiplied(x, quantized_weight, weight_scale, bias, x_scale, smooth_scale)


@Operator(
    name="npu::npu_quant_grouped_matmul_dequant",
    source="CANN operator documentation, aclnnQuantGroupedMatmulDequant",
    dtypes=(torch.float16,),
    examples=(lambda: call(torch.randn(5, 16).half(), _small(2, 8, 16), torch.rand(2, 8), torch.tensor([2, 5])),),
)
def npu_quant_grouped_matmul_dequant(
    x: torch.Tensor,
    quantized_weight: torch.Tensor,
    weight_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    x_offset: torch.Tensor | None = None,
    smooth_scale: torch.Tensor | None = None,
    quant_mode: str | None = "pertoken",
) -> torch.Tensor:
    """[m, n] like x. x: [m, k] float16; quantized_weight: [g, n, k] int8; weight_scale: [g, n]; group_list: [g], the ends."""
    _refuse(_GROUPED, x_scale, x_offset, quant_mode)
    out = x.new_zeros(x.shape[0], weight_scale.shape[1])
    start = 0
    for group, end in enumerate(group_list.tolist()):
        rows = slice(start, end)
        own = x_scale if x_scale is None or x_scale.numel() == 1 else x_scale.reshape(-1)[rows]
        smooth = smooth_scale if smooth_scale is None or smooth_scale.dim() == 1 else smooth_scale[group]
        each = None if bias is None else bias[group]
        out[rows] = _multiplied(x[rows], quantized_weight[group], weight_scale[group], each, own, smooth)
        start = end
    return out
