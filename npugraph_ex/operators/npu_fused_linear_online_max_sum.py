"""Cross entropy of a vocabulary that several devices share: what each computes of its part, the loss of all, and the gradients.

Formula (operator documentation of ``torch_npu.npu_fused_linear_online_max_sum``, of
``torch_npu.npu_fused_cross_entropy_loss_with_max_sum``, and of
``torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward``), for the columns from ``vocab_start_index`` to
``vocab_end_index``::

    logits           = input @ weight^T
    logits_max       = max of a row;   sum_exp_logits = sum(exp(logits - logits_max))
    target_mask      = target < vocab_start_index or target > vocab_end_index
    masked_target    = target - vocab_start_index, 0 where the mask is set
    predicted_logits = logits[masked_target] - logits_max, 0 where the mask is set

    loss    = log(sum_exp_logits) - predicted_logits                            of the reduced values
    softmax = exp(vocab_parallel_logits - logits_max) / sum_exp_logits

    d           = grad * (softmax - 1 at masked_target of the rows whose mask is not set)
    grad_input  = d @ weight;   grad_weight = d^T @ input
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, stored_like, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_LOSS = "npu_fused_cross_entropy_loss_with_max_sum"
_BACKWARD = "npu_fused_linear_cross_entropy_loss_with_max_sum_backward"


@Operator(
    name="npu::npu_fused_linear_online_max_sum",
    source="operator documentation of torch_npu.npu_fused_linear_online_max_sum",
    dtypes=HALVES,
    alike=Alike(dtype=("input", "weight")),
    examples=(
        lambda: call(torch.randn(5, 8).half(), torch.randn(6, 8).half(), torch.tensor([3, 9, 4, 0, 8]), 3, 8),
        lambda: call(torch.randn(5, 8).half(), torch.randn(6, 8).half(), torch.tensor([3, 9, 4, 0, 8]), 3, 8, True),
    ),
)
def npu_fused_linear_online_max_sum(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """``(logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, vocab_parallel_logits)``.

    input: [T, H]. weight: [V, H]. target: [T]. The first three: float32 [T]. target_mask: uint8, a bit for each row, the first in
    a byte's highest bit, filled up with ones. masked_target: like target. The last: [T, V] of input's dtype, or empty.
    """
    dtype = compute_dtype(input, weight)
    logits = input.to(dtype) @ weight.to(dtype).mT
    largest = logits.amax(-1)
    shifted = logits - largest.unsqueeze(-1)
    outside = (target < vocab_start_index) | (target > vocab_end_index)
    index = torch.where(outside, 0, target - vocab_start_index)
    predicted = torch.where(outside, 0.0, shifted.gather(-1, index.long().unsqueeze(-1)).squeeze(-1))
    bits = torch.nn.functional.pad(outside.to(torch.uint8), (0, -outside.numel() % 8), value=1).reshape(-1, 8)
    mask = (bits << torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)
    kept = logits.to(input.dtype) if return_logits else input.new_empty(0)
    return largest, shifted.exp().sum(-1), predicted, mask, index.to(target.dtype), kept


@Operator(
    name="npu::npu_fused_cross_entropy_loss_with_max_sum",
    source="operator documentation of torch_npu.npu_fused_cross_entropy_loss_with_max_sum",
    dtypes=(torch.float32,),
    alike=Alike(
        shape=("logits_max", "sum_exp_logits", "predicted_logits"),
        dtype=("logits_max", "sum_exp_logits", "predicted_logits"),
    ),
    examples=(
        lambda: call(torch.ones(3), torch.rand(3) + 1, torch.randn(3)),
        lambda: call(torch.ones(3), torch.rand(3) + 1, torch.randn(3), vocab_parallel_logits=torch.randn(3, 8)),
    ),
)
def npu_fused_cross_entropy_loss_with_max_sum(
    logits_max: torch.Tensor,
    sum_exp_logits: torch.Tensor,
    predicted_logits: torch.Tensor,
    *,
    label_smoothing: float | None = 0.0,
    input: torch.Tensor | None = None,  # noqa: A002 - the schema's name
    weight: torch.Tensor | None = None,
    vocab_parallel_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(loss, softmax)``: [T] like ``logits_max``; float32 [T, V], empty without ``vocab_parallel_logits``."""
    for name, value in (("label_smoothing", label_smoothing or None), ("input", input), ("weight", weight)):
        if value is not None:
            raise unsupported(_LOSS, name, "a tensor" if isinstance(value, torch.Tensor) else value, "none")
    loss = sum_exp_logits.log() - predicted_logits
    if vocab_parallel_logits is None:
        return loss, logits_max.new_empty(0)
    shifted = vocab_parallel_logits.to(compute_dtype(vocab_parallel_logits, logits_max)) - logits_max.unsqueeze(-1)
    return loss, shifted.exp() / sum_exp_logits.unsqueeze(-1)


def _gradient_example() -> Call:
    x, weight, target = torch.randn(5, 8).half(), torch.randn(6, 8).half(), torch.tensor([3, 9, 4, 0, 8])
    largest, total, _, mask, index, _ = npu_fused_linear_online_max_sum(x, weight, target, 3, 8)
    return call(torch.randn(5), x, weight, mask, index, logits_max=largest, sum_exp_logits=total)


def _softmax_example() -> Call:
    operands, _ = _gradient_example()
    return call(*operands, softmax=torch.rand(5, 6).softmax(-1))


@Operator(
    name=f"npu::{_BACKWARD}",
    source=f"operator documentation of torch_npu.{_BACKWARD}",
    dtypes=HALVES,
    examples=(_gradient_example, _softmax_example),
)
def npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
    grad: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    target_mask: torch.Tensor,
    masked_target: torch.Tensor,
    label_smoothing: float = 0.0,
    logits_max: torch.Tensor | None = None,
    sum_exp_logits: torch.Tensor | None = None,
    softmax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input [T, H] and weight [V, H], like them; grad [T]. It takes the softmax, or the maxima and sums."""
    if label_smoothing != 0.0:
        raise unsupported(_BACKWARD, "label_smoothing", label_smoothing, "0.0")
    dtype = compute_dtype(grad, input, weight)
    x, wide = input.to(dtype), weight.to(dtype)
    if softmax is not None:
        share = softmax.to(dtype)
    elif logits_max is not None and sum_exp_logits is not None:
        share = (x @ wide.mT - logits_max.to(dtype).unsqueeze(-1)).exp() / sum_exp_logits.to(dtype).unsqueeze(-1)
    else:
        raise refused(_BACKWARD, "softmax", None, "given, or logits_max and sum_exp_logits")
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=target_mask.device)
    outside = ((target_mask.unsqueeze(-1) >> shifts) & 1).reshape(-1)[: x.shape[0]].bool()
    chosen = torch.nn.functional.one_hot(masked_target.long(), wide.shape[0]).to(dtype)
    d = (share - torch.where(outside.unsqueeze(-1), 0.0, chosen)) * grad.to(dtype).unsqueeze(-1)
    return stored_like(input, d @ wide, input.dtype), stored_like(weight, d.mT @ x, weight.dtype)
