"""Adds to each row its adapter's product: the low-rank adaptation of many requests at once.

Formula (CANN operator documentation, aclnnAddLora), for row b with the adapter i = indices[b]::

    z = x[b] @ weight_a[i, layer_idx]^T                    x[b] itself without weight_a
    out[b, y_offset : y_offset + y_slice_size] = input + z @ weight_b[i, layer_idx]^T * scale

A row whose index is the number of adapters has none and stays as it is. Each product, the scaled one and the sum are rounded to the
dtype of input. Both forms write ``input`` and return it: op-plugin's test says so of the first one, too, whose schema does not.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, refused
from npugraph_ex.operators._record import Call, Operator, call

_NAME = "npu_batch_gather_matmul"
_SOURCE = "CANN operator documentation, aclnnAddLora"


def _example() -> Call:
    x, first, second = (torch.randn(size).half() for size in ((3, 16), (2, 1, 8, 16), (2, 1, 4, 8)))
    return call(torch.randn(3, 6).half(), x, second, torch.tensor([0, 1, 2]).int(), first, 0, 0.5, 1, 4)


def _with(tensor: torch.Tensor, layer: int, indices: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The matrix of each row, zeros for a row without adapter."""
    own = tensor[:, layer].to(wide)
    return torch.cat([own, torch.zeros_like(own[:1])])[indices.long()]


@Operator(
    name="npu::npu_batch_gather_matmul",
    source=f"{_SOURCE}; op-plugin's test of npu_batch_gather_matmul",
    dtypes=(torch.float16,),
    writes=("input",),
    returns_written=(0,),
    alike=Alike(dtype=("input", "x", "weight_b", "weight_a")),
    examples=(_example,),
)
def npu_batch_gather_matmul(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x: torch.Tensor,
    weight_b: torch.Tensor,
    indices: torch.Tensor,
    weight_a: torch.Tensor | None = None,
    layer_idx: int = 0,
    scale: float = 1e-3,
    y_offset: int = 0,
    y_slice_size: int = -1,
) -> torch.Tensor:
    """``input`` [b, h]. x: [b, k]; weight_a: [adapters, layers, rank, k]; weight_b: [adapters, layers, h, rank]; indices: [b]."""
    wide = compute_dtype(input, x, weight_b)
    size = input.shape[1] if y_slice_size == -1 else y_slice_size
    if size != weight_b.shape[2]:
        raise refused(_NAME, "y_slice_size", y_slice_size, f"{weight_b.shape[2]}, the rows of weight_b")
    if not 0 <= y_offset <= input.shape[1] - size:
        raise refused(_NAME, "y_offset", y_offset, f"0 to {input.shape[1] - size}, so that the rows lie within input")
    z = x.to(wide).unsqueeze(1)
    if weight_a is not None:
        z = (z @ _with(weight_a, layer_idx, indices, wide).mT).to(input.dtype).to(wide)
    added = (z @ _with(weight_b, layer_idx, indices, wide).mT).squeeze(1).to(input.dtype)
    input[:, y_offset : y_offset + size] += added * scale
    return input


@Operator(
    name="npu::npu_batch_gather_matmul_",
    source=_SOURCE,
    dtypes=(torch.float16,),
    alike=Alike(dtype=("input", "x", "weight_b", "weight_a")),
    examples=(_example,),
)
def npu_batch_gather_matmul_(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x: torch.Tensor,
    weight_b: torch.Tensor,
    indices: torch.Tensor,
    weight_a: torch.Tensor | None = None,
    layer_idx: int = 0,
    scale: float = 1e-3,
    y_offset: int = 0,
    y_slice_size: int = -1,
) -> torch.Tensor:
    """The same."""
    return npu_batch_gather_matmul(input, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size)
