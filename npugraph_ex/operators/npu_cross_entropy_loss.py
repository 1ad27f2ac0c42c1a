"""Cross entropy of class indices, and its gradient.

Formula (CANN operator documentation, aclnnCrossEntropyLoss and aclnnCrossEntropyLossGrad), as torch's cross entropy::

    log_prob = input - lse                          lse = log(sum(exp(input))) of a row
    loss_n   = (1 - s) * -w[target] * log_prob[target] + s / C * sum(-w * log_prob)         0 where target is ignore_index
    mean     = sum(loss_n) / sum(w[target] of the rows that are not ignored)

where s is ``label_smoothing`` and w ``weight``, ones where there is none. Not covered: the z loss, which the device does not
compute either; ``lse_square_scale_for_zloss`` must be 0, and the second loss is 0.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS, HALVES, compute_dtype, refused, stored_like, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_REDUCTIONS = ("mean", "sum", "none")


def _refuse(operator: str, x: torch.Tensor, weight: torch.Tensor | None, reduction: str, scale: float) -> None:
    """Raise for what the documentation forbids or the formula does not cover."""
    if reduction not in _REDUCTIONS:
        raise unsupported(operator, "reduction", reduction, ", ".join(map(repr, _REDUCTIONS)))
    if scale != 0.0:
        raise unsupported(operator, "lse_square_scale_for_zloss", scale, "0.0")
    if x.dim() != 2:
        raise ValueError(f"{operator}: input must be [N, C]; its shape is {tuple(x.shape)}.")
    if weight is not None and weight.dtype in HALVES:
        raise refused(operator, "weight", weight.dtype, "torch.float32")


def _example() -> Call:
    return call(
        torch.randn(4, 8).half(), torch.tensor([1, 7, 0, 3]), torch.rand(8), ignore_index=7, label_smoothing=0.1
    )


@Operator(
    name="npu::npu_cross_entropy_loss",
    source="CANN operator documentation, aclnnCrossEntropyLoss",
    dtypes=FLOATS,
    examples=(_example, lambda: call(torch.randn(4, 8), torch.tensor([1, 7, 0, 3]), reduction="none")),
)
def npu_cross_entropy_loss(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(loss, log_prob, zloss, lse_for_zloss)``, of the dtype of input [N, C].

    loss and zloss: [1], or [N] without reduction. log_prob: [N, C]. lse_for_zloss: [N].
    """
    _refuse("npu_cross_entropy_loss", input, weight, reduction, lse_square_scale_for_zloss)
    x = input.to(compute_dtype(input, weight))
    log_prob = torch.log_softmax(x, dim=-1)
    loss = torch.nn.functional.cross_entropy(
        x,
        target.long(),
        None if weight is None else weight.to(x.dtype),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    ).reshape(-1)
    lse = torch.logsumexp(x, dim=-1)
    stored = (part.to(input.dtype).contiguous() for part in (loss, log_prob, torch.zeros_like(loss), lse))
    first, second, third, fourth = stored
    return first, second, third, fourth


def _gradient_example() -> Call:
    args, kwargs = _example()
    return call(torch.rand(1).half(), torch.log_softmax(args[0], dim=-1), *args[1:], **kwargs)


@Operator(
    name="npu::npu_cross_entropy_loss_backward",
    source="CANN operator documentation, aclnnCrossEntropyLossGrad",
    dtypes=FLOATS,
    alike=Alike(dtype=("log_prob", "grad_loss", "grad_zloss", "lse_for_zloss")),
    examples=(_gradient_example,),
)
def npu_cross_entropy_loss_backward(
    grad_loss: torch.Tensor,
    log_prob: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    grad_zloss: torch.Tensor | None = None,
    lse_for_zloss: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> torch.Tensor:
    """The gradient of input, like ``log_prob``."""
    _refuse("npu_cross_entropy_loss_backward", log_prob, weight, reduction, lse_square_scale_for_zloss)
    dtype = compute_dtype(grad_loss, log_prob, weight)
    classes = log_prob.shape[-1]
    weights = torch.ones(classes, dtype=dtype, device=log_prob.device) if weight is None else weight.to(dtype)
    kept = target != ignore_index
    index = torch.where(kept, target, 0).long()
    of_target = torch.where(kept, weights[index], 0.0)
    gradient = grad_loss.to(dtype) / of_target.sum() if reduction == "mean" else grad_loss.to(dtype)
    to_loss = (1 - label_smoothing) * gradient * of_target
    to_smooth = torch.where(kept, gradient * (label_smoothing / classes), 0.0)
    chosen = torch.nn.functional.one_hot(index, classes).to(dtype)
    pulled = chosen * to_loss.unsqueeze(-1) + weights * to_smooth.unsqueeze(-1)
    pushed = log_prob.to(dtype).exp() * (to_loss + to_smooth * weights.sum()).unsqueeze(-1)
    return stored_like(log_prob, pushed - pulled, log_prob.dtype)
