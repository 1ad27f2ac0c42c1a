"""Scaling back, SwiGLU activation and quantisation to eight bits in one operator, in groups of rows.

Formula (operator documentation of ``torch_npu.npu_dequant_swiglu_quant``; CANN's aclnnDequantSwigluQuantV2)::

    d = (x + bias) * weight_scale * activation_scale        an int32 bias; a floating one is added after the product
    s = A * sigmoid(A) * B                                  swiglu_mode 0
    s = a * sigmoid(glu_alpha * a) * (b + glu_bias)         1 and 2, with a = min(A, clamp_limit), b = B cut off at +- clamp_limit

    quant_mode=1 (dynamic): s = s * quant_scale;  scale = row_max(abs(s)) / DTYPE_MAX;  out = round(s / scale)
    quant_mode=0 (static):  out = round(s / quant_scale + quant_offset);                scale is not computed, here 0

A and B are the halves of the last dimension: A is the first with ``activate_left``, else the second; in swiglu_mode 1 they are the
even and the odd elements. Rounding is half to even, saturated; ``round_mode`` chooses another one for 4-bit floats (0 to 4: rint,
round, floor, ceil, trunc), and 1 goes with hifloat8. DTYPE_MAX is 127, 448, 57344, 32768 for hifloat8, 6 or 1.75 for 4-bit floats.
``group_index`` [G] counts the rows of each group, and a group has its own weight_scale, bias, quant_scale and quant_offset. The
device does not write rows of no group; here they are 0. Along another dimension, ``activate_dim``, quantisation is static.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from npugraph_ex.operators._groups import Groups
from npugraph_ex.operators._hifloat8 import HIFLOAT8, eight_bit, largest_eight_bit
from npugraph_ex.operators._microscaling import E1M2, E2M1, BlockQuantisation, pack, rounded
from npugraph_ex.operators._precision import compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_clipped_swiglu import clipped
from npugraph_ex.operators.npu_dynamic_quant import quotient_and_scale

_NAME = "npu_dequant_swiglu_quant"
_OUTPUTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_ROUNDINGS = ("rint", "round", "floor", "ceil", "trunc")
_FLOAT4 = {45: E2M1, 296: E2M1, torch.float4_e2m1fn_x2: E2M1, 297: E1M2}
_KNOWN = f"None, {', '.join(map(str, _OUTPUTS))}, hifloat8 ({HIFLOAT8}), float4_e2m1fn_x2 (296) and float4_e1m2 (297)"
_HALVES = 2
"""The ``swiglu_mode`` of halves with limits."""
_OfEachRow = Callable[[str, torch.Tensor], torch.Tensor]


class _ResultType(NamedTuple):
    """How the result is quantised: its dtype, uint8 for hifloat8, or the 4-bit format and its rounding."""

    dtype: torch.dtype
    float4: BlockQuantisation | None

    @property
    def largest(self) -> float:
        """The value that the largest number of a row becomes."""
        return self.float4.element.largest if self.float4 else largest_eight_bit(self.dtype)

    def stored(self, quotient: torch.Tensor) -> torch.Tensor:
        """``quotient`` rounded, two 4-bit numbers in a byte."""
        if self.float4:
            return pack(rounded(quotient, self.float4), self.float4.element)
        return eight_bit(self.dtype, quotient)


def _target(x: torch.Tensor, quant_mode: int, dst_type: int | None, round_mode: int | None) -> _ResultType:
    """The kind of the output; raises for what the device refuses or the formula does not cover."""
    if quant_mode not in {0, 1}:
        raise refused(_NAME, "quant_mode", quant_mode, "0 or 1")
    if x.dim() < 2:
        raise refused(_NAME, "x", tuple(x.shape), "of 2 or more dimensions")
    mode, hifloat, element = round_mode or 0, dst_type == HIFLOAT8, _FLOAT4.get(dst_type)
    modes = range(5) if element else (1,) if hifloat else (0,)
    if mode not in modes:
        raise refused(_NAME, "round_mode", round_mode, f"one of {[*modes]} for this dst_type")
    if element:
        return _ResultType(torch.uint8, BlockQuantisation(element, round_mode=_ROUNDINGS[mode]))
    target = torch.uint8 if hifloat else torch.int8 if dst_type is None else dtype_of(dst_type, _NAME, "dst_type")
    if not hifloat and target not in _OUTPUTS:
        raise unsupported(_NAME, "dst_type", dst_type, _KNOWN)
    return _ResultType(target, None)


def _dimension(x: torch.Tensor, activate_dim: int | None, static: bool) -> int:
    """The dimension of which A and B are the halves, counted from 0."""
    if activate_dim is not None and not -x.dim() <= activate_dim < x.dim():
        raise refused(_NAME, "activate_dim", activate_dim, f"one of the {x.dim()} dimensions of x")
    dim = x.dim() - 1 if activate_dim is None else activate_dim % x.dim()
    if not static and dim != x.dim() - 1:
        raise refused(_NAME, "activate_dim", activate_dim, "the last one with quant_mode 1 or group_index")
    if x.shape[dim] % 2:
        raise refused(_NAME, "the activated dimension of x", x.shape[dim], "even")
    return dim


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
    """``s`` of ``d``, along the last dimension."""
    if mode == 1:
        a, b = d[..., ::2], d[..., 1::2]
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
        lambda: call(
            torch.randint(-99, 99, (4, 16), dtype=torch.int32),
            weight_scale=torch.rand(16),
            activation_scale=torch.rand(4, 1),
            bias=torch.randint(-9, 9, (16,), dtype=torch.int32),
            quant_scale=torch.rand(1, 8) + 0.5,
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
    """``(out, scale)``: out of 8 bits and half of ``x`` [..., 2H] along its last dimension; scale float32, without it.

    Of 4-bit floats out has half as many bytes. With another ``activate_dim`` that dimension is halved, in out and in scale.
    """
    target = _target(x, quant_mode, dst_type, round_mode)
    dim = _dimension(x, activate_dim, quant_mode == 0 and group_index is None)
    rows = x.reshape(-1, x.shape[-1])
    groups = None if group_index is None else Groups(group_index, rows.shape[0], counts=True)

    def of_each_row(name: str, values: torch.Tensor) -> torch.Tensor:
        """[G, N], or [N] for all rows, or [G], a number for each group, as what broadcasts to the rows."""
        if groups is None:
            return values.reshape(1, -1) if values.dim() == 1 else values[:1]
        return groups.of_each_row(name, values.unsqueeze(-1) if values.dim() == 1 else values)

    dtype = compute_dtype(x, weight_scale, activation_scale, quant_scale)
    d = _scaled_back(rows, weight_scale, activation_scale, bias, of_each_row, dtype)
    turned = d.reshape(x.shape).movedim(dim, -1)
    s = _activated(turned, left=activate_left, mode=swiglu_mode, limit=clamp_limit, alpha=glu_alpha, bias=glu_bias)
    s = s.movedim(-1, dim)
    shape, s = s.shape, s.reshape(-1, s.shape[-1])
    factor = None if quant_scale is None else of_each_row("quant_scale", quant_scale).to(dtype)
    if quant_mode == 1:
        quotient, scale = quotient_and_scale(s, factor, dtype, highest=target.largest)
    else:
        quotient, scale = (s if factor is None else s / factor), s.new_zeros(s.shape[0])
        if quant_offset is not None:
            quotient = quotient + of_each_row("quant_offset", quant_offset).to(dtype)
    if groups is not None:
        quotient, scale = (
            torch.where(groups.inside.unsqueeze(-1), quotient, 0.0),
            torch.where(groups.inside, scale, 0.0),
        )
    out = target.stored(quotient)
    return out.reshape(*shape[:-1], out.shape[-1]).contiguous(), scale.reshape(shape[:-1])


def _fake_of_halves(x: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return x.new_empty(shape, dtype=torch.int8), x.new_empty(shape[:-1], dtype=torch.float32)


def _example_of_halves(mode: int) -> Call:
    x, weight_scale, group = torch.randint(-99, 99, (4, 16), dtype=torch.int32), torch.rand(16), torch.tensor([4])
    named = {"weight_scale": weight_scale, "activation_scale": torch.rand(4), "group_index": group}
    return call(x, **named, quant_mode=1, swiglu_mode=mode)


@Operator(
    name="_C_ascend::npu_dequant_swiglu_quant",
    source="vLLM-Ascend, csrc/torch_binding.cpp and csrc/moe/dequant_swiglu_quant",
    dtypes=(torch.float32,),
    schema=(
        "(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, Tensor? quant_scale=None, "
        "Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=True, int quant_mode=0, int swiglu_mode=0, "
        "float clamp_limit=0.0, float glu_alpha=1.0, float glu_bias=0.0) -> (Tensor y, Tensor scale)"
    ),
    fake=_fake_of_halves,
    examples=(partial(_example_of_halves, 0), partial(_example_of_halves, 1)),
)
def npu_dequant_swiglu_quant_of_halves(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 0.0,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM-Ascend's form: with ``swiglu_mode`` 1 A and B are the halves of a row, and only a positive limit cuts them off.

    Returns ``(y, scale)``: y int8, of half the last dimension of ``x``; scale float32, without it. A ``weight_scale`` of one
    dimension is that of a single group.
    """
    if weight_scale is not None and weight_scale.dim() == 1:
        weight_scale = weight_scale.unsqueeze(0)
    return npu_dequant_swiglu_quant(
        x, weight_scale=weight_scale, activation_scale=activation_scale, bias=bias, quant_scale=quant_scale,
        quant_offset=quant_offset, group_index=group_index, activate_left=activate_left, quant_mode=quant_mode,
        swiglu_mode=_HALVES if swiglu_mode else 0, clamp_limit=clamp_limit if clamp_limit > 0 else math.inf,
        glu_alpha=glu_alpha, glu_bias=glu_bias,
    )  # fmt: skip
