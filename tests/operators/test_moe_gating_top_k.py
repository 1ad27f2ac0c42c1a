"""vLLM-Ascend's choice of experts."""

from __future__ import annotations

import torch

from npugraph_ex.operators.moe_gating_top_k import moe_gating_top_k
from npugraph_ex.operators.npu_moe_gating_top_k import npu_moe_gating_top_k


def test_the_weights_of_the_chosen_experts_add_up() -> None:
    """With `renorm` they are the softmax of the chosen logits, times the factor; else those of npu_moe_gating_top_k."""
    x = torch.tensor([[0.0, 3.0, 1.0, 2.0], [1.0, -1.0, 5.0, 4.0]])
    y, chosen, _ = moe_gating_top_k(x, 2, 1, 1, 1, 1, 0, False, 2.0, 1e-20)
    assert chosen.tolist() == [[1, 3], [2, 3]]
    torch.testing.assert_close(y, 2 * torch.tensor([[3.0, 2.0], [5.0, 4.0]]).softmax(-1))
    plain = npu_moe_gating_top_k(x, 2, k_group=1, group_count=2, group_select_mode=1, norm_type=1)
    for given, wanted in zip(moe_gating_top_k(x, 2, 1, 2, 1, 0, 1, False, 1.0, 1e-20), plain, strict=True):
        assert torch.equal(given, wanted)
