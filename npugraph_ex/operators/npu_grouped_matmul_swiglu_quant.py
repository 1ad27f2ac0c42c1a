"""Quantised products of groups of rows with a matrix each, SwiGLU, and dynamic quantisation.

Formula (operator documentation of ``torch_npu.npu_grouped_matmul_swiglu_quant_v2``), for the rows of group i::

    c         = (x @ weight) * weight_scale * x_scale
    int8 x with int4 weight:   c = ((x - 8) @ (weight * weight_scale) + assist) * x_scale
    act, gate = c split in halves
    s         = act * sigmoid(act) * gate * smooth_scale
    scale     = max(abs(s)) / largest of each row;   out = round(s / scale)        127 for int8, 448, 57344, 32768 for hifloat8

``assist`` is ``weight_assist_matrix``, and ``bias`` in the first version. Rows behind the last group are 0.

A weight of five dimensions lies in the order of the cube unit (NZ). 8-bit and 4-bit floating operands, with powers of two of 32
elements or with scales of rows and columns: ``_floating_products``. With ``quant_mode`` 2 each 32 elements of out have a power of
two, as from ``npu_dynamic_mx_quant``; two 4-bit elements lie in one byte, so that out has n / 4 bytes in a row, as op-plugin
allocates. Not covered: ``offset``, ``bias``, lists of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._floating_products import FLOAT8, FloatingOperand, floating_product
from npugraph_ex.operators._grouped import Factors, multiplied, spans
from npugraph_ex.operators._hifloat8 import HIFLOAT8, LARGEST, encode
from npugraph_ex.operators._microscaling import block_quantisation, quantised
from npugraph_ex.operators._precision import FLOATS, compute_dtype, largest_of, refused, round_to, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._scalar_types import CODES, dtype_of

_NAME = "npu_grouped_matmul_swiglu_quant"
_V2 = f"{_NAME}_v2"
_BLOCKS = 2
"""The mode of powers of two for each 32 elements."""
_DEQUANTISED = (None, 0, 1, 5, 6, 15, *FLOATS)
"""What may name the dtype of c, which is not rounded here; 0 and 1 (int8) are documented defaults."""


def _in_rows(weight: torch.Tensor) -> torch.Tensor:
    """[groups, k, n] of a weight in the order of the cube unit: [groups, n / n0, k / 16, 16, n0]."""
    return weight.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2) if weight.dim() == 5 else weight


def _activated(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    groups: tuple[torch.Tensor, int | None],
    assist: torch.Tensor | None = None,
    smooth: torch.Tensor | None = None,
    codes: tuple[int | None, int | None] = (None, None),
) -> torch.Tensor:
    """``s`` [m, n / 2]; ``scales`` are those of weight and x, ``groups`` the list and its type, ``codes`` their dtypes."""
    weight = _in_rows(weight)
    floating = FloatingOperand(x, codes[0], None, "x_dtype").floating
    if weight.dim() != 3:
        raise unsupported(
            name, "weight", f"a tensor of {weight.dim()} dimensions", "tensors [groups, k, n], in NZ with 5"
        )
    if not floating and (x.dtype not in {torch.int8, torch.int32} or weight.dtype not in {torch.int8, torch.int32}):
        raise unsupported(name, "x and weight", (x.dtype, weight.dtype), "int8, int32 with packed int4, and float8")
    weight_scale, x_scale = scales
    wide = compute_dtype(*(scale for scale in scales if scale.is_floating_point()))
    powers = weight_scale.element_size() == 1
    out = torch.zeros(x.shape[0], weight_scale.shape[-2 if powers else -1] // 2, dtype=wide, device=x.device)
    if groups[0].is_meta:  # only the shape is wanted
        return out
    for group, start, end in spans(name, groups[0], groups[1], x.shape[0], weight.shape[0]):
        if floating:
            left = FloatingOperand(x[start:end], codes[0], x_scale[start:end], "x_dtype")
            right = FloatingOperand(weight[group], codes[1], weight_scale[group], "weight_dtype")
            c = floating_product(name, left, right, wide)
        else:
            bias = None if assist is None else assist[group]
            token = x_scale.reshape(-1)[start:end]
            c = multiplied(x[start:end], Factors(weight[group], bias, weight_scale[group], None, token))
        act, gate = c.chunk(2, -1)
        s = torch.nn.functional.silu(act) * gate
        out[start:end] = s if smooth is None else s * smooth[group].to(wide)
    return out


def _quantised(s: torch.Tensor, target: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, scale)``: each row divided by its scale, with which its largest number becomes that of ``target``, or hifloat8."""
    scale = s.abs().amax(-1) / (LARGEST if target is None else largest_of(target))
    quotient = torch.where(scale.unsqueeze(-1) == 0, 0.0, s / scale.unsqueeze(-1))
    return encode(quotient, saturate=True) if target is None else round_to(target, quotient), scale


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


def _blocks_example() -> Call:
    """4-bit floats with powers of two of 32 elements."""
    x, weight = (torch.randint(0, 256, size).to(torch.uint8) for size in ((5, 32), (2, 64, 64)))
    powers = [torch.randint(124, 130, size).to(torch.uint8) for size in ((2, 1, 128, 2), (5, 1, 2))]
    named = {"x_dtype": 296, "weight_dtype": 296, "x_scale_dtype": 293, "weight_scale_dtype": 293}
    modes = {"quant_mode": 2, "dequant_mode": 2, "quant_dtype": 23, "smooth_scale": torch.rand(2, 64)}
    return call(x, [weight], powers[:1], powers[1], torch.tensor([2, 4]), **named, **modes)


@Operator(
    name="npu::npu_grouped_matmul_swiglu_quant",
    source="operator documentation of torch_npu.npu_grouped_matmul_swiglu_quant_v2",
    dtypes=(torch.float32,),
    examples=(lambda: call(_small(5, 16), _small(2, 16, 8), torch.tensor([2, 5]), torch.rand(2, 8), torch.rand(5)),),
)
def npu_grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out int8 [m, n / 2], scale float32 [m], an unwritten number, 0 here)``.

    x: [m, k] int8; weight: [groups, k, n] int8, or int32 [groups, k, n / 8] with packed int4; group_list: [groups], the ends;
    weight_scale: [groups, n] or [groups, parts, n], float32 or int64 with its bits; x_scale: [m] float32; bias: [groups, n].
    """
    if offset is not None:
        raise unsupported(_NAME, "offset", "a tensor", "None")
    out, scale = _quantised(_activated(_NAME, x, weight, (weight_scale, x_scale), (group_list, 0), bias), torch.int8)
    return out, scale, scale.new_zeros(())


@Operator(
    name="npu::npu_grouped_matmul_swiglu_quant_v2",
    source="operator documentation of torch_npu.npu_grouped_matmul_swiglu_quant_v2",
    covers={
        "x_dtype": (None, *CODES),
        "weight_dtype": (None, *CODES),
        "x_scale_dtype": (None, *CODES),
        "weight_scale_dtype": (None, *CODES),
    },
    dtypes=(torch.float32,),
    examples=(
        lambda: call(
            _small(5, 16), [_small(2, 16, 8)], [torch.rand(2, 8)], torch.rand(5), torch.tensor([2, 3]), group_list_type=1
        ),
        lambda: call(
            _small(5, 16), [torch.randint(-(2**31), 2**31, (2, 16, 1)).int()], [torch.rand(2, 2, 8)], torch.rand(5),
            torch.tensor([2, 4]), weight_assist_matrix=[torch.randn(2, 8)],
        ),
        _blocks_example,
    ),
)  # fmt: skip
def npu_grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    smooth_scale: torch.Tensor | None = None,
    weight_assist_matrix: Sequence[torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 6,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 1,
    group_list_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    weight_scale_dtype: int | None = None,
    x_scale_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out [m, n / 2] of quant_dtype, scale float32 [m])``. x: also packed int4; smooth_scale: [groups, n / 2] or [groups]."""
    if bias is not None:
        raise unsupported(_V2, "bias", "a tensor", "None")
    if dequant_dtype not in _DEQUANTISED:
        raise refused(_V2, "dequant_dtype", dequant_dtype, "float32, float16 or bfloat16, or 0 or int8 for the default")
    blocks = quant_mode == _BLOCKS
    if (quant_mode or 0) not in {0, _BLOCKS} or (dequant_mode or 0) not in {0, 1, _BLOCKS}:
        raise unsupported(_V2, "quant_mode and dequant_mode", (quant_mode, dequant_mode), "0 and 2, and 0, 1 and 2")
    if len(weight) != 1 or len(weight_scale) != 1:
        raise unsupported(_V2, "weight", f"a list of {len(weight)} tensors", "one tensor, and one weight_scale")
    assist = weight_assist_matrix[0] if weight_assist_matrix else None
    scales, groups = (weight_scale[0], x_scale), (group_list, group_list_type)
    smooth = None if smooth_scale is None else smooth_scale.reshape(weight[0].shape[0], -1)
    s = _activated(_V2, x, weight[0], scales, groups, assist, smooth, (x_dtype, weight_dtype))
    if blocks:
        return quantised(s, s, -1, block_quantisation(_V2, 1 if quant_dtype is None else quant_dtype), _V2)
    target = None if quant_dtype == HIFLOAT8 else dtype_of(quant_dtype or 1, _V2, "quant_dtype")
    if target not in {None, torch.int8, *FLOAT8}:
        only = "int8, float8_e4m3fn, float8_e5m2 and hifloat8 with quant_mode 0"
        raise unsupported(_V2, "quant_dtype", quant_dtype, only)
    return _quantised(s, target)
