"""A part of a tensor replaced, at a place for each of its rows that an index tensor tells; and of each tensor of a list.

Formula (operator documentation of ``torch_npu.scatter_update``; CANN operator documentation, aclnnInplaceScatterUpdate)::

    data[i, ..., indices[i] : indices[i] + n, ...] = updates[i]        along axis; n is the size of updates there

With two columns of ``indices`` the first names the row: ``data[indices[i, 0]]`` at ``indices[i, 1]``. In ``npu_scatter_list``
row i is tensor i of the list, which is left alone where ``mask[i]`` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import HALVES, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_DTYPES = (*HALVES, torch.float32, torch.int8, torch.int32)


def _example() -> Call:
    return call(torch.randn(2, 5, 3), torch.tensor([1, 4]), torch.randn(2, 1, 3), -2)


@Operator(
    name="npu::scatter_update_",
    source="operator documentation of torch_npu.scatter_update_; CANN operator documentation, aclnnInplaceScatterUpdate",
    dtypes=_DTYPES,
    writes_by_index=True,
    alike=Alike(dtype=("input", "updates")),
    examples=(_example,),
)
def scatter_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int) -> torch.Tensor:  # noqa: A002 - the schema's name
    """``input`` itself, changed; indices [B] or [B, 2] of int32 or int64; updates of input's rank."""
    places = indices.reshape(len(updates), -1)
    dim = axis % input.dim()
    for i, update in enumerate(updates):
        row = i if places.shape[1] == 1 else int(places[i, 0])
        input[row].narrow(dim - 1, int(places[i, -1]), update.shape[dim - 1]).copy_(update)
    return input


@Operator(
    name="npu::scatter_update",
    source="operator documentation of torch_npu.scatter_update; CANN operator documentation, aclnnInplaceScatterUpdate",
    dtypes=_DTYPES,
    writes_by_index=True,
    alike=Alike(dtype=("input", "updates")),
    examples=(_example,),
)
def scatter_update(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int) -> torch.Tensor:  # noqa: A002 - the schema's name
    """A changed copy of ``input``."""
    return scatter_update_(torch.empty_like(input).copy_(input), indices, updates, axis)


def _list_example() -> Call:
    tensors = [torch.randn(2, 5, 3).half() for _ in range(3)]
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    return call(tensors, torch.tensor([1, 4, 0]), torch.randn(3, 2, 1, 3).half(), mask)


@Operator(
    name="npu::npu_scatter_list_",
    source="CANN operator documentation, aclnnScatterList; op-plugin's test",
    dtypes=_DTYPES,
    writes_by_index=True,
    examples=(_list_example,),
)
def npu_scatter_list_(
    input: Sequence[torch.Tensor],  # noqa: A002 - the schema's name
    indices: torch.Tensor,
    updates: torch.Tensor,
    mask: torch.Tensor | None = None,
    reduce: str = "update",
    axis: int = -2,
) -> None:
    """Changes the tensors of ``input``.

    Indices [len(input)] or [len(input), 2] (first place and count), updates [len(input), ...].
    """
    if reduce != "update":
        raise unsupported("npu_scatter_list", "reduce", reduce, "'update'")
    if indices.dim() > 1:
        raise unsupported("npu_scatter_list", "indices", tuple(indices.shape), "one place for each tensor")
    for i, tensor in enumerate(input):
        if mask is None or mask[i]:
            dim = axis % updates.dim() - 1
            tensor.narrow(dim, int(indices[i]), updates.shape[dim + 1]).copy_(updates[i])


@Operator(
    name="npu::npu_scatter_list",
    source="CANN operator documentation, aclnnScatterList; op-plugin's test",
    dtypes=_DTYPES,
    writes_by_index=True,
    examples=(_list_example,),
)
def npu_scatter_list(
    input: Sequence[torch.Tensor],  # noqa: A002 - the schema's name
    indices: torch.Tensor,
    updates: torch.Tensor,
    mask: torch.Tensor | None = None,
    reduce: str = "update",
    axis: int = -2,
) -> list[torch.Tensor]:
    """Changed copies of the tensors."""
    copies = [torch.empty_like(tensor).copy_(tensor) for tensor in input]
    npu_scatter_list_(copies, indices, updates, mask, reduce, axis)
    return copies
