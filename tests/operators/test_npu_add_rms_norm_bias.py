"""vLLM-Ascend's residual sum and RMS normalisation with a bias."""

from __future__ import annotations

import torch

from npugraph_ex.operators.npu_add_rms_norm import npu_add_rms_norm
from npugraph_ex.operators.npu_add_rms_norm_bias import npu_add_rms_norm_bias


def test_the_bias_is_added_before_the_one_rounding() -> None:
    """(1 + 2, 3 + 1) has the mean square 12.5; without a bias it is `npu_add_rms_norm` to the bit."""
    x1, x2 = torch.tensor([[1.0, 3.0]]).bfloat16(), torch.tensor([[2.0, 1.0]]).bfloat16()
    gamma, beta = torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([0.125, -0.25]).bfloat16()
    y, rstd, x = npu_add_rms_norm_bias(x1, x2, gamma, beta, 0.0)
    scale = 12.5**-0.5
    assert torch.equal(y, torch.tensor([[3 * scale + 0.125, 8 * scale - 0.25]]).bfloat16())
    torch.testing.assert_close(rstd, torch.tensor([[scale]]))
    assert x.tolist() == [[3.0, 4.0]]
    for given, wanted in zip(npu_add_rms_norm_bias(x1, x2, gamma), npu_add_rms_norm(x1, x2, gamma), strict=True):
        assert torch.equal(given, wanted)
