"""RMS normalisation with a weight that is counted from one, as Gemma's layers have it.

Formula (CANN operator documentation, aclnnGemmaRmsNorm)::

    rstd = 1 / sqrt(mean(x_i^2) + epsilon)          mean over the dimensions that gamma has
    y    = x * rstd * (1 + gamma)

``rstd`` is float32 and keeps the normalised dimensions with size 1, as the operator's meta function says.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_rms_norm import normalise


@Operator(
    name="npu::npu_gemma_rms_norm",
    source="CANN operator documentation, aclnnGemmaRmsNorm",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    floats_only=True,
    explain_unfused=True,
    alike=Alike(dtype=("input", "gamma")),
    examples=(
        lambda: call(torch.randn(3, 16).half(), torch.randn(16).half()),
        lambda: call(torch.randn(2, 3, 16).bfloat16().transpose(0, 1), torch.randn(2, 16).bfloat16(), 1e-5),
    ),
)
def npu_gemma_rms_norm(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gamma: torch.Tensor,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)``: y like ``input``; rstd float32 (float64 for float64), 1 in the normalised dimensions."""
    dtype = compute_dtype(input, gamma)
    y, rstd = normalise(input, gamma.to(dtype) + 1, epsilon, dtype)
    return stored_like(input, y, input.dtype), rstd.contiguous()
