"""Residual sum and RMS normalisation with a bias: an operator of vLLM-Ascend's own.

Formula (vLLM-Ascend, csrc/add_rms_norm_bias)::

    x    = x1 + x2
    rstd = 1 / sqrt(mean(x_i^2) + epsilon)          mean over the dimensions that gamma has
    y    = x * rstd * gamma + beta

The sum is rounded before it is normalised, and y once, as by ``npu_add_rms_norm``, which this is where there is no bias.
"""

from __future__ import annotations

from typing import Any

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_rms_norm import normalise


def _example() -> Call:
    x1, x2 = torch.rand(2, 3, 16).half()
    # All positive, so that nothing cancels; that would show how the sum was rounded.
    gamma, beta = torch.rand(2, 16).half() + 0.5
    return call(x1, x2, gamma, beta)


def _fake(*arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formula computes the metadata too."""
    return npu_add_rms_norm_bias(*arguments, **named)


@Operator(
    name="_C_ascend::npu_add_rms_norm_bias",
    source="vLLM-Ascend, csrc/torch_binding.cpp and csrc/add_rms_norm_bias",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    schema=(
        "(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6) "
        "-> (Tensor y, Tensor rstd, Tensor x)"
    ),
    fake=_fake,
    alike=Alike(shape=("x1", "x2"), dtype=("x1", "x2", "gamma", "beta")),
    examples=(_example,),
)
def npu_add_rms_norm_bias(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, rstd, x)``: y and x like ``x1``; rstd as in ``npu_rms_norm``; beta has the shape of gamma."""
    dtype = compute_dtype(x1, x2, gamma)
    x = stored_like(x1, x1.to(dtype) + x2.to(dtype), x1.dtype)
    y, rstd = normalise(x, gamma, epsilon, dtype)
    y = y if beta is None else y + beta.to(dtype)
    return stored_like(x1, y, x1.dtype), rstd.contiguous(), x
