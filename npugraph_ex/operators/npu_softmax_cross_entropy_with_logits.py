"""Cross entropy of rows of probabilities, and its gradient.

Formula (operator documentation of ``torch_npu.npu_softmax_cross_entropy_with_logits``, after TensorFlow's operator of that name)::

    loss_n   = -sum(labels_n * log_softmax(input_n))
    gradient = grad_n * (softmax(input_n) - labels_n)           exact where the labels of a row sum to 1
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call

_SOURCE = "operator documentation of torch_npu.npu_softmax_cross_entropy_with_logits"


@Operator(
    name="npu::npu_softmax_cross_entropy_with_logits",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(3, 8), torch.rand(3, 8)),),
)
def npu_softmax_cross_entropy_with_logits(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    labels: torch.Tensor,
) -> torch.Tensor:
    """[N] of the dtype of ``input`` [N, C]; ``labels`` [N, C]."""
    dtype = compute_dtype(input, labels)
    return -(labels.to(dtype) * torch.log_softmax(input.to(dtype), dim=-1)).sum(-1).to(input.dtype)


@Operator(
    name="npu::npu_softmax_cross_entropy_with_logits_backward",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.rand(3), torch.randn(3, 8), torch.rand(3, 8)),),
)
def npu_softmax_cross_entropy_with_logits_backward(
    grad: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    labels: torch.Tensor,
) -> torch.Tensor:
    """Like ``input`` [N, C]; ``grad`` [N]."""
    dtype = compute_dtype(grad, input, labels)
    gradient = (torch.softmax(input.to(dtype), dim=-1) - labels.to(dtype)) * grad.to(dtype).unsqueeze(-1)
    return stored_like(input, gradient, input.dtype)
