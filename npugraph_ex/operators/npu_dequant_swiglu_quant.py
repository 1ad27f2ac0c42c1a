"""Scaling back, SwiGLU activation and quantisation to eight bits in one operator, in groups of rows.

Formula (operator documentation of ``torch_npu.npu_dequant_swiglu_quant``; CANN's aclnnDequantSwigluQuantV2)::

    d = (x + bias) * weight_scale * activation_scale        an int32 bias; a floating one is added after the product
    s = A * sigmoid(A) * B                                  swiglu_mode 0
    s = a * sigmoid(glu_alpha * a) * (b + glu_bias)         1 and 2, with a = min(A, clamp_limit), b = B cut off at +- clamp_limit

    quant_mode=1 (dynamic): s = s * quant_scale;  scale = row_max(abs(s)) / DTYPE_MAX;  out = round(s / scale)
    quant_mode=0 (static):  out = round(s / quant_scale + quant_offset);                scale is not computed, here 0

A and B are the halves of the last dimension: A is the first with ``activate_left``, else the second; in swiglu_mode 1 they are the
even and the odd elements. Rounding is half to even, saturated; DTYPE_MAX is 127, 448 or 57344. ``group_index`` [G] counts the rows
of each group, and a group has its own weight_scale, bias, quant_scale and quant_offset. The device does not write rows of no group;
here they are 0. Not covered: activation along another dimension, hifloat8 and 4-bit outputs, other rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from npugraph_ex.operators._groups import Groups
from npugraph_ex.operators._precision import compute_dtype, largest_of, refused, round_to, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_clipped_swiglu import clipped
from npugraph_ex.operators.npu_dynamic_quant import quotient_and_scale

_NAME = "npu_dequant_swiglu_quant"
_OUTPUTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_OfEachRow = Callable[[str, torch.Tensor], torch.Tensor]


def _target(
    x: torch.Tensor, quant_mode: int, dst_type: int | None, round_mode: int | None, activate_dim: int | None
) -> torch.dtype:
    """The dtype of the output; raises for what the device refuses or the formula does not cover."""
    if quant_mode not in {0, 1}:
        raise refused(_NAME, "quant_mode", quant_mode, "0 or 1")
    if x.dim() < 2 or x.shape[-1] % 2:
        raise refused(_NAME, "x", tuple(x.shape), "of 2 or more dimensions, the last of even size")
    if activate_dim not in {None, -1, x.dim() - 1}:
        raise unsupported(_NAME, "activate_dim", activate_dim, "None and the last dimension")
    if round_mode not in {None, 0}:
        raise unsupported(_NAME, "round_mode", round_mode, "None and 0 (rint)")
    target = torch.int8 if dst_type is None else dtype_of(dst_type, _NAME, "dst_type")
    if target not in _OUTPUTS:
        raise unsupported(_NAME, "dst_type", dst_type, f"None, {', '.join(map(str, _OUTPUTS))}")
    return target


def _scaled_back(
    x: torch.Tensor,
    weight_scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    of_each_row: _OfEachRow,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``d`` of the rows ``x`` in ``dtype``."""
    if bias is not None and not bias.is_floating_point():
        x, bias = x + of_each_row("bias", bias), None
    wide = x.to(dtype)
    if weight_scale is not None:
        wide = wide * of_each_row("weight_scale", weight_scale).to(dtype)
    if activation_scale is not None:
        wide = wide * activation_scale.reshape(-1, 1).to(dtype)
    return wide if bias is None else wide + of_each_row("bias", bias).to(dtype)


def _activated(d: torch.Tensor, *, left: bool, mode: int, limit: float, alpha: float, bias: float) -> torch.Tensor:
    """``s`` of the rows ``d``."""
    if mode == 1:
        a, b = d[:, ::2], d[:, 1::2]
    else:
        first, second = d.chunk(2, dim=-1)
        a, b = (first, second) if left else (second, first)
    if mode == 0:
        return torch.nn.functional.silu(a) * b
    if mode not in {1, 2}:
        raise refused(_NAME, "swiglu_mode", mode, "0, 1 or 2")
    return clipped(a, b, alpha=alpha, limit=limit, bias=bias)


@Operator(
    name="npu::npu_dequant_swiglu_quant",
    source="operator documentation of torch_npu.npu_dequant_swiglu_quant; CANN operator documentation, aclnnDequantSwigluQuantV2",
    synonyms={"dst_type": {1: None}},
    dtypes=(torch.float32,),
    examples=(
        lambda: call(
            torch.randint(-99, 99, (4, 16), dtype=torch.int32),
            weight_scale=torch.rand(2, 16),
            activation_scale=torch.rand(4, 1),
            quant_scale=torch.rand(2, 8),
            group_index=torch.tensor([1, 2]),
            activate_left=True,
            quant_mode=1,
        ),
        lambda: call(
            torch.randn(4, 16).bfloat16(),
            quant_scale=torch.rand(1, 8) + 0.5,
            quant_offset=torch.rand(1, 8),
            swiglu_mode=1,
        ),
    ),
)
def npu_dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, scale)``: out of 8 bits and half of ``x`` [..., 2H] along its last dimension; scale float32, without it."""
    target = _target(x, quant_mode, dst_type, round_mode, activate_dim)
    rows = x.reshape(-1, x.shape[-1])
    groups = None if group_index is None else Groups(group_index, rows.shape[0], counts=True)

    def of_each_row(name: str, values: torch.Tensor) -> torch.Tensor:
        """[G, N], or [N] for all rows, or [G], a number for each group, as what broadcasts to the rows."""
        if groups is None:
            return values.reshape(1, -1) if values.dim() == 1 else values[:1]
        return groups.of_each_row(name, values.unsqueeze(-1) if values.dim() == 1 else values)

    dtype = compute_dtype(x, weight_scale, activation_scale, quant_scale)
    d = _scaled_back(rows, weight_scale, activation_scale, bias, of_each_row, dtype)
    s = _activated(d, left=activate_left, mode=swiglu_mode, limit=clamp_limit, alpha=glu_alpha, bias=glu_bias)
    factor = None if quant_scale is None else of_each_row("quant_scale", quant_scale).to(dtype)
    if quant_mode == 1:
        quotient, scale = quotient_and_scale(s, factor, dtype, highest=largest_of(target))
    else:
        quotient, scale = (s if factor is None else s / factor), s.new_zeros(s.shape[0])
        if quant_offset is not None:
            quotient = quotient + of_each_row("quant_offset", quant_offset).to(dtype)
    if groups is not None:
        quotient, scale = (
            torch.where(groups.inside.unsqueeze(-1), quotient, 0.0),
            torch.where(groups.inside, scale, 0.0),
        )
    return round_to(target, quotient).reshape(*x.shape[:-1], x.shape[-1] // 2), scale.reshape(x.shape[:-1])
