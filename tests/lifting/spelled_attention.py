"""Spellings of attention that are lifted without a declaration: functions by name, and their shapes."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

HEADS = 4
SPELLED_SPECS = ((2, HEADS, 5, 16), (2, HEADS, 5, 16), (2, HEADS, 5, 16), (2, HEADS, 5, 5))


def attention_of_scaled_queries(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.ops.aten._safe_softmax((q / 4) @ k.mT, -1) @ v


def attention_by_bmm(q: Any, k: Any, v: Any, bias: Any) -> Any:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    scores = torch.bmm(q * 0.5, (k * 0.5).transpose(1, 2)).float()
    return torch.bmm(torch.ops.aten._safe_softmax(scores, 2).to(q.dtype), v)


def attention_with_a_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As T5 has it; torch spells it in ATen operators."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def attention_with_a_bias_for_all_heads(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, :1], scale=1.0)


def bias_of_keys(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As encoders mask what is no token."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, :1, :1])


def bias_of_rank_two(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[0, 0], scale=1.0)


def one_head_of_keys_and_a_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As Falcon has it."""
    return functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=bias[:, :1])


def shared_heads_and_a_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Torch repeats the heads in float32."""
    return functional.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=bias, enable_gqa=True)


def attention_under_the_diagonal(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As decoders mask the tokens to come: an operator with a mask that is off by one would read one of them."""
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias.masked_fill(torch.ones_like(bias).triu(1) > 0, -65504.0)
    )


def _mask_of_encoders(tokens: Any, rows: int, dtype: torch.dtype) -> Any:
    """As `transformers` 4.57 makes a bias of which keys are tokens."""
    missing = 1.0 - tokens[:, None, None, :].expand(-1, 1, rows, -1).to(dtype)
    return missing.masked_fill(missing.to(torch.bool), torch.finfo(dtype).min)


def attention_without_padding(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """A sequence without a mask gets one in which each key is a token."""
    mask = _mask_of_encoders(torch.ones(k.shape[0], k.shape[2], device=k.device), q.shape[2], q.dtype)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_behind_constant_padding(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """The first key of each sequence is no token, so the bias stays."""
    tokens = (torch.arange(k.shape[2], device=k.device) > 0).expand(k.shape[0], -1).float()
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=_mask_of_encoders(tokens, q.shape[2], q.dtype), scale=1.0
    )


def bias_and_a_scale_that_rounds(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Queries that are scaled in front would be rounded."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)


SPELLED_ATTENTION: dict[Callable[..., Any], str] = {
    attention_of_scaled_queries: "npu_fusion_attention_v3", attention_by_bmm: "npu_fusion_attention_v3",
    attention_with_a_bias: "npu_fusion_attention_v2", attention_with_a_bias_for_all_heads: "npu_fusion_attention_v3",
    attention_under_the_diagonal: "ones_like triu gt masked_fill npu_fusion_attention_v2",
    bias_of_keys: "npu_fusion_attention_v2", bias_of_rank_two: "npu_fusion_attention_v3",
    attention_without_padding: "npu_fusion_attention_v3", attention_behind_constant_padding: "npu_fusion_attention_v3",
    one_head_of_keys_and_a_bias: "npu_fusion_attention_v2", shared_heads_and_a_bias: "npu_fusion_attention_v2",
    bias_and_a_scale_that_rounds: "npu_fusion_attention_v2",
}  # fmt: skip

_SCALED = "mul npu_fusion_attention_v3"
IN_BF16: dict[Callable[..., Any], str] = {
    attention_of_scaled_queries: _SCALED, attention_by_bmm: _SCALED, attention_without_padding: _SCALED,
    attention_with_a_bias: _SCALED, bias_of_keys: _SCALED, one_head_of_keys_and_a_bias: _SCALED,
    shared_heads_and_a_bias: _SCALED, attention_under_the_diagonal: f"ones_like triu gt masked_fill {_SCALED}",
    bias_and_a_scale_that_rounds: "mul npu_fusion_attention_v2",
}  # fmt: skip
"""Products of queries and keys may overflow float32 in the operator, so that the queries are scaled in front of it."""
