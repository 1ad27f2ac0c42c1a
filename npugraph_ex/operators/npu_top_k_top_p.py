"""Keeps the likeliest tokens of each row, by number and by probability, and sets the others to minus infinity.

Formula (CANN operator documentation, aclnnApplyTopKTopP), with each row in ascending order::

    kept by k:  logits >= the k-th highest
    kept by p:  cumulative sum of softmax(kept logits) > 1 - p, and the highest one always
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_top_k_top_p",
    source="CANN operator documentation, aclnnApplyTopKTopP",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("logits", "p")),
    examples=(
        lambda: call(torch.randn(2, 8), torch.tensor([0.5, 0.9]), torch.tensor([3, 5], dtype=torch.int32)),
        lambda: call(torch.randn(2, 8).half(), None, torch.tensor([3, 5], dtype=torch.int32)),
    ),
)
def npu_top_k_top_p(logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, vocabulary] like logits. p: [rows] like logits; k: [rows] int32, from 1 to the size of the vocabulary."""
    ordered, places = logits.sort(dim=-1, stable=True)
    if k is not None:
        lowest = ordered.gather(1, (logits.shape[1] - k.long()).unsqueeze(1))
        ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
    if p is not None:
        wide = compute_dtype(logits)
        below = ordered.to(wide).softmax(-1).cumsum(-1) <= 1 - p.to(wide).unsqueeze(1)
        below[:, -1] = False
        ordered = ordered.masked_fill(below, -torch.inf)
    return torch.empty_like(ordered).scatter_(1, places, ordered)
