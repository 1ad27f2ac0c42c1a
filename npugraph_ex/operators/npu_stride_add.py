"""Sum of parts of the second dimension of two tensors, in blocks of sixteen channels.

Formula (op-plugin: the size of the result, and the numbers of its test)::

    out[n, i] = input[n, offset1 + i] + other[n, offset2 + i]      for i < c1_len, of the 16 * c1_len that out has; then 0
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call

_BLOCK = 16


@Operator(
    name="npu::npu_stride_add",
    source="op-plugin, aclops/StrideAddKernelNpu.cpp",
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.randn(2, 3, 1, 1, 4).half(), torch.randn(2, 4, 1, 1, 4).half(), 0, 2, 2),),
)
def npu_stride_add(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    other: torch.Tensor,
    offset1: float,
    offset2: float,
    c1_len: float,
) -> torch.Tensor:
    """[N, 16 * c1_len, ...] in input's dtype; ``input`` and ``other`` differ in the second dimension alone."""
    length = int(c1_len)
    total = input.narrow(1, int(offset1), length) + other.narrow(1, int(offset2), length)
    out = total.new_zeros(total.shape[0], _BLOCK * length, *total.shape[2:])
    out[:, :length] = total
    return out
