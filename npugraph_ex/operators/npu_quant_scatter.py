"""Quantised updates written into slices that an index tensor names, in place and on a copy.

Formula (operator documentation of ``torch_npu.npu_quant_scatter_``; the division as in op-plugin's test of it)::

    q = round(updates / quant_scales + quant_zero_points)           half to even, saturated to the dtype of input
    input[i, ..., indices[i] + j, ...] = q[i, ..., j, ...]          indices [B]; j along axis
    input[indices[i, 0], ..., indices[i, 1] + j, ...] = q[i, ...]   indices [B, 2]
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, round_to, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_quantize import affine

_NAME = "npu_quant_scatter"
_STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _refuse(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    indices: torch.Tensor,
    updates: torch.Tensor,
    axis: int,
    quant_axis: int,
    reduce: str,
    round_mode: str | None,
) -> None:
    """Raise for what the documentation forbids or the formula does not cover."""
    rank = updates.dim()
    if input.dtype not in _STORED:
        raise unsupported(_NAME, "input", input.dtype, ", ".join(map(str, _STORED)))
    if reduce != "update":
        raise refused(_NAME, "reduce", reduce, "'update'")
    if round_mode not in {None, "rint"}:
        raise unsupported(_NAME, "round_mode", round_mode, "'rint'")
    if quant_axis not in {-1, rank - 1}:
        raise refused(_NAME, "quant_axis", quant_axis, "the last dimension")
    if axis % rank in {0, rank - 1}:
        raise refused(_NAME, "axis", axis, "neither the first nor the last dimension")
    if indices.dim() not in {1, 2} or (indices.dim() == 2 and indices.shape[1] != 2):
        raise refused(_NAME, "indices", tuple(indices.shape), "[B] or [B, 2]")


def _example() -> Call:
    return call(
        torch.zeros(2, 4, 32, dtype=torch.int8),
        torch.tensor([1, 3], dtype=torch.int32),
        torch.randn(2, 1, 32).half(),
        torch.rand(32) + 0.5,
        torch.ones(32, dtype=torch.int32),
    )


@Operator(
    name="npu::npu_quant_scatter_",
    source="operator documentation of torch_npu.npu_quant_scatter_",
    writes_by_index=True,
    dtypes=HALVES,
    examples=(_example,),
)
def npu_quant_scatter_(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    indices: torch.Tensor,
    updates: torch.Tensor,
    quant_scales: torch.Tensor,
    quant_zero_points: torch.Tensor | None = None,
    axis: int = -2,
    quant_axis: int = -1,
    reduce: str = "update",
    dst_type: int | None = None,
    round_mode: str | None = "rint",
) -> torch.Tensor:
    """``input`` itself, int8 or an 8-bit float, changed; updates like it but for the first dimension and ``axis``."""
    _refuse(input, indices, updates, axis, quant_axis, reduce, round_mode)
    wide = updates.to(compute_dtype(updates, quant_scales))
    points = None if quant_zero_points is None else quant_zero_points.reshape(-1)
    values = round_to(input.dtype, affine(wide, quant_scales.reshape(-1), points, divide=True)).movedim(axis, 1)
    starts = indices.long()
    rows = torch.arange(values.shape[0], device=input.device) if starts.dim() == 1 else starts[:, 0]
    starts = starts if starts.dim() == 1 else starts[:, 1]
    places = starts.unsqueeze(-1) + torch.arange(values.shape[1], device=input.device)
    input.movedim(axis, 1).index_put_((rows.unsqueeze(-1), places), values)
    return input


@Operator(
    name="npu::npu_quant_scatter",
    source="operator documentation of torch_npu.npu_quant_scatter",
    writes_by_index=True,
    dtypes=HALVES,
    examples=(_example,),
)
def npu_quant_scatter(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    indices: torch.Tensor,
    updates: torch.Tensor,
    quant_scales: torch.Tensor,
    quant_zero_points: torch.Tensor | None = None,
    axis: int = -2,
    quant_axis: int = -1,
    reduce: str = "update",
    dst_type: int | None = None,
    round_mode: str | None = "rint",
) -> torch.Tensor:
    """A changed copy of ``input``; arguments as in ``npu_quant_scatter_``."""
    copied = torch.empty_like(input).copy_(input)
    return npu_quant_scatter_(
        copied, indices, updates, quant_scales, quant_zero_points, axis, quant_axis, reduce, dst_type, round_mode
    )
