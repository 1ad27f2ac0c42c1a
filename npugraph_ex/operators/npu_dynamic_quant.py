"""Symmetric dynamic quantisation to int8 or int4.

Formula (CANN operator documentation, aclnnDynamicQuantV4; operator documentation of ``torch_npu.npu_dynamic_quant``)::

    input = x * smooth_scales                       (x when there are none)
    scale = max(abs(input)) / DTYPE_MAX             127 for int8, 7 for int4
    y     = round(input / scale)                    half to even, saturated

The maximum is taken of each row, which is the last dimension (``pertoken``), of each column, along the last but one
(``perchannel``), or of all elements (``pertensor``, one scale). What has scale 0 quantises to zeros (see ``round_to_int8``).

With ``group_index`` [E] ``smooth_scales`` is [E, N], and its row e is for the tokens from ``group_index[e - 1]`` to
``group_index[e]``: the experts of a mixture. Int4 (``torch.quint4x2``) is packed: eight of them are one int32, the first in its
lowest bits.

Not covered: 8-bit floating outputs, and a maximum of one's own, which is for those.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import INT8_MAX, compute_dtype, round_to_int8, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_dynamic_quant"
_INT4 = (16, torch.quint4x2)
_INT4_MAX, _PACKED = 7.0, 8
_ALONG = {"pertoken": -1, "perchannel": -2}


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


def _of_each_token(x: torch.Tensor, smooth_scales: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
    """The smoothing vector of each token [..., N], from those of the experts [E, N] and where their tokens end [E]."""
    if smooth_scales.dim() != 2 or group_index.shape != smooth_scales.shape[:1]:
        raise ValueError(
            f"{_NAME}: with group_index [E] smooth_scales must be [E, N]; they are {list(group_index.shape)} and "
            f"{list(smooth_scales.shape)}."
        )
    tokens = torch.arange(x.numel() // max(x.shape[-1], 1), device=group_index.device)
    ends = group_index.long()
    if ends.device.type != "meta" and (bool((ends.diff() < 0).any()) or int(ends[-1]) != tokens.numel()):
        raise ValueError(
            f"{_NAME}: group_index must rise to the number of tokens, {tokens.numel()}; it is {group_index.tolist()}."
        )
    expert = torch.searchsorted(ends, tokens, right=True)
    return smooth_scales[expert].reshape(x.shape)


def _quantised(
    x: torch.Tensor,
    smooth_scales: torch.Tensor | None,
    group_index: torch.Tensor | None,
    quant_mode: str,
    dst_type_max: float,
    highest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input / scale, scale)`` of a call."""
    if quant_mode not in {*_ALONG, "pertensor"}:
        raise unsupported(_NAME, "quant_mode", quant_mode, "'pertoken', 'perchannel' and 'pertensor'")
    if dst_type_max != 0.0:
        raise unsupported(_NAME, "dst_type_max", dst_type_max, "0.0")
    if x.dim() < 2:
        raise ValueError(f"{_NAME}: input must have 2 to 8 dimensions; it has shape {tuple(x.shape)}.")
    dtype = compute_dtype(x, smooth_scales)
    if group_index is not None:
        if smooth_scales is None:
            raise ValueError(f"{_NAME}: group_index says whose smooth_scales a token takes; there are none.")
        smooth_scales = _of_each_token(x, smooth_scales, group_index)
    if quant_mode != "pertensor":
        return quotient_and_scale(x, smooth_scales, dtype, along=_ALONG[quant_mode], highest=highest)
    smoothed = x.to(dtype) if smooth_scales is None else x.to(dtype) * smooth_scales.to(dtype)
    quotient, scale = quotient_and_scale(smoothed.reshape(1, -1), None, dtype, highest=highest)
    return quotient.reshape(x.shape), scale


def _is_int4(dst_type: int | torch.dtype | None) -> bool:
    """Whether int4 is wanted, else int8; raises for other outputs."""
    if dst_type in _INT4:
        return True
    if dst_type is not None and dtype_of(dst_type, _NAME, "dst_type") != torch.int8:
        raise unsupported(_NAME, "dst_type", dst_type, "None, torch.int8 and torch.quint4x2")
    return False


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
    if _is_int4(dst_type):
        raise unsupported(_NAME, "dst_type", dst_type, "int8 where the quotient before rounding is wanted")
    return _quantised(input, smooth_scales, group_index, quant_mode, dst_type_max, INT8_MAX)


@Operator(
    name="npu::npu_dynamic_quant",
    source="CANN operator documentation, aclnnDynamicQuantV4",
    dtypes=(torch.float16, torch.bfloat16),
    before_rounding=before_rounding,
    synonyms={"dst_type": {1: None}},
    near_misses={"dst_type": (16,), "quant_mode": ("pertensor",), "dst_type_max": (64.0,)},
    examples=(
        lambda: call(torch.randn(3, 16).half()),
        lambda: call(torch.randn(2, 3, 16).half(), quant_mode="pertensor"),
        lambda: call(torch.randn(2, 3, 16).half(), quant_mode="perchannel"),
        lambda: call(torch.randn(2, 3, 16).half(), dst_type=16),
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

    y: int8 of the shape of ``input``, or int32 with an eighth of its last dimension for int4. scale: float32, the shape of
    ``input`` without its last dimension (pertoken), without the last but one (perchannel), or [1] (pertensor).
    """
    int4 = _is_int4(dst_type)
    if int4 and input.shape[-1] % _PACKED:
        raise ValueError(f"{_NAME}: for int4 the last dimension must be a multiple of 8; it is {input.shape[-1]}.")
    highest = _INT4_MAX if int4 else INT8_MAX
    quotient, scale = _quantised(input, smooth_scales, group_index, quant_mode, dst_type_max, highest)
    if int4:
        return _packed(round_to_int8(quotient).clamp(-8, 7)), scale.contiguous()
    return stored_like(input, round_to_int8(quotient), torch.int8), scale.contiguous()


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Eight int4 values [..., 8 N] in one int32 [..., N], the first in the lowest four bits."""
    nibbles = values.to(torch.int64).bitwise_and(15).unflatten(-1, (-1, _PACKED))
    words = (nibbles << torch.arange(0, 4 * _PACKED, 4, device=values.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
