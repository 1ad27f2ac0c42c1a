"""Attention by a softmax of its own, lifted where each row has a key, and what is never lifted: functions by name."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from spelled_attention import HEADS
from torch.nn import functional


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
