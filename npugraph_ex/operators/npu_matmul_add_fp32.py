"""A product added to a float32 sum in place, as weight gradients are gathered.

Formula (ATB library, Linear with accumulation; op-plugin, ops/atb/LinearAtb.cpp): ``C += x^T weight``.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import HALVES, compute_dtype
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="atb::_npu_matmul_add_fp32",
    source="op-plugin, ops/atb/LinearAtb.cpp; ATB library, Linear",
    dtypes=HALVES,
    examples=(lambda: call(torch.randn(8, 3).half(), torch.randn(8, 5).half(), torch.randn(3, 5)),),
)
def npu_matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, C: torch.Tensor) -> None:
    """``x`` [K, M] and ``weight`` [K, N] of float16 or bfloat16, ``C`` [M, N] of float32, changed."""
    dtype = compute_dtype(x, weight, C)
    C.copy_(C.to(dtype) + x.to(dtype).mT @ weight.to(dtype))
