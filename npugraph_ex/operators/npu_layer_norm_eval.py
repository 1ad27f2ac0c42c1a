"""Layer normalisation without statistics, for inference, and the gradients of layer normalisation.

Formula (operator documentation of ``torch_npu.npu_layer_norm_eval``), as ``torch.nn.functional.layer_norm``::

    y = (input - mean) / sqrt(var + eps) * weight + bias        mean and variance over normalized_shape
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._layer_norm import gradients
from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_layer_norm_eval",
    dtypes=FLOATS,
    floats_only=True,
    source="operator documentation of torch_npu.npu_layer_norm_eval",
    examples=(lambda: call(torch.randn(3, 16).half(), [16], torch.randn(16).half(), torch.randn(16).half()),),
)
def npu_layer_norm_eval(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Like ``input``."""
    dtype = compute_dtype(input, weight, bias)
    weight, bias = (None if part is None else part.to(dtype) for part in (weight, bias))
    y = torch.nn.functional.layer_norm(input.to(dtype), list(normalized_shape), weight, bias, eps)
    return stored_like(input, y, input.dtype)


@Operator(
    name="npu::npu_layernorm_grad",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnLayerNormBackward",
    examples=(
        lambda: call(
            *(torch.randn(3, 16).half() for _ in range(2)),
            [16],
            torch.zeros(3, 1),
            torch.ones(3, 1),
            torch.ones(16).half(),
            None,
        ),
    ),
)
def npu_layernorm_grad(
    grad_out: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dx, dweight, dbias)``: dx like ``input``; the others of ``normalized_shape``, of the dtype of weight, bias or input."""
    dtype = compute_dtype(grad_out, input, weight)
    gamma = torch.ones(list(normalized_shape), dtype=dtype, device=input.device) if weight is None else weight
    shape = (*input.shape[: input.dim() - len(normalized_shape)], *(1 for _ in normalized_shape))
    statistics = (part.to(dtype).reshape(shape) for part in (mean, rstd))
    dx, dgamma, dbeta = gradients(grad_out.to(dtype), input.to(dtype), gamma, *statistics)
    dweight, dbias = (
        part.to(input.dtype if like is None else like.dtype).contiguous()
        for part, like in ((dgamma, weight), (dbeta, bias))
    )
    return stored_like(input, dx, input.dtype), dweight, dbias
