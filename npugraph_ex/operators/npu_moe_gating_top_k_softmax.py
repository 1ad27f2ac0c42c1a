"""Which experts a token goes to.

Formula (operator documentation of ``torch_npu.npu_moe_gating_top_k_softmax``), for each row i of ``rows`` rows::

    y, expert_idx = topk(softmax(x), k)          the lower index first among equals
    row_idx[i, j] = j * rows + i                 counts down the columns
    expert_idx[i] = number of experts            where finished[i]
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_moe_gating_top_k_softmax",
    source="operator documentation of torch_npu.npu_moe_gating_top_k_softmax",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    floats_only=True,
    examples=(
        lambda: call(torch.randn(4, 8).half(), k=2),
        lambda: call(torch.randn(4, 8).half(), torch.tensor([False, True, False, True]), 2),
    ),
)
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, expert_idx, row_idx)``, each [..., k]: y like ``x``, the others int32.

    x: [rows, experts] or [batch, rows, experts], floating; finished: bool of x's shape without experts.
    """
    experts = x.shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k must be 1 to {experts}, the number of experts; it is {k}.")
    weights = torch.softmax(x.to(compute_dtype(x)), -1)
    # A stable sort keeps the lower index first; topk promises no order among equals.
    ordered, places = torch.sort(weights, dim=-1, descending=True, stable=True)
    chosen = places[..., :k].to(torch.int32)
    if finished is not None:
        chosen = torch.where(finished.unsqueeze(-1), experts, chosen)
    rows = x.numel() // experts if experts else 0
    numbers = torch.arange(rows * k, dtype=torch.int32).reshape(k, rows).t()
    return ordered[..., :k].to(x.dtype).contiguous(), chosen.contiguous(), numbers.reshape(chosen.shape).contiguous()
