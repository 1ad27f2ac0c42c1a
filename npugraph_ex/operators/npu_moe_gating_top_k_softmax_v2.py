"""Which experts a token goes to, with the softmax before or behind the choice.

Formula (CANN operator documentation, aclnnMoeGatingTopKSoftmaxV2)::

    renorm 0:  y, expert_idx = topk(softmax(x), k)
    renorm 1:  values, expert_idx = topk(x, k);   y = softmax(values)
    expert_idx[i] = number of experts             where finished[i]

The lower index comes first among equals. ``output_softmax`` with ``renorm`` 0 gives the softmax of all experts as well.

Not covered: ``output_softmax`` for three dimensions, whose size torch_npu's meta function announces wrongly.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_moe_gating_top_k_softmax_v2"


@Operator(
    name="npu::npu_moe_gating_top_k_softmax_v2",
    source="CANN operator documentation, aclnnMoeGatingTopKSoftmaxV2",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(torch.randn(4, 8).half(), k=2, output_softmax=True),
        lambda: call(torch.randn(2, 4, 8), k=2, renorm=1),
    ),
)
def npu_moe_gating_top_k_softmax_v2(
    x: torch.Tensor,
    *,
    k: int = 1,
    finished: torch.Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, expert_idx, softmax)``: [..., k] like x, [..., k] int32, and float32 like x's shape or [0].

    x: [rows, experts] or [batch, rows, experts], floating; finished: bool of x's shape without experts.
    """
    experts = x.shape[-1]
    if renorm not in {0, 1, None}:
        raise unsupported(_NAME, "renorm", renorm, "0 and 1")
    if not 0 <= k <= experts:
        raise ValueError(f"{_NAME}: k must be 0 to {experts}, the number of experts; it is {k}.")
    wanted = bool(output_softmax) and not renorm
    if wanted and x.dim() == 3:
        raise unsupported(_NAME, "output_softmax", True, "an x with two dimensions where output_softmax is True")
    wide = x.to(compute_dtype(x))
    weights = torch.softmax(wide, -1)
    # A stable sort keeps the lower index first; topk promises no order among equals.
    values, places = torch.sort(wide if renorm else weights, dim=-1, descending=True, stable=True)
    y = torch.softmax(values[..., :k], -1) if renorm else values[..., :k]
    chosen = places[..., :k].to(torch.int32)
    if finished is not None:
        chosen = torch.where(finished.unsqueeze(-1), experts, chosen)
    all_weights = weights if wanted else wide.new_zeros(0)
    return y.to(x.dtype).contiguous(), chosen.contiguous(), all_weights
