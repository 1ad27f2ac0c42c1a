"""Ranges of a dimension filled with values.

Formula (op-plugin: its checks and the reference of its test)::

    out[j, ..., k, ...] = value[i]        for start[i, j] <= k < end[i, j], k at dimension axis, j at the first dimension

For ``axis`` 0 j names nothing: a range is filled whole. Of ranges that overlap the last one wins.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_masked_fill_range",
    source="op-plugin, aclops/MaskedFillRangeKernelNpu.cpp",
    dtypes=(torch.float16, torch.float32),
    examples=(
        lambda: call(
            torch.randn(2, 3, 6),
            torch.tensor([[0, 3]], dtype=torch.int32),
            torch.tensor([[2, 5]], dtype=torch.int32),
            torch.ones(1),
        ),
    ),
)
def npu_masked_fill_range(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    start: torch.Tensor,
    end: torch.Tensor,
    value: torch.Tensor,
    axis: int = -1,
) -> torch.Tensor:
    """Like ``input``, of at most three dimensions; start, end [ranges, rows] of int32; value [ranges] in input's dtype."""
    axis %= input.dim()
    places = torch.arange(input.shape[axis], device=input.device)
    out = input.contiguous()
    for first, last, filling in zip(start.unbind(), end.unbind(), value.unbind(), strict=True):
        inside = (places >= first.unsqueeze(-1)) & (places < last.unsqueeze(-1))
        if axis in {0, input.dim() - 2} and not (axis == 0 and input.dim() == 1):
            inside = inside.any(0).view(-1, *[1] * (input.dim() - 1 - axis))
        elif input.dim() == 1:
            inside = inside.any(0)
        else:
            inside = inside.view(inside.shape[0], *[1] * (axis - 1), -1)
        out = torch.where(inside, filling, out)
    return out
