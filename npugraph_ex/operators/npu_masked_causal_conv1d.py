"""Causal convolution of each channel along the sequence, with masked positions of the result set to 0.

Formula (operator documentation of ``torch_npu.npu_masked_causal_conv1d``), with W taps and what lies before the sequence 0::

    out[s, b, h] = sum over k of weight[k, h] * input[s - (W - 1 - k), b, h]        0 where mask[b, s] is false
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._gradients import gradients
from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call

_SOURCE = "operator documentation of torch_npu.npu_masked_causal_conv1d"


def _convolved(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The formula on operands of one dtype."""
    taps, length = weight.shape[0], x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, taps - 1, 0))
    out = torch.zeros_like(x)
    for tap in range(taps):
        out = out + weight[tap] * padded[tap : tap + length]
    return out if mask is None else torch.where(mask.mT.unsqueeze(-1), out, torch.zeros_like(out))


@Operator(
    name="npu::npu_masked_causal_conv1d",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16),
    alike=Alike(dtype=("input", "weight")),
    examples=(
        lambda: call(torch.randn(5, 2, 4).half(), torch.randn(3, 4).half(), mask=torch.rand(2, 5) > 0.3),
        lambda: call(torch.randn(2, 5, 4).bfloat16().transpose(0, 1), torch.randn(3, 4).bfloat16()),
    ),
)
def npu_masked_causal_conv1d(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like ``input`` [S, B, H]; weight [W, H], mask [B, S] of bool."""
    dtype = compute_dtype(input, weight)
    return stored_like(input, _convolved(input.to(dtype), weight.to(dtype), mask), input.dtype)


@Operator(
    name="npu::npu_masked_causal_conv1d_backward",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(
            torch.randn(5, 2, 4).half(),
            torch.randn(5, 2, 4).half(),
            torch.randn(3, 4).half(),
            mask=torch.rand(2, 5) > 0.3,
        ),
    ),
)
def npu_masked_causal_conv1d_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(grad_input, grad_weight)``, like ``grad_output`` and ``weight``, both in grad_output's dtype."""
    to_input, to_weight = gradients(lambda x, w: _convolved(x, w, mask), (input, weight), (grad_output,))
    return (stored_like(grad_output, to_input, grad_output.dtype), stored_like(weight, to_weight, grad_output.dtype))
