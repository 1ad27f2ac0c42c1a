"""The reference of attention in training: every layout gives torch's values and gradients, in float64."""

from __future__ import annotations

import pytest
import torch

from npugraph_ex.operators import OPERATORS

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")


def stored(heads: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] in a layout."""
    if layout == "BNSD":
        return heads
    rows = heads.transpose(1, 2)
    if layout == "BSND":
        return rows.contiguous()
    return rows.flatten(2) if layout == "BSH" else rows.flatten(2).transpose(0, 1).contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("width", [8, 4], ids=["as wide", "narrower values"])
def test_layouts_hold_the_same_attention(layout: str, key_heads: int, width: int) -> None:
    """Shared heads, and values narrower than keys, as latent attention has them."""
    q, k = torch.randn(2, 4, 3, 8, dtype=torch.float64), torch.randn(2, key_heads, 5, 8, dtype=torch.float64)
    v = torch.randn(2, key_heads, 5, width, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, scale=0.3, enable_gqa=True)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    given = [stored(tensor.detach(), layout) for tensor in leaves]
    output = OPERATORS["npu::npu_fusion_attention_v3"].formula(*given, 4, layout, scale=0.3)[0]
    torch.testing.assert_close(output, stored(expected.detach(), layout), rtol=1e-12, atol=1e-12)
    found = OPERATORS["npu::npu_fusion_attention_grad_v3"].formula(
        *given, stored(upstream, layout), 4, layout, scale_value=0.3
    )
    for have, want in zip(found, gradients, strict=False):
        torch.testing.assert_close(have, stored(want, layout), rtol=1e-12, atol=1e-12)
