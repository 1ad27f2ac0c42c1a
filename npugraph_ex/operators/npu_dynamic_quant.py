"""Dynamic quantisation to int8, int4 or an 8-bit float, symmetric and with zero points.

Formula (CANN operator documentation, aclnnDynamicQuantV4; operator documentation of ``torch_npu.npu_dynamic_quant`` and
``npu_dynamic_quant_asymmetric``)::

    input  = x * smooth_scales                      (x when there are none)
    scale  = max(abs(input)) / DTYPE_MAX            127 for int8, 7 for int4, 448 and 57344 for float8_e4m3fn and float8_e5m2
    y      = round(input / scale)                   half to even, saturated

    asymmetric: scale  = (max(input) - min(input)) / (DTYPE_MAX - DTYPE_MIN)
                offset = DTYPE_MAX - max(input) / scale
                y      = round(input / scale + offset)

The maximum is taken of each row, which is the last dimension (``pertoken``), of each column, along the last but one
(``perchannel``), or of all elements (``pertensor``, one scale). What has scale 0 quantises to zeros (see ``round_to_int8``).

With ``group_index`` [E] ``smooth_scales`` is [E, N], and its row e is for the tokens from ``group_index[e - 1]`` to
``group_index[e]``: the experts of a mixture. Int4 (``torch.quint4x2``) is packed: eight of them are one int32, the first in its
lowest bits.

With quant_mode "perchannel" ``smooth_scales`` is [M], one for each row of the matrices [..., M, N].

For hifloat8 DTYPE_MAX is 32768, or ``dst_type_max`` up to that; rounding is away from zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._hifloat8 import HIFLOAT8, LARGEST, eight_bit
from npugraph_ex.operators._int4 import INT4, INT4_MAX, pack
from npugraph_ex.operators._precision import (
    HALVES,
    INT8_MAX,
    compute_dtype,
    largest_of,
    refused,
    round_to,
    stored_like,
    unsupported,
)
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME, _ASYMMETRIC = "npu_dynamic_quant", "npu_dynamic_quant_asymmetric"
_ALONG = {"pertoken": -1, "perchannel": -2, "pertensor": -1}
_TYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def quotient_and_scale(
    x: torch.Tensor,
    smooth_scales: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    along: int = -1,
    highest: float = INT8_MAX,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input / scale, scale)`` in ``dtype``: the shape of ``x``, and that shape without the dimension ``along``."""
    wide = x.to(dtype)
    if smooth_scales is not None:
        wide = wide * smooth_scales.to(dtype)
    if wide.shape[along] == 0:
        return wide, wide.new_zeros(_without(wide, along))
    scale = wide.abs().amax(dim=along) / highest
    return wide / scale.unsqueeze(along), scale


def _without(x: torch.Tensor, along: int) -> list[int]:
    """The shape of ``x`` without one dimension."""
    shape = list(x.shape)
    del shape[along]
    return shape


def _of_each_token(
    operator: str, x: torch.Tensor, smooth_scales: torch.Tensor | None, group_index: torch.Tensor | None
) -> torch.Tensor | None:
    """The smoothing of each token [..., N], from those of the experts [E, N] and where their tokens end [E]."""
    if group_index is None:
        return smooth_scales
    if smooth_scales is None:
        raise ValueError(f"{operator}: group_index says whose smooth_scales a token takes; there are none.")
    if smooth_scales.dim() != 2 or group_index.shape != smooth_scales.shape[:1]:
        raise ValueError(
            f"{operator}: with group_index [E] smooth_scales must be [E, N]; they are {list(group_index.shape)} and "
            f"{list(smooth_scales.shape)}."
        )
    tokens = torch.arange(x.numel() // max(x.shape[-1], 1), device=group_index.device)
    ends = group_index.long()
    if ends.device.type != "meta" and (bool((ends.diff() < 0).any()) or int(ends[-1]) != tokens.numel()):
        raise ValueError(
            f"{operator}: group_index must rise to the number of tokens, {tokens.numel()}; it is {group_index.tolist()}."
        )
    expert = torch.searchsorted(ends, tokens, right=True)
    return smooth_scales[expert].reshape(x.shape)


def _rows(
    operator: str,
    x: torch.Tensor,
    smooth_scales: torch.Tensor | None,
    group_index: torch.Tensor | None,
    quant_mode: str,
) -> torch.Tensor:
    """The smoothed input, as one row where all elements have one scale."""
    if quant_mode not in _ALONG:
        raise unsupported(operator, "quant_mode", quant_mode, "'pertoken', 'perchannel' and 'pertensor'")
    if x.dim() < 2:
        raise ValueError(f"{operator}: input must have 2 to 8 dimensions; it has shape {tuple(x.shape)}.")
    if quant_mode == "perchannel" and smooth_scales is not None and group_index is None:
        smooth_scales = smooth_scales.reshape(-1, 1)  # one for each row of a matrix: [..., M, N] has M
        if smooth_scales.shape[0] != x.shape[-2]:
            raise refused(operator, "smooth_scales", tuple(smooth_scales.shape[:1]), f"of {x.shape[-2]} elements")
    smooth = _of_each_token(operator, x, smooth_scales, group_index)
    wide = x.to(compute_dtype(x, smooth_scales))
    if smooth is not None:
        wide = wide * smooth.to(wide.dtype)
    return wide.reshape(1, -1) if quant_mode == "pertensor" else wide


class _TargetRange(NamedTuple):
    """The dtype of the output, None for int4 and uint8 for hifloat8, and the ends of its range."""

    dtype: torch.dtype | None
    low: float
    high: float


def _target(operator: str, dst_type: int | torch.dtype | None, own: float) -> _TargetRange:
    """What ``dst_type`` names, up to a largest number of one's own."""
    if own and (dst_type != HIFLOAT8 or not 0 < own <= LARGEST):
        raise unsupported(operator, "dst_type_max", own, f"0.0, and up to {LARGEST} with hifloat8 ({HIFLOAT8})")
    if dst_type in INT4:
        return _TargetRange(None, -INT4_MAX - 1, INT4_MAX)
    if dst_type == HIFLOAT8:
        return _TargetRange(torch.uint8, -(own or LARGEST), own or LARGEST)
    target = torch.int8 if dst_type is None else dtype_of(dst_type, operator, "dst_type")
    if target not in _TYPES:
        known = f"None, torch.quint4x2, {', '.join(map(str, _TYPES))}, hifloat8 ({HIFLOAT8})"
        raise unsupported(operator, "dst_type", dst_type, known)
    high = largest_of(target)
    return _TargetRange(target, -high if target.is_floating_point else -high - 1, high)


def _stored(operator: str, x: torch.Tensor, quotient: torch.Tensor, target: torch.dtype | None) -> torch.Tensor:
    """The output: like ``x`` in the dtype ``target``, or packed int4."""
    quotient = quotient.reshape(x.shape)
    if target is None:
        return pack(operator, round_to(torch.int8, quotient))
    return stored_like(x, eight_bit(target, quotient), target)


def before_rounding(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input / scale, scale)``, both float32, or float64 for float64 inputs; int8 outputs only."""
    if _target(_NAME, dst_type, dst_type_max).dtype != torch.int8:
        raise unsupported(_NAME, "dst_type", dst_type, "int8 where the quotient before rounding is wanted")
    rows = _rows(_NAME, input, smooth_scales, group_index, quant_mode)
    quotient, scale = quotient_and_scale(rows, None, rows.dtype, along=_ALONG[quant_mode])
    return quotient.reshape(input.shape), scale


@Operator(
    name="npu::npu_dynamic_quant",
    dtypes=HALVES,
    floats_only=True,
    source="CANN operator documentation, aclnnDynamicQuantV4",
    before_rounding=before_rounding,
    synonyms={"dst_type": {1: None}},
    near_misses={"dst_type": (16,), "quant_mode": ("pertensor",), "dst_type_max": (64.0,)},
    alike=Alike(dtype=("input", "smooth_scales")),
    examples=(
        lambda: call(torch.randn(3, 16).half()),
        lambda: call(torch.randn(2, 3, 16).half(), quant_mode="pertensor"),
        lambda: call(torch.randn(2, 3, 16).half(), quant_mode="perchannel"),
        lambda: call(torch.randn(2, 3, 16).half(), dst_type=16),
        lambda: call(torch.randn(2, 3, 16).half(), dst_type=torch.float8_e4m3fn),
        lambda: call(
            torch.randn(3, 16).half(), smooth_scales=torch.rand(2, 16).half(), group_index=torch.tensor([1, 3])
        ),
    ),
)
def npu_dynamic_quant(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)``.

    y: int8 or the 8-bit float, of the shape of ``input``, or int32 with an eighth of its last dimension for int4.
    scale: float32, the shape of ``input`` without its last dimension (pertoken), without the last but one (perchannel), or [1]
    (pertensor).
    """
    target = _target(_NAME, dst_type, dst_type_max)
    rows = _rows(_NAME, input, smooth_scales, group_index, quant_mode)
    quotient, scale = quotient_and_scale(rows, None, rows.dtype, along=_ALONG[quant_mode], highest=target.high)
    return _stored(_NAME, input, quotient, target.dtype), scale.contiguous()


@Operator(
    name="npu::npu_dynamic_quant_asymmetric",
    dtypes=HALVES,
    source="operator documentation of torch_npu.npu_dynamic_quant_asymmetric; CANN operator documentation, aclnnDynamicQuantV4",
    synonyms={"dst_type": {1: None}},
    alike=Alike(dtype=("input", "smooth_scales")),
    examples=(
        lambda: call(torch.randn(3, 16).half()),
        lambda: call(torch.randn(2, 3, 16).half(), quant_mode="perchannel"),
        lambda: call(torch.randn(2, 3, 16).bfloat16(), dst_type=16),
        lambda: call(
            torch.randn(3, 16).half(), smooth_scales=torch.rand(2, 16).half(), group_index=torch.tensor([1, 3])
        ),
    ),
)
def npu_dynamic_quant_asymmetric(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, scale, offset)``: y and scale as in ``npu_dynamic_quant``; offset float32 of the shape of scale."""
    target = _target(_ASYMMETRIC, dst_type, dst_type_max)
    rows = _rows(_ASYMMETRIC, input, smooth_scales, group_index, quant_mode)
    along = _ALONG[quant_mode]
    if rows.shape[along] == 0:
        scale = rows.new_zeros(_without(rows, along))
        return _stored(_ASYMMETRIC, input, rows, target.dtype), scale, scale.clone()
    low, high = rows.aminmax(dim=along, keepdim=True)
    scale = (high - low) / (target.high - target.low)
    offset = target.high - high / scale
    y = _stored(_ASYMMETRIC, input, rows / scale + offset, target.dtype)
    return y, scale.squeeze(along).contiguous(), offset.squeeze(along).contiguous()
