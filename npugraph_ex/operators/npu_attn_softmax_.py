"""Softmax of attention scores in place, and the gradient of softmax and product, in place too.

Formula (op-plugin, test/test_custom_ops/test_npu_attn_softmax.py)::

    npu_attn_softmax_:           input = softmax(input)                         over the last dimension
    npu_attn_softmax_backward_:  d = grad_output @ values^T
                                 input = (d - sum(d * input)) * input           input is the softmax
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import FLOATS, compute_dtype
from npugraph_ex.operators._record import Operator, call

_SOURCE = "op-plugin, test/test_custom_ops/test_npu_attn_softmax.py"


@Operator(
    name="npu::npu_attn_softmax_", source=_SOURCE, dtypes=FLOATS, examples=(lambda: call(torch.randn(2, 4, 8).half()),)
)
def npu_attn_softmax_(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """``input`` itself, changed."""
    return input.copy_(torch.softmax(input.to(compute_dtype(input)), dim=-1))


@Operator(
    name="npu::npu_attn_softmax_backward_",
    source=_SOURCE,
    dtypes=FLOATS,
    examples=(lambda: call(torch.rand(2, 4, 8).half(), torch.randn(2, 4, 16).half(), torch.randn(2, 8, 16).half()),),
)
def npu_attn_softmax_backward_(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    grad_output: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """``input`` [B, Sq, Skv] itself, changed; grad_output [B, Sq, H], values [B, Skv, H]."""
    dtype = compute_dtype(input, grad_output, values)
    softmax, d = input.to(dtype), grad_output.to(dtype) @ values.to(dtype).mT
    return input.copy_((d - (d * softmax).sum(-1, keepdim=True)) * softmax)
