"""Writing slices at the places that an index tensor names.

Formula (operator documentation of ``torch_npu.npu_scatter_nd_update``, after TensorFlow's ``tensor_scatter_nd_update``)::

    out[indices[i..., :]] = updates[i...]

where the last dimension of ``indices`` holds the leading coordinates of a slice of ``input``. Of several updates of one slice
one wins, and which is not said; here it is the last.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Call, Operator, call


def _example() -> Call:
    return call(torch.randn(4, 3), torch.tensor([[2], [0]]), torch.randn(2, 3))


@Operator(
    name="npu::npu_scatter_nd_update_",
    source="operator documentation of torch_npu.npu_scatter_nd_update",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int8, torch.bool),
    writes_by_index=True,
    examples=(_example,),
)
def npu_scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """``input`` itself, changed; indices [..., r] of int32 or int64; updates [..., *input.shape[r:]] of input's dtype."""
    depth = indices.shape[-1] if indices.dim() else 0
    if not 1 <= depth <= input.dim():
        raise ValueError(
            f"the last dimension of indices must be 1 to {input.dim()}, the rank of input; indices has shape "
            f"{tuple(indices.shape)}."
        )
    wanted = (*indices.shape[:-1], *input.shape[depth:])
    if tuple(updates.shape) != wanted:
        raise ValueError(f"updates must have shape {wanted}; it has shape {tuple(updates.shape)}.")
    places = tuple(indices.reshape(-1, depth).long().unbind(-1))
    return input.index_put_(places, updates.reshape(-1, *input.shape[depth:]))


@Operator(
    name="npu::npu_scatter_nd_update",
    source="operator documentation of torch_npu.npu_scatter_nd_update",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int8, torch.bool),
    writes_by_index=True,
    examples=(_example,),
)
def npu_scatter_nd_update(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """A changed copy of ``input``; arguments as in ``npu_scatter_nd_update_``."""
    return npu_scatter_nd_update_(torch.empty_like(input).copy_(input), indices, updates)
