"""Views and copies around attention: heads that several queries share, and positions before heads."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def _for_all_heads(x: Any, times: int) -> Any:
    """Each head of (batch, heads, positions, width) for so many consecutive heads of queries."""
    batch, heads, positions, width = x.shape
    return x[:, :, None].expand(batch, heads, times, positions, width).reshape(batch, heads * times, positions, width)


def grouped_attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """As `transformers` has it: (batch, positions, heads, width) comes in and goes out."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    k, v = (_for_all_heads(one, q.shape[1] // one.shape[1]) for one in (k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0)
    return attended.transpose(1, 2).contiguous()


def attention_over_a_cache(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Keys and values lie head by head."""
    k, v = (one.transpose(1, 2).contiguous() for one in (k, v))
    k, v = (_for_all_heads(one, q.shape[2] // one.shape[1]) for one in (k, v))
    return functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask > 0)


def attention_of_copies(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """As Whisper has it: heads and positions change places in memory first."""
    q, k, v = (one.transpose(1, 2).contiguous() for one in (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0)
    return attended.transpose(1, 2).contiguous()


def attention_of_one_product(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """As vision transformers have it: one tensor is taken apart."""
    together = torch.stack((q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)), 2)
    q, k, v = together.permute(2, 0, 3, 1, 4).unbind(0)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0).permute(0, 2, 1, 3).contiguous()


def attention_of_repeated_heads(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """By `repeat`, which copies each head behind itself."""
    k, v = (one.transpose(1, 2).unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1, 2) for one in (k, v))
    attended = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask > 0)
    return attended.transpose(1, 2).flatten(2)


def attention_with_one_head_of_keys(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """The strides of one head tell no order."""
    q, k, v = (one.transpose(1, 2) for one in (q, k[:, :, :1].contiguous(), v[:, :, :1].contiguous()))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0, enable_gqa=True)
    return attended.transpose(1, 2).contiguous()


def attention_of_heads_repeated_by_position(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Heads are repeated while positions stand before them."""
    batch, positions, heads, width = k.shape
    k = k.repeat_interleave(2, dim=2)
    v = v[:, :, :, None].expand(batch, positions, heads, 2, width).reshape(batch, positions, heads * 2, width)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0).transpose(1, 2).flatten(2)


ATTENTION: dict[Callable[..., Any], tuple[str, ...]] = {
    attention_of_heads_repeated_by_position: ("lift_shared_heads", "lift_attention_layout"),
    attention_of_repeated_heads: ("lift_shared_heads", "lift_attention_layout"),
    attention_with_one_head_of_keys: ("lift_attention_layout",),
    attention_of_one_product: ("lift_attention_layout",),
    attention_of_copies: ("lift_attention_layout",),
    grouped_attention: ("lift_shared_heads", "lift_attention_layout"),
    attention_over_a_cache: ("lift_shared_heads",),
}


def heads_in_another_order(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat(1, q.shape[1] // one.shape[1], 1, 1) for one in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0)


def keys_alone_are_repeated(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    v = v.repeat(1, q.shape[1] // v.shape[1], 1, 1)
    return functional.scaled_dot_product_attention(
        q, _for_all_heads(k, q.shape[1] // k.shape[1]), v, attn_mask=mask > 0
    )


def positions_repeated(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """A reshape that mixes heads and positions."""
    q = q.transpose(1, 2)
    times = q.shape[1] // k.shape[2]
    k, v = (one[:, :, None].expand(-1, -1, times, -1, -1).reshape(*q.shape) for one in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0)


NOT_ATTENTION: dict[Callable[..., Any], str] = {
    heads_in_another_order: "",
    keys_alone_are_repeated: "one is repeated, the other is not",
    positions_repeated: "",
}


ATTENTION_SPECS = ((2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16), (2, 1, 5, 5))
