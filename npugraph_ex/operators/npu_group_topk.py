"""The best groups of experts, chosen in place: the scores of all other groups become 0.

Formula (ATB library, GroupTopk): the columns of each row are ``group_num`` groups of equal size; a group's score is its largest
element, or with ``n`` above 1 the sum of its ``n`` largest. The ``k`` groups of the highest scores stay, of equal ones the first.

The schema does not say that the operator writes its argument.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import HALVES, compute_dtype
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="atb::_npu_group_topk",
    source="op-plugin, ops/atb/GroupTopkAtb.cpp; ATB library, GroupTopk",
    dtypes=HALVES,
    writes=("self",),
    examples=(lambda: call(torch.randn(3, 8).half(), k=2, group_num=4, n=2),),
)
def npu_group_topk(self: torch.Tensor, k: int = 0, group_num: int = 1, n: int = 1) -> None:
    """``self`` [tokens, experts] of float16 or bfloat16, changed."""
    groups = self.unflatten(-1, (group_num, -1))
    scores = groups.to(compute_dtype(self)).topk(n, -1).values.sum(-1)
    worst = scores.sort(dim=-1, descending=True, stable=True).indices[:, k:]
    left_out = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, worst, True)
    self.copy_(groups.masked_fill(left_out.unsqueeze(-1), 0.0).flatten(-2))
