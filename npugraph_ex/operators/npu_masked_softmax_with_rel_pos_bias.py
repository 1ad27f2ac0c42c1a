"""Softmax of attention scores of windows, with a mask for each window and a bias for each head.

Formula (op-plugin: the reference of its test; CANN operator documentation, aclnnMaskedSoftmaxWithRelPosBias)::

    out = softmax(scale_value * x + atten_mask + relative_pos_bias)          over the last dimension
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_masked_softmax_with_rel_pos_bias",
    source="CANN operator documentation, aclnnMaskedSoftmaxWithRelPosBias; ops-nn, norm/masked_softmax_with_rel_pos_bias",
    covers={"inner_precision_mode": (0, 1)},
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    floats_only=True,
    alike=Alike(dtype=("x", "atten_mask", "relative_pos_bias")),
    examples=(
        lambda: call(torch.randn(2, 3, 2, 4, 8).half(), torch.randn(3, 4, 8).half(), torch.randn(2, 4, 8).half(), 0.5),
    ),
)
def npu_masked_softmax_with_rel_pos_bias(
    x: torch.Tensor,
    atten_mask: torch.Tensor | None,
    relative_pos_bias: torch.Tensor,
    scale_value: float = 1.0,
    inner_precision_mode: int = 0,
) -> torch.Tensor:
    """Like ``x`` [B, W, N, S1, S2] or [B * W, N, S1, S2]; atten_mask [W, S1, S2] or broadcast to x, bias [N, S1, S2] likewise."""
    dtype = compute_dtype(x)
    scores = x.to(dtype) * scale_value
    if atten_mask is not None:
        mask = atten_mask.to(dtype)
        mask = mask.unsqueeze(-3) if mask.dim() == 3 else mask
        windows = mask.shape[-4] if mask.dim() > 3 else 1
        apart = scores.unflatten(0, (-1, windows)) if scores.dim() == 4 else scores
        scores = (apart + mask).view(x.shape)
    return stored_like(x, torch.softmax(scores + relative_pos_bias.to(dtype), -1), x.dtype)
