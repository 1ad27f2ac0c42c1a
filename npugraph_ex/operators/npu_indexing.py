"""A strided slice, with masks that change what an entry of ``begin``, ``end`` and ``strides`` means.

The rules are those of TensorFlow's ``strided_slice``, which the operator documentation of ``torch_npu.npu_indexing`` repeats. Bit i
of a mask is about entry i: ``begin_mask`` and ``end_mask`` take the slice from its very begin, or to its end; ``ellipsis_mask``
takes as many whole dimensions as are missing; ``new_axis_mask`` inserts a dimension of size 1; ``shrink_axis_mask`` takes the one
element at ``begin`` and drops the dimension.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import refused
from npugraph_ex.operators._record import Operator, call

_LARGEST_RANK = 8


@Operator(
    name="npu::npu_indexing",
    source="operator documentation of torch_npu.npu_indexing; TensorFlow's strided_slice",
    dtypes=(torch.float16, torch.float32),
    examples=(
        lambda: call(torch.arange(24).view(2, 3, 4), [0, 2, 0], [2, 0, 4], [1, -1, 2]),
        lambda: call(torch.randn(2, 3, 4), [1, 0, 0, 1], [2, 0, 0, 9], [1, 1, 1, 1], 0, 8, 2, 4, 1),
    ),
)
def npu_indexing(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    begin: list[int],
    end: list[int],
    strides: list[int],
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
) -> torch.Tensor:
    """Contiguous, in input's dtype; negative begins and ends count from the end, strides may be negative."""
    _check(input, begin, end, strides, ellipsis_mask, new_axis_mask, shrink_axis_mask)
    added = (new_axis_mask & ~ellipsis_mask).bit_count()
    out, dim, ellipses = input, 0, 1 if ellipsis_mask else 0
    for entry, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << entry
        if ellipsis_mask & bit:
            dim += input.dim() - (len(begin) - ellipses - added)
        elif new_axis_mask & bit:
            out = out.unsqueeze(dim)
            dim += 1
        elif shrink_axis_mask & bit:
            out = out.select(dim, first)
        else:
            chosen = slice(None if begin_mask & bit else first, None if end_mask & bit else last, step)
            places = torch.tensor(range(*chosen.indices(out.shape[dim])), dtype=torch.long, device=input.device)
            out = out.index_select(dim, places)
            dim += 1
    if out.dim() > _LARGEST_RANK:
        raise refused("npu_indexing", "the result's rank", out.dim(), f"at most {_LARGEST_RANK}")
    return out.clone(memory_format=torch.contiguous_format)


def _check(
    x: torch.Tensor, begin: list[int], end: list[int], strides: list[int], ellipsis: int, added: int, shrunk: int
) -> None:
    """Refuse entries that have no meaning."""
    if not len(begin) == len(end) == len(strides):
        sizes = (len(begin), len(end), len(strides))
        raise refused("npu_indexing", "the sizes of begin, end and strides", sizes, "equal")
    if ellipsis.bit_count() > 1:
        raise refused("npu_indexing", "ellipsis_mask", ellipsis, "a mask with one bit at most")
    entries = len(begin) - (added & ~ellipsis).bit_count() - ellipsis.bit_count()
    if entries > x.dim():
        raise refused("npu_indexing", "the size of begin", len(begin), f"within input's {x.dim()} dimensions")
    for entry, step in enumerate(strides):
        if step == 0 or (step < 0 and shrunk >> entry & 1):
            raise refused("npu_indexing", f"strides[{entry}]", step, "not 0, and above 0 where shrink_axis_mask is set")
