"""Rows of a tensor by index, for inputs with long runs of zeros, and the gradient.

Formula (operator documentation of ``torch_npu.npu_gather_sparse_index``)::

    out[i..., j...] = input[index[i...], j...]
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_SOURCE = "operator documentation of torch_npu.npu_gather_sparse_index"


@Operator(
    name="npu::npu_gather_sparse_index",
    source=_SOURCE,
    dtypes=(
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    ),
    examples=(lambda: call(torch.randn(5, 3).half(), torch.tensor([[4, 0], [1, 4]])),),
)
def npu_gather_sparse_index(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Contiguous, in input's dtype, of shape ``index.shape + input.shape[1:]``; index of int32 or int64, not negative."""
    return input.index_select(0, index.flatten()).view(*index.shape, *input.shape[1:])


@Operator(
    name="npu::npu_gather_sparse_index_backward",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(2, 2, 3).half(), [5, 3], torch.tensor([[4, 0], [1, 4]])),),
)
def npu_gather_sparse_index_backward(grad: torch.Tensor, self_sizes: list[int], index: torch.Tensor) -> torch.Tensor:
    """Of shape ``self_sizes`` in grad's dtype: the gradients of each row added."""
    dtype = compute_dtype(grad)
    total = torch.zeros(self_sizes, dtype=dtype, device=grad.device)
    total.index_add_(0, index.flatten(), grad.to(dtype).reshape(-1, *self_sizes[1:]))
    return total.to(grad.dtype)
