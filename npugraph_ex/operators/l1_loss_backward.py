"""The gradients of torch's losses that torch_npu computes by operators of its own: L1, KL divergence, binary cross entropy.

Formula (CANN operator documentation, aclnnL1LossBackward, aclnnKlDivBackward, aclnnKlDivTargetBackward and
aclnnBinaryCrossEntropyWithLogitsBackward), with ``grad`` divided by the number of elements where ``reduction`` is the mean (1)::

    l1:                   grad * sign(input - target)
    kl_div, of input:     -grad * target                        log_target: -grad * exp(target)
    kl_div, of target:    grad * (log(target) + 1 - input)      0 where target is 0
                          log_target: grad * exp(target) * (target + 1 - input)
    binary cross entropy: grad * weight * (1 - target - (1 + (pos_weight - 1) * target) * sigmoid(-input))
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_NONE, _MEAN, _SUM = 0, 1, 2


def _shared(operator: str, grad: torch.Tensor, like: torch.Tensor, reduction: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of each element's loss, which broadcasts to ``like``."""
    if reduction not in {_NONE, _MEAN, _SUM}:
        raise unsupported(operator, "reduction", reduction, "0 (none), 1 (mean) and 2 (sum)")
    return grad.to(dtype) / like.numel() if reduction == _MEAN else grad.to(dtype)


def _stored_for(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` in the memory that op-plugin allocates for these gradients (op_plugin_functions.yaml)."""
    return torch.empty(target.shape, dtype=target.dtype, device=target.device).copy_(value)


def _example() -> Call:
    return call(torch.rand(3, 8).half(), torch.randn(3, 8).half(), torch.rand(3, 8).half(), 1)


@Operator(
    name="npu::l1_loss_backward",
    source="CANN operator documentation, aclnnL1LossBackward",
    dtypes=FLOATS,
    examples=(_example,),
)
def l1_loss_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    target: torch.Tensor,
    reduction: int,
) -> torch.Tensor:
    """The gradient of input, like it."""
    dtype = compute_dtype(grad_output, input, target)
    gradient = _shared("l1_loss_backward", grad_output, input, reduction, dtype)
    return stored_like(input, gradient * torch.sign(input.to(dtype) - target.to(dtype)), input.dtype)


@Operator(
    name="npu::kl_div_backward",
    source="CANN operator documentation, aclnnKlDivBackward",
    dtypes=FLOATS,
    examples=(_example,),
)
def kl_div_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    target: torch.Tensor,
    reduction: int = 1,
    *,
    log_target: bool = False,
) -> torch.Tensor:
    """The gradient of input, like it."""
    dtype = compute_dtype(grad_output, input, target)
    gradient = _shared("kl_div_backward", grad_output, input, reduction, dtype)
    probability = target.to(dtype).exp() if log_target else target.to(dtype)
    return stored_like(input, -gradient * probability, input.dtype)


@Operator(
    name="npu::kl_div_target_backward",
    source="CANN operator documentation, aclnnKlDivTargetBackward",
    dtypes=FLOATS,
    examples=(_example,),
)
def kl_div_target_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    target: torch.Tensor,
    reduction: int = 1,
    *,
    log_target: bool = False,
) -> torch.Tensor:
    """The gradient of target, contiguous and in its dtype."""
    dtype = compute_dtype(grad_output, input, target)
    gradient = _shared("kl_div_target_backward", grad_output, input, reduction, dtype)
    x, wide = input.to(dtype), target.to(dtype)
    if log_target:
        return _stored_for(target, gradient * wide.exp() * (wide + 1 - x))
    return _stored_for(target, torch.where(wide == 0, 0.0, gradient * (wide.log() + 1 - x)))


@Operator(
    name="npu::npu_binary_cross_entropy_with_logits_backward",
    source="CANN operator documentation, aclnnBinaryCrossEntropyWithLogitsBackward",
    dtypes=FLOATS,
    examples=(
        lambda: call(
            torch.rand(3, 8).half(),
            torch.randn(3, 8).half(),
            torch.rand(3, 8).half(),
            torch.rand(8).half(),
            torch.rand(8).half(),
            1,
        ),
    ),
)
def npu_binary_cross_entropy_with_logits_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    target: torch.Tensor,
    weight_opt: torch.Tensor | None,
    pos_weight_opt: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    """The gradient of input, contiguous and in target's dtype; weights broadcast to it."""
    dtype = compute_dtype(grad_output, input, target)
    gradient = _shared("npu_binary_cross_entropy_with_logits_backward", grad_output, input, reduction, dtype)
    if weight_opt is not None:
        gradient = gradient * weight_opt.to(dtype)
    truth = target.to(dtype)
    positive = 1.0 if pos_weight_opt is None else 1 + (pos_weight_opt.to(dtype) - 1) * truth
    return _stored_for(target, gradient * (1 - truth - positive * torch.sigmoid(-input.to(dtype))))
