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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_keeps_what_it_says_and_the_gradient_knows(layout: str) -> None:
    """With identity values the output is the dropped weights: 0 or P / keep_prob; the gradient is that of these weights."""
    keep, heads, rows = 0.7, 4, 64
    leaves = [torch.randn(2, heads, rows, rows, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    leaves.append(torch.eye(rows, dtype=torch.float64).expand(2, heads, rows, rows).clone().requires_grad_())
    q, k, v = leaves
    weights = torch.softmax(q @ k.mT * 0.1, -1)
    given = [stored(tensor.detach(), layout) for tensor in leaves]
    torch.manual_seed(5)
    output, maximum, total, _, seed, _ = OPERATORS["npu::npu_fusion_attention_v3"].formula(
        *given, heads, layout, scale=0.1, keep_prob=keep
    )
    dropped = weights.detach() / keep
    flat = stored(dropped, layout)
    torch.testing.assert_close(output, torch.where(output == 0, 0.0, flat), rtol=1e-12, atol=1e-12)
    assert 0.68 < (output != 0).double().mean() < 0.72  # five standard deviations are 0.013
    plain = OPERATORS["npu::npu_fusion_attention_v3"].formula(*given, heads, layout, scale=0.1)
    torch.testing.assert_close([maximum, total], list(plain[1:3]), rtol=0, atol=0)  # dropping comes after the softmax
    as_heads = output if layout == "BNSD" else _heads_of(output, layout, heads)
    upstream = torch.randn(2, heads, rows, rows, dtype=torch.float64)
    found = OPERATORS["npu::npu_fusion_attention_grad_v3"].formula(
        *given, stored(upstream, layout), heads, layout, scale_value=0.1, keep_prob=keep, seed=seed
    )
    expected = torch.autograd.grad((weights * (as_heads != 0) / keep) @ v, leaves, upstream)
    for have, want in zip(found, expected, strict=False):
        torch.testing.assert_close(have, stored(want, layout), rtol=1e-10, atol=1e-10)


def _heads_of(output: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """The inverse of `stored`."""
    if layout == "SBH":
        output = output.transpose(0, 1)
    rows = output if layout == "BSND" else output.unflatten(-1, (heads, -1))
    return rows.transpose(1, 2)


def test_dropout_needs_a_probability_and_the_gradient_its_seed() -> None:
    """Values that mean nothing are refused by name."""
    x = torch.randn(1, 2, 4)
    with pytest.raises(ValueError, match="keep_prob must be above 0"):
        OPERATORS["npu::npu_fusion_attention_v3"].formula(x, x, x, 1, "BSH", keep_prob=0.0)
    with pytest.raises(ValueError, match="needs the seed"):
        OPERATORS["npu::npu_fusion_attention_grad_v3"].formula(x, x, x, x, 1, "BSH", keep_prob=0.5)
