"""Static affine quantisation with given scales and zero points.

Formula (operator documentation of ``torch_npu.npu_quantize``; rounding from CANN's aclnnQuantize and aclnnAscendQuantV3)::

    div_mode=True:   y = round(input / scales + zero_points)      half to even, saturated to the output's range
    div_mode=False:  y = round(input * scales + zero_points)

The zero point is added *before* rounding, so an odd one moves a tie to the other neighbour.

``axis`` is the dimension along which scales and zero points run; a single element serves every position. With
``div_mode=False`` the documentation knows two axes only: -2 is the last but one, and every value above is the last.

Covered: int8, uint8 and int32 outputs, and with ``div_mode=False`` packed int4 (``torch.quint4x2``), eight in one int32. Not
covered: 4-bit and 8-bit floating outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from npugraph_ex.operators._int4 import INT4, pack
from npugraph_ex.operators._precision import compute_dtype, round_to, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_quantize"
_STORED_AS: Mapping[int | torch.dtype, torch.dtype] = MappingProxyType(
    {
        12: torch.int8,
        13: torch.uint8,
        14: torch.int32,
        torch.qint8: torch.int8,
        torch.quint8: torch.uint8,
        torch.qint32: torch.int32,
    }
)
"""qint8, quint8 and qint32, as codes or dtypes: their results are stored as plain integers."""
_FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUTPUTS = {True: (torch.int8, torch.uint8, torch.int32, *_FLOATS8), False: (torch.int8, *_FLOATS8)}


def affine(y: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, *, divide: bool) -> torch.Tensor:
    """``y / scales + zero_points`` or ``y * scales + zero_points`` in the dtype of ``y``, not rounded."""
    wide = scales.to(y.dtype)
    quotient = y / wide if divide else y * wide
    return quotient if zero_points is None else quotient + zero_points.to(y.dtype)


def _output_dtype(dtype: int | torch.dtype, *, div_mode: bool) -> torch.dtype:
    if dtype in INT4 and not div_mode:
        return torch.int8  # of values that are packed afterwards
    wanted = _STORED_AS.get(dtype) or dtype_of(dtype, _NAME, "dtype")
    if wanted not in _OUTPUTS[div_mode]:
        covered = ", ".join(map(str, _OUTPUTS[div_mode]))
        raise unsupported(_NAME, "dtype", dtype, f"{covered} with div_mode={div_mode}")
    return wanted


def _along(axis: int, rank: int, *, div_mode: bool) -> int:
    """The dimension that ``axis`` means, from 0."""
    if not -rank <= axis < rank or (not div_mode and axis < -2):
        lowest = -rank if div_mode else -2
        raise ValueError(f"{_NAME}: axis must lie in [{lowest}, {rank - 1}] for this input; it is {axis}.")
    if div_mode:
        return axis % rank
    return rank - 2 if axis == -2 else rank - 1


def _spread(values: torch.Tensor, name: str, input: torch.Tensor, along: int) -> torch.Tensor:  # noqa: A002
    """``values`` shaped so that they broadcast along one dimension of ``input``."""
    shape = [1] * input.dim()
    if values.numel() != 1:
        shape[along] = input.shape[along]
    if tuple(values.shape) not in ((values.numel(),), tuple(shape)) or values.numel() != shape[along]:
        raise ValueError(
            f"{_NAME}: {name} must hold one element or {input.shape[along]}, the size of dimension {along} of input; "
            f"it has shape {tuple(values.shape)} and input {tuple(input.shape)}."
        )
    return values.reshape(shape)


def before_rounding(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """What the operator rounds: float32, or float64 for float64 inputs."""
    _output_dtype(dtype, div_mode=div_mode)
    return _quotient(input, scales, zero_points, axis, div_mode=div_mode)


def _quotient(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    axis: int,
    *,
    div_mode: bool,
) -> torch.Tensor:
    """What is rounded, whatever the output."""
    along = _along(axis, input.dim(), div_mode=div_mode)
    wide = input.to(compute_dtype(input, scales))
    offsets = None if zero_points is None else _spread(zero_points, "zero_points", input, along)
    return affine(wide, _spread(scales, "scales", input, along), offsets, divide=div_mode)


def _canonical(rank: int, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The axis counted from the end; without ``div_mode`` all but -2 mean the last one."""
    axis, div_mode = arguments["axis"], arguments["div_mode"]
    if not (isinstance(axis, int) and isinstance(div_mode, bool) and -rank <= axis < rank):
        return {}
    if div_mode:
        return {"axis": axis % rank - rank}
    return {"axis": -1} if axis >= -1 else {}


@Operator(
    name="npu::npu_quantize",
    source="operator documentation of torch_npu.npu_quantize; CANN operator documentation, aclnnAscendQuantV3",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    before_rounding=before_rounding,
    synonyms={"dtype": {12: 1, 13: 0, 14: 3}},  # qint8, quint8 and qint32 ask for plain int8, uint8 and int32 results
    canonical=_canonical,
    near_misses={"axis": (-2,)},
    examples=(
        lambda: call(torch.randn(3, 16), torch.rand(16) + 0.5, None, torch.qint8, -1, False),
        lambda: call(torch.randn(3, 16), torch.rand(16) + 0.5, torch.randn(16) * 4, torch.qint32),
    ),
)
def npu_quantize(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """Like ``input``; the code ``dtype`` names int8 (1, 12), uint8 (0, 13), int32 (3, 14), or int4 (16), an eighth of it int32."""
    quotient = before_rounding(input, scales, zero_points, dtype, axis, div_mode)
    target = _output_dtype(dtype, div_mode=div_mode)
    if dtype in INT4:
        return pack(_NAME, round_to(target, quotient))
    return stored_like(input, round_to(target, quotient), target)
