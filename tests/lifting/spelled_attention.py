"""Spellings of rotary embedding and of attention, and what nearly is one: functions by name, and their shapes."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

HEADS = 4


def _half(x: Any) -> Any:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _half_by_chunks(x: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second * -1, first), dim=-1)


def _pairs(x: Any) -> Any:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotated_halves(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + _half(x) * sin


def rotated_chunks(x: Any, cos: Any, sin: Any) -> Any:
    return sin * _half_by_chunks(x) + cos * x


def rotated_in_float32(x: Any, cos: Any, sin: Any) -> Any:
    wide = x.float()
    return (wide * cos.float() + _half(wide) * sin.float()).to(x.dtype)


def rotated_pairs(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos[0] + _pairs(x) * sin[0]


def rotated_heads_behind(x: Any, cos: Any, sin: Any) -> Any:
    """As `transformers` has it: heads and positions change places in memory."""
    x = x.transpose(1, 2)
    return x * cos.transpose(1, 2) + _half(x) * sin.transpose(1, 2)


def rotated_by_wide_cosines(x: Any, cos: Any, sin: Any) -> Any:
    """As OLMo 2 has it: cosines in float32, which the products are computed in."""
    cos, sin = cos.float() * 1.5, sin.float() * 1.5
    return (x * cos + _half(x) * sin).to(x.dtype)


def rotated_by_cosines_of_rank_two(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos[0, :, 0].unsqueeze(1) + _half(x) * sin[0, :, 0].unsqueeze(1)


def rotated_by_parts_of_tables(x: Any, cos: Any, sin: Any) -> Any:
    """Each part by its own part of the cosines and sines."""
    (first, second), (cosine, cosines), (sine, sines) = (one.chunk(2, -1) for one in (x, cos, sin))
    return torch.cat((first * cosine - second * sine, second * cosines + first * sines), -1)


def rotated_by_addcmul(x: Any, cos: Any, sin: Any) -> Any:
    return torch.addcmul(x * cos, _half(x), sin)


def rotated_the_other_way(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    return x * cos - torch.cat((second, -first), -1) * sin


def _written(out: Any, first: Any, second: Any, values: tuple[Any, Any]) -> Any:
    out[..., first], out[..., second] = values
    return out


def _by_parts(of_x: Any, of_cos: Any, of_sin: Any) -> tuple[Any, Any]:
    (one, other), (cosine, cosines), (sine, sines) = of_x, of_cos, of_sin
    return one * cosine - other * sine, other * cosines + one * sines


def rotated_into_halves(x: Any, cos: Any, sin: Any) -> Any:
    """Each half is written to its place in a new tensor."""
    parts = _by_parts(*(one.chunk(2, -1) for one in (x, cos, sin)))
    return _written(torch.empty_like(x), slice(0, 8), slice(8, None), parts)


def rotated_into_pairs(x: Any, cos: Any, sin: Any) -> Any:
    parts = _by_parts(*((one[..., ::2], one[..., 1::2]) for one in (x, cos[0], sin[0])))
    return _written(torch.zeros_like(x), slice(1, None, 2), slice(0, None, 2), parts[::-1])


def rotated_in_two_rows(x: Any, cos: Any, sin: Any) -> Any:
    """The halves are rows, which are put side by side."""
    parts = _by_parts(x.unflatten(-1, (2, 8)).unbind(-2), cos.chunk(2, -1), sin.chunk(2, -1))
    return torch.stack(parts, -2).flatten(-2)


def rotated_rows(x: Any, cos: Any, sin: Any) -> Any:
    """The halves are rows of a matrix, and are stacked as rows again."""
    first, second = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return x * cos + torch.stack((-second, first), -2).view(x.shape) * sin


def rotated_by_tables_that_are_read_twice(x: Any, cos: Any, sin: Any) -> Any:
    places = torch.arange(2, -1, -1, device=x.device)
    (first, second), cos, sin = x.chunk(2, -1), cos[..., :8], sin[..., :8]
    return torch.cat((
        first * cos.index_select(1, places) - second * sin.index_select(1, places),
        second * cos.index_select(1, places) + first * sin.index_select(1, places),
    ), -1)  # fmt: skip


ROTARY: tuple[Callable[..., Any], ...] = (
    rotated_halves, rotated_chunks, rotated_in_float32, rotated_pairs, rotated_heads_behind,
    rotated_by_cosines_of_rank_two, rotated_by_parts_of_tables, rotated_by_addcmul, rotated_the_other_way,
    rotated_into_halves, rotated_into_pairs, rotated_in_two_rows, rotated_rows,
)  # fmt: skip


def rotated_by_tables_cut_each_time(x: Any, cos: Any, sin: Any) -> Any:
    """The first half of each table stands for both."""
    first, second = x.chunk(2, -1)
    upper = first * cos[..., :8] - second * sin[..., :8]
    return torch.cat((upper, first * sin[..., :8] + second * cos[..., :8]), -1)


def sign_on_the_other_half(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, -first), dim=-1) * sin


def halves_the_other_way_round(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-first, second), dim=-1) * sin


def halves_of_two_tensors(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, dim=-1)[0], (x + 1).chunk(2, dim=-1)[1]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def pairs_joined_as_halves(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1) * sin


def pairs_stacked_as_rows(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2) * sin


def cosines_of_another(x: Any, cos: Any, sin: Any) -> Any:
    return (x + 1) * cos + _half(x) * sin


def scaled_sum(x: Any, cos: Any, sin: Any) -> Any:
    return torch.add(x * cos, _half(x) * sin, alpha=2)


def pairs_by_tables_of_each_entry(x: Any, cos: Any, sin: Any) -> Any:
    """The device turns halves by tables of the batch's entries, and pairs by one table for all."""
    return x * cos + _pairs(x) * sin


def tables_of_two_shapes(x: Any, cos: Any, sin: Any) -> Any:
    """The device takes cosines and sines of one shape."""
    return x * cos + _half(x) * sin[:1]


def rolled(x: Any, cos: Any, sin: Any) -> Any:
    """The sines carry the sign."""
    return x * cos + torch.roll(x, 8, -1) * sin


def rolled_by_sines_with_signs(x: Any, cos: Any, sin: Any) -> Any:
    wide, signed = x.float(), torch.cat((-sin[..., :8], sin[..., 8:]), -1)
    return (wide * cos + wide.roll(-8, dims=-1) * signed).to(x.dtype)


def halves_change_places(x: Any, cos: Any, sin: Any) -> Any:
    return torch.cat((x[..., 8:], x[..., :8]), -1) * sin + cos * x


def flipped_halves(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + (x.unflatten(-1, (2, 8)).flip(-2) * sin[0, 0, 0].view(2, 8)).flatten(-2) * sin


def flipped_pairs(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + (x.unflatten(-1, (8, 2)).flip(-1) * sin[0, 0, 0, :2]).flatten(-2) * sin


def rolled_by_a_quarter(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.roll(x, 4, -1) * sin


def rotated_into_the_other_halves(x: Any, cos: Any, sin: Any) -> Any:
    parts = _by_parts(*(one.chunk(2, -1) for one in (x, cos, sin)))
    return _written(torch.empty_like(x), slice(8, None), slice(0, 8), parts)


def rotated_into_less_than_all(x: Any, cos: Any, sin: Any) -> Any:
    """One element of the new tensor stays zero."""
    first, second = _by_parts(*(one.chunk(2, -1) for one in (x, cos, sin)))
    return _written(torch.zeros_like(x), slice(0, 8), slice(8, 15), (first, second[..., :7]))


def turned_as_complex_numbers(x: Any, cos: Any, sin: Any) -> Any:
    """As Llama's first implementation has it."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turn = torch.complex(cos[..., ::2].float(), sin[..., ::2].float())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def turned_by_matrices(x: Any, cos: Any, sin: Any) -> Any:
    """As Flux has it: a matrix for each pair."""
    c, s = cos[..., :8], sin[..., :8]
    turns = torch.stack((c, -s, s, c), dim=-1).unflatten(-1, (2, 2)).float()
    pairs = x.float().unflatten(-1, (-1, 1, 2))
    return (turns[..., 0] * pairs[..., 0] + turns[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


NOT_ROTARY: dict[Callable[..., Any], str] = {
    turned_by_matrices: "each pair is multiplied by a matrix of its own",
    rolled: "a sign, which is in the sines; give the sign to the half of x",
    rolled_by_sines_with_signs: "a sign, which is in the sines; give the sign to the half of x",
    halves_change_places: "a sign, which is in the sines; give the sign to the half of x",
    flipped_halves: "a sign, which a tensor has; give the sign to the half of x, if the signs are -1 and 1",
    flipped_pairs: "the elements of each pair change places without a sign, which a tensor has",
    rolled_by_a_quarter: "",
    rotated_into_the_other_halves: "",
    rotated_into_less_than_all: "",
    turned_as_complex_numbers: "a product of complex numbers is one kernel",
    sign_on_the_other_half: "is not the negated one",
    halves_the_other_way_round: "neither halves nor pairs",
    pairs_stacked_as_rows: "neither halves nor pairs",
    halves_of_two_tensors: "of different tensors",
    pairs_joined_as_halves: "neither halves nor pairs",
    cosines_of_another: "is no product with",
    pairs_by_tables_of_each_entry: "tables along one dimension",
    tables_of_two_shapes: "npu_rotary_mul takes one shape",
    scaled_sum: "",
}


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


def softmax_over_the_queries(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.ops.aten._safe_softmax(q @ k.mT * 0.25, -2) @ v


def plain_softmax(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As `transformers` has it in its own spelling."""
    weights = functional.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def plain_softmax_of_a_sum(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v


def filled_by_a_mask(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As most code without a library has it."""
    return (q @ k.mT * 0.25).masked_fill(bias > 1, float("-inf")).softmax(-1) @ v


def filled_by_the_least_number(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As BERT-like code has it: a row without keys is their mean."""
    return (q @ k.mT * 0.25).masked_fill(bias > 1, torch.finfo(q.dtype).min).softmax(-1) @ v


def a_sum_that_is_filled(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return (q @ k.mT * 0.25 + bias).masked_fill(bias > 1, -1e4).softmax(-1) @ v


def filled_by_a_score(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Zero hides no key."""
    return (q @ k.mT * 0.25).masked_fill(bias > 1, 0.0).softmax(-1) @ v


def safe_softmax_of_filled_scores(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = (q @ k.mT * 0.25).masked_fill(bias > 1, float("-inf"))
    return torch.ops.aten._safe_softmax(scores, -1) @ v


def kept_by_a_mask(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """The mask is true where a score stays, and has one row for each sequence."""
    scores = torch.where(bias[:, :1, :1] <= 1, q @ k.mT * 0.25, torch.finfo(q.dtype).min)
    return scores.float().softmax(-1).to(q.dtype) @ v


def kept_where_another_tensor_is_not(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """What hides a score is a tensor of one number."""
    scores = q @ k.mT * 0.25
    return torch.where(bias[:, :1, :1] <= 1, scores, torch.full_like(scores, -1e4)).softmax(-1) @ v


def softmax_that_is_spelled_out(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = (q @ k.mT * 0.25).float()
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)).to(q.dtype) @ v


def filled_by_a_tensor_of_zeros(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Zero hides no key."""
    scores = q @ k.mT * 0.25
    return torch.where(bias > 1, torch.full_like(scores, 0.0), scores).softmax(-1) @ v


def filled_in_each_head(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """All sequences have the masks of the first one."""
    return (q @ k.mT * 0.25).masked_fill(bias[:1] > 1, float("-inf")).softmax(-1) @ v


def filled_by_bmm(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As nanoGPT has it, with one mask for all heads."""
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm(torch.bmm(q * 0.5, k.mT * 0.5).masked_fill(bias[0, 0] > 1, float("-inf")).softmax(-1), v)


def scores_in_a_cap(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As Gemma 2 has it."""
    return (torch.tanh(q @ k.mT / 50) * 50).softmax(-1) @ v


def keys_as_they_are(q: Any, k: Any, v: Any, bias: Any) -> Any:
    k, v = (one[..., :1, :].expand(2, HEADS, 16, 16) for one in (k, v))
    return torch.ops.aten._safe_softmax(q @ k, -1) @ v


def keys_of_the_first_batch(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k[:1], v[:1], attn_mask=bias)


def heads_first_by_einsum(q: Any, k: Any, v: Any, bias: Any) -> Any:
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def positions_first_by_einsum(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As most code with `einsum` has it: (batch, positions, heads, width) comes in and goes out."""
    q, k, v = (one.transpose(1, 2).contiguous() for one in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q * 0.25, k).masked_fill(bias[:, :1] > 1, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def scores_by_position_by_einsum(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Heads come third in the scores, too."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return torch.einsum("bqhk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1), v)


def einsum_of_keys_and_queries(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """The operands in the other order, and a bias for each score."""
    q, k, v = (one.permute(2, 0, 1, 3).contiguous() for one in (q, k, v))
    scores = torch.einsum("kbhd,qbhd->bhqk", k, q) * 0.25 + bias
    return torch.einsum("kbhd,bhqk->qbhd", v, scores.softmax(-1))


def einsum_of_joined_heads(q: Any, k: Any, v: Any, bias: Any) -> Any:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, k).softmax(-1), v)


def einsum_of_one_query(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As a decoder asks for one sequence: `einsum` does not tell dimensions of one element apart."""
    q, k, v = (one.transpose(1, 2)[:1] for one in (q[:, :, :1], k, v))
    return torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1), v).flatten() * 2


def einsum_of_shared_heads(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Heads are repeated while positions stand before them."""
    k, v = (one[:, ::2].transpose(1, 2).repeat_interleave(2, dim=2) for one in (k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k) * 0.25).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def one_query(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """A step of a decoder, whose result leaves the graph as the next projection takes it."""
    attended = (q[:, :, :1] @ k.mT * 0.25).softmax(-1) @ v
    return attended.transpose(1, 2).reshape(q.shape[0], 1, -1)


def _with_heads_as_batches(x: Any) -> Any:
    """(batch, positions, width of all heads) as (batch and head, positions, width)."""
    batch, positions, _ = x.shape
    return x.reshape(batch, positions, HEADS, -1).permute(0, 2, 1, 3).reshape(batch * HEADS, positions, -1)


def baddbmm_that_adds_nothing(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As older `diffusers` have it; what is added zero times may be NaN."""
    q, k, v = (_with_heads_as_batches(one.transpose(1, 2).flatten(2)) for one in (q, k, v))
    scores = torch.baddbmm(bias.flatten(0, 1) * float("nan"), q, k.transpose(-1, -2), beta=0, alpha=0.25)
    attended = torch.bmm(scores.softmax(dim=-1), v)
    return attended.reshape(-1, HEADS, *attended.shape[1:]).permute(0, 2, 1, 3).reshape(2, 5, -1)


def baddbmm_that_adds_a_mask(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As older `diffusers` have it with a mask, one row for each head."""
    q, k, v = (_with_heads_as_batches(one.transpose(1, 2).flatten(2)) for one in (q, k, v))
    mask = bias[:, :1, 0].repeat_interleave(HEADS, 0)
    attended = torch.bmm(torch.baddbmm(mask, q, k.mT, beta=1, alpha=0.25).softmax(dim=-1), v)
    return attended.reshape(-1, HEADS, *attended.shape[1:]).permute(0, 2, 1, 3).reshape(2, 5, -1)


def baddbmm_of_two_biases(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As BLOOM has it: one for each head and key is added with the product, a mask behind it."""
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    scores = bias[:, :, :1].flatten(0, 1).baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=0.25)
    weights = functional.softmax(scores.view(2, HEADS, 5, 5) + bias[:, :1], dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(2 * HEADS, 5, 5), v).view(2, HEADS, 5, 16).permute(0, 2, 1, 3).reshape(2, 5, 64)


def without_the_largest(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As code has it that distrusts the softmax."""
    scores = (q @ k.mT * 0.25).masked_fill(bias > 1, float("-inf"))
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


def without_the_largest_by_max(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = (q @ k.mT * 0.25).float()
    return (scores - torch.max(scores, dim=-1)[0].unsqueeze(-1).detach()).softmax(3).to(q.dtype) @ v


def baddbmm_that_adds_a_half(q: Any, k: Any, v: Any, bias: Any) -> Any:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm(torch.baddbmm(bias.flatten(0, 1), q, k.mT, beta=0.5, alpha=0.25).softmax(-1), v)


def baddbmm_that_is_scaled(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """The bias is scaled, too."""
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm((torch.baddbmm(bias.flatten(0, 1), q, k.mT) * 0.25).softmax(-1), v)


def baddbmm_of_nothing(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Only the bias is left."""
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm(torch.baddbmm(bias.flatten(0, 1), q, k.mT, alpha=0).softmax(-1), v)


def baddbmm_of_keys_and_queries(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Its bias lies as the product does, with a row for each key."""
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm(torch.baddbmm(bias.flatten(0, 1), k, q.mT).mT.softmax(-1), v)


def without_the_largest_of_each_key(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = q @ k.mT * 0.25
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v


def without_the_largest_of_others(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return (q @ k.mT - bias.amax(-1, keepdim=True)).softmax(-1) @ v


def safe_softmax_without_the_largest(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Of a row of -inf alone nothing but NaN is left, which is not safe."""
    scores = q @ k.mT * 0.25
    return torch.ops.aten._safe_softmax(scores - scores.amax(-1, keepdim=True), -1) @ v


def einsum_over_heads(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """All heads have the same weights."""
    weights = torch.einsum("bhqd,bhkd->bqk", q, k).softmax(-1)
    return torch.einsum("bqk,bhkd->bhqd", weights, v)


def einsum_with_weights_turned(q: Any, k: Any, v: Any, bias: Any) -> Any:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhkq,bhkd->bhqd", weights, v)


def weights_that_are_scaled(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return (torch.softmax(q @ k.mT, -1) * 0.5) @ v


def weights_of_heads(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return (torch.softmax(q @ k.mT, -1) * mask[:, :, :1, :1]) @ v


def scores_with_a_sink(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As GPT-OSS has it."""
    scores = torch.cat((q @ k.mT * 0.25, bias[..., :1]), dim=-1)
    weights = torch.softmax(scores - scores.max(dim=-1, keepdim=True).values, dim=-1)
    return weights[..., :-1] @ v


NOT_SPELLED_ATTENTION: dict[Callable[..., Any], str] = {
    scores_with_a_sink: "columns beside those of the keys",
    softmax_over_the_queries: "over dimension -2", plain_softmax: "scores of a row are -inf, as those of an infinite query,",
    plain_softmax_of_a_sum: "masked everywhere this softmax gives NaN, and the operator a number; call torch.",
    filled_by_a_mask: "masked everywhere this softmax gives NaN, and the operator a number; call torch.",
    filled_by_the_least_number: "weighs all keys alike, and the operator may give 0; call torch.",
    a_sum_that_is_filled: "may give 0; every_row_attends=True declares that", filled_by_a_score: "no number as low as -9984",
    filled_by_a_tensor_of_zeros: "no number as low as -9984",
    safe_softmax_of_filled_scores: "gives 0, and the operator may weigh all keys alike; call torch.",
    scores_in_a_cap: "not of a product", keys_as_they_are: "no view or copy of [B, N, S, D]",
    keys_of_the_first_batch: "keys [1, 4, 5, 16] and values [1, 4, 5, 16]",
    baddbmm_that_adds_a_half: "by beta=0.5; the operator adds a bias as it is",
    baddbmm_that_is_scaled: "that baddbmm adds is multiplied by 0.25;", baddbmm_of_nothing: "product by alpha=0;",
    baddbmm_of_keys_and_queries: "has a row for each key", without_the_largest_of_each_key: "not the largest one of each row",
    without_the_largest_of_others: "not the largest one of each row",
    safe_softmax_without_the_largest: "scores of a row are -inf, as those of an infinite query,",
    weights_that_are_scaled: "multiplied by 0.5 behind the softmax", weights_of_heads: "multiplied by a tensor behind",
    einsum_over_heads: "no view or copy of [B, N, S, D]", einsum_with_weights_turned: "the weights in another order",
}  # fmt: skip


DECLARED_ATTENTION: dict[Callable[..., Any], str] = {
    plain_softmax: "npu_fusion_attention_v3", plain_softmax_of_a_sum: "npu_fusion_attention_v2",
    filled_by_a_mask: "gt npu_fusion_attention_v3", filled_by_the_least_number: "gt npu_fusion_attention_v3",
    a_sum_that_is_filled: "gt npu_fusion_attention_v2", safe_softmax_of_filled_scores: "gt npu_fusion_attention_v3",
    softmax_that_is_spelled_out: "npu_fusion_attention_v3",
    kept_where_another_tensor_is_not: "le logical_not npu_fusion_attention_v3",
    kept_by_a_mask: "le logical_not npu_fusion_attention_v3", filled_in_each_head: "gt npu_fusion_attention_v3",
    filled_by_bmm: "gt npu_fusion_attention_v3",
    heads_first_by_einsum: "npu_fusion_attention_v3", positions_first_by_einsum: "gt npu_fusion_attention_v3",
    scores_by_position_by_einsum: "npu_fusion_attention_v3", einsum_of_keys_and_queries: "npu_fusion_attention_v2",
    einsum_of_shared_heads: "npu_fusion_attention_v3", one_query: "npu_fusion_attention_v3",
    einsum_of_joined_heads: "npu_fusion_attention_v3", einsum_of_one_query: "npu_fusion_attention_v3 mul",
    baddbmm_that_adds_nothing: "npu_fusion_attention_v3", baddbmm_that_adds_a_mask: "repeat_interleave npu_fusion_attention_v2",
    baddbmm_of_two_biases: "add npu_fusion_attention_v2", without_the_largest: "gt npu_fusion_attention_v3",
    without_the_largest_by_max: "npu_fusion_attention_v3",
    safe_softmax_without_the_largest: "npu_fusion_attention_v3",
}  # fmt: skip
"""What is lifted where the user declares that each row has a key: the mask, and the operator."""

IN_HALF = {
    einsum_of_shared_heads, one_query,
    scores_by_position_by_einsum, einsum_of_keys_and_queries, einsum_of_joined_heads, einsum_of_one_query,
    baddbmm_that_adds_a_mask, without_the_largest_by_max, safe_softmax_without_the_largest,
}  # fmt: skip
"""Those of them that another one stands for in bfloat16."""


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


ROTARY_SPECS = ((2, 3, HEADS, 16), (2, 3, 1, 16), (2, 3, 1, 16))
ATTENTION_SPECS = ((2, 5, HEADS, 16), (2, 5, 2, 16), (2, 5, 2, 16), (2, 1, 5, 5))
SPELLED_SPECS = ((2, HEADS, 5, 16), (2, HEADS, 5, 16), (2, HEADS, 5, 16), (2, HEADS, 5, 5))
