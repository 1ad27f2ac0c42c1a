"""Spellings of the forms, and what nearly is one: plain functions, by name, and the shapes of their inputs."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

WIDTH, HEADS = 64, 4
EPSILON = 1e-5


def llama_norm(x: Any, w: Any) -> Any:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return w * wide.to(x.dtype)


def weight_in_float32(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, True) + EPSILON) * w.float()).type_as(x)


def of_torch(x: Any, w: Any) -> Any:
    return functional.rms_norm(x, (WIDTH,), w, EPSILON)


def quotient_by_a_root(x: Any, w: Any) -> Any:
    wide = x.float()
    return ((wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + EPSILON)) * w).to(x.dtype)


def power_of_minus_a_half(x: Any, w: Any) -> Any:
    wide = x.float()
    return (torch.pow(EPSILON + wide.pow(2).mean(-1, True), -0.5) * (w * wide)).to(x.dtype)


def sum_over_size(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / WIDTH + EPSILON)).to(x.dtype)


def dimension_put_back(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1) + EPSILON).unsqueeze(-1)).to(x.dtype)


def weight_reshaped(x: Any, w: Any) -> Any:
    wide = x.float()
    return w.view(1, -1).unsqueeze(0) * (wide * torch.rsqrt(wide.pow(2).mean(2, True) + EPSILON)).to(x.dtype)


def twice_upcast(x: Any, w: Any) -> Any:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return w * (x.float() * torch.rsqrt(variance + EPSILON)).to(x.dtype)


def without_weight(x: Any, w: Any) -> Any:
    del w
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, True) + EPSILON)).to(x.dtype)


def rounded_all_along(x: Any, w: Any) -> Any:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON) * w


NORMS: tuple[Callable[..., Any], ...] = (
    llama_norm, weight_in_float32, of_torch, quotient_by_a_root, power_of_minus_a_half, sum_over_size,
    dimension_put_back, weight_reshaped, twice_upcast, without_weight, rounded_all_along,
)  # fmt: skip


def gemma_norm(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON) * (1.0 + w.float())).type_as(x)


def layer_norm_of_a_sum(x: Any, w: Any) -> Any:
    """As GPT-2 has it, which needs the sum again."""
    total = x + x.flip(1)
    normed = functional.layer_norm(total, (WIDTH,), w, w.flip(0), 1e-12)
    return normed, total


def layer_norm_of_a_scaled_sum(x: Any, w: Any) -> Any:
    return functional.layer_norm(torch.add(x, x.flip(1), alpha=2), (WIDTH,), w, w, EPSILON)


def layer_norm_of_a_wider_sum(x: Any, w: Any) -> Any:
    return functional.layer_norm(x + w.flip(0), (WIDTH,), w, w, EPSILON)


def layer_norm_without_a_bias(x: Any, w: Any) -> Any:
    return functional.layer_norm(x + x.flip(1), (WIDTH,), w, None, EPSILON)


def layer_norm_over_two_dimensions(x: Any, w: Any) -> Any:
    w = w.expand(3, WIDTH).contiguous()
    return functional.layer_norm(x + x.flip(1), (3, WIDTH), w, w, EPSILON)


def layer_norm_with_its_mean(x: Any, w: Any) -> Any:
    return torch.native_layer_norm(x + x.flip(1), (WIDTH,), w, w, EPSILON)[:2]


def epsilon_outside(x: Any, w: Any) -> Any:
    wide = x.float()
    return (w * wide / (torch.sqrt(wide.pow(2).mean(-1, True)) + EPSILON)).to(x.dtype)


def mean_over_rows(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(1, True) + EPSILON)).to(x.dtype)


def mean_over_all(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean() + EPSILON)).to(x.dtype)


def sum_not_divided(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, True) + EPSILON)).to(x.dtype)


def divided_by_another_size(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, True) / (WIDTH - 1) + EPSILON)).to(x.dtype)


def squares_of_another(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * ((wide + 1) * torch.rsqrt(wide.pow(2).mean(-1, True) + EPSILON)).to(x.dtype)


def epsilon_in_the_mean(x: Any, w: Any) -> Any:
    wide = x.float()
    return (w * (wide * (EPSILON + wide**2).mean(-1, True).sqrt().reciprocal())).to(x.dtype)


def epsilon_from_a_tensor(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(w[0].float().abs() + wide.pow(2).mean(-1, True))).to(x.dtype)


NOT_NORMS: dict[Callable[..., Any], str] = {
    epsilon_outside: "epsilon is added to the root",
    mean_over_rows: "the mean is over the dimensions [1] of 3",
    mean_over_all: "",
    sum_not_divided: "not divided by how many",
    divided_by_another_size: "not divided by how many",
    squares_of_another: "which is not in the product",
    epsilon_in_the_mean: "",
    epsilon_from_a_tensor: "which is no number when the graph is compiled",
    layer_norm_of_a_scaled_sum: "no sum of two tensors",
    layer_norm_of_a_wider_sum: "several shapes or dtypes",
    layer_norm_without_a_bias: "no weight or no bias",
    layer_norm_over_two_dimensions: "over the last 2 dimensions",
    layer_norm_with_its_mean: "the norm's second result is used",
}


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
    return x * cos + _pairs(x) * sin


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


ROTARY: tuple[Callable[..., Any], ...] = (
    rotated_halves, rotated_chunks, rotated_in_float32, rotated_pairs, rotated_heads_behind,
    rotated_by_cosines_of_rank_two,
)  # fmt: skip


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


def cosines_of_another(x: Any, cos: Any, sin: Any) -> Any:
    return (x + 1) * cos + _half(x) * sin


def scaled_sum(x: Any, cos: Any, sin: Any) -> Any:
    return torch.add(x * cos, _half(x) * sin, alpha=2)


NOT_ROTARY: dict[Callable[..., Any], str] = {
    sign_on_the_other_half: "is not the negated one",
    halves_the_other_way_round: "neither halves nor pairs",
    halves_of_two_tensors: "of different tensors",
    pairs_joined_as_halves: "neither halves nor pairs",
    cosines_of_another: "is no product with",
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


def attention_with_one_head_of_keys(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """The strides of one head tell no order."""
    q, k, v = (one.transpose(1, 2) for one in (q, k[:, :, :1].contiguous(), v[:, :, :1].contiguous()))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0, enable_gqa=True)
    return attended.transpose(1, 2).contiguous()


ATTENTION: dict[Callable[..., Any], tuple[str, ...]] = {
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


SPELLED_ATTENTION: dict[Callable[..., Any], str] = {
    attention_of_scaled_queries: "npu_fusion_attention_v3", attention_by_bmm: "npu_fusion_attention_v3",
    attention_with_a_bias: "mul npu_fusion_attention_v3", attention_with_a_bias_for_all_heads: "npu_fusion_attention_v3",
}  # fmt: skip


def softmax_over_the_queries(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.ops.aten._safe_softmax(q @ k.mT * 0.25, -2) @ v


def plain_softmax(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As `transformers` has it in its own spelling."""
    weights = functional.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def scores_in_a_cap(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """As Gemma 2 has it."""
    return (torch.tanh(q @ k.mT / 50) * 50).softmax(-1) @ v


def keys_as_they_are(q: Any, k: Any, v: Any, bias: Any) -> Any:
    k, v = (one[..., :1, :].expand(2, HEADS, 16, 16) for one in (k, v))
    return torch.ops.aten._safe_softmax(q @ k, -1) @ v


def bias_and_a_scale_that_rounds(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)


def bias_of_keys(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, :, :1])


NOT_SPELLED_ATTENTION: dict[Callable[..., Any], str] = {
    softmax_over_the_queries: "over dimension -2", plain_softmax: "gives NaN, and the operator 0",
    scores_in_a_cap: "not of a product", keys_as_they_are: "not of a product", bias_of_keys: "the bias is [2, 4, 1, 5]",
    bias_and_a_scale_that_rounds: "farther from float64",
}  # fmt: skip


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


def gelu_of_gpt2(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_of_bloom(x: Any) -> Any:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def gelu_of_bert(x: Any) -> Any:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_by_sigmoid(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x)


def silu_by_quotient(x: Any) -> Any:
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


ACTIVATIONS: dict[Callable[..., Any], str] = {
    gelu_of_gpt2: "gelu", gelu_of_bloom: "gelu", gelu_of_bert: "gelu", gelu_by_sigmoid: "npu_fast_gelu",
    silu_by_quotient: "silu",
}  # fmt: skip


def gelu_with_another_cubic(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.04472 * torch.pow(x, 3.0))))


def gelu_in_float32(x: Any) -> Any:
    """Right to the last bit, as the operator is not."""
    wide = x.float()
    return (wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))).to(x.dtype)


def gelu_with_another_slope(x: Any) -> Any:
    return x * torch.sigmoid(1.7 * x)


def gelu_of_two(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x.flip(0))


def gated(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gated_behind(x: Any) -> Any:
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return up * (gate * torch.sigmoid(gate))


def silu_of_a_group_norm(x: Any) -> Any:
    return functional.silu(functional.group_norm(x, 3, x[0, :, 0], x[1, :, 0], 1e-6))


GATED: tuple[Callable[..., Any], ...] = (gated, gated_behind)


def gate_and_up_swapped(x: Any) -> Any:
    up, gate = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_of_a_group_norm_without_a_weight(x: Any) -> Any:
    return functional.silu(functional.group_norm(x, 3))


def sigmoid_of_a_group_norm(x: Any) -> Any:
    return functional.sigmoid(functional.group_norm(x, 3, x[0, :, 0], x[1, :, 0], 1e-6))


def gated_rows(x: Any) -> Any:
    gate, up = x.chunk(2, dim=0)
    return functional.silu(gate) * up


NOT_ACTIVATIONS: dict[Callable[..., Any], str] = {
    gelu_with_another_cubic: "", gelu_with_another_slope: "", gelu_of_two: "",
    gelu_in_float32: "farther from float64 than eager mode",
    silu_of_a_group_norm_without_a_weight: "no weight", sigmoid_of_a_group_norm: "",
    gate_and_up_swapped: "the operator takes the first half as the gate", gated_rows: "",
}  # fmt: skip


def masked_by_constants(x: Any, w: Any) -> Any:
    """As `transformers` finds sequences that are packed in a row; the mask depends on no input."""
    rows = torch.arange(WIDTH, device=x.device)
    before = torch.cat((rows[:1] - 1, rows))
    sequence = (torch.diff(before) != 1).cumsum(-1)
    allowed = (sequence[:, None] == sequence[None]) & (rows[None] <= rows[:, None])
    numbers = (torch.full((), number, dtype=x.dtype, device=x.device) for number in (0.0, torch.finfo(x.dtype).min))
    added = torch.where(allowed, *numbers)
    return x[:, :1].transpose(1, 2) * w + added


def constant_that_leaves(x: Any, w: Any) -> Any:
    return x * w, torch.arange(WIDTH, device=x.device)


def constant_that_is_written(x: Any, w: Any) -> Any:
    """The next call needs the numbers as they were."""
    rows = torch.arange(WIDTH, device=x.device)
    rows[0] += w[0].long()
    return x * rows


def computed_with_fractions(x: Any, w: Any) -> Any:
    return x * torch.exp(torch.arange(0, 1, 1 / WIDTH, device=x.device, dtype=x.dtype)) * w


def drawn_at_random(x: Any, w: Any) -> Any:
    return x * (torch.randint(0, 9, (WIDTH,), device=x.device) * 0 + 1) * w


NOT_CONSTANTS: dict[Callable[..., Any], str] = dict.fromkeys(
    (constant_that_leaves, computed_with_fractions, drawn_at_random), ""
)


def biased(x: Any, w: Any, b: Any) -> Any:
    return x @ w + b


def bias_first(x: Any, w: Any, b: Any) -> Any:
    return torch.add(b, torch.matmul(x, w))


def scaled_bias(x: Any, w: Any, b: Any) -> Any:
    return torch.add(x @ w, b, alpha=2)


def bias_in_float32(x: Any, w: Any, b: Any) -> Any:
    return x @ w + b.float()


def product_used_again(x: Any, w: Any, b: Any) -> Any:
    product = x @ w
    return product + b, product


BIASED = (biased, bias_first)
NOT_BIASED: dict[Callable[..., Any], str] = {
    scaled_bias: "or the bias is scaled",
    bias_in_float32: "product and bias are torch.float16, torch.float32",
    product_used_again: "nothing would be saved",
}
BIAS_SPECS = ((2, 3, WIDTH), (WIDTH, 40), (40,))
NORM_SPECS = ((2, 3, WIDTH), (WIDTH,))
ROTARY_SPECS = ((2, 3, HEADS, 16), (2, 3, 1, 16), (2, 3, 1, 16))
ATTENTION_SPECS = ((2, 5, HEADS, 16), (2, 5, 2, 16), (2, 5, 2, 16), (2, 1, 5, 5))
SPELLED_SPECS = ((2, HEADS, 5, 16), (2, HEADS, 5, 16), (2, HEADS, 5, 16), (2, HEADS, 5, 5))
ACTIVATION_SPECS = ((4, 6, WIDTH),)


def loss_of_a_language_model(x: Any, y: Any) -> Any:
    """As `transformers` has it."""
    return functional.cross_entropy(x.float(), y.argmax(-1), ignore_index=3)


def loss_of_each_row(x: Any, y: Any) -> Any:
    return functional.nll_loss(functional.log_softmax(x, -1), y.argmax(-1), reduction="none")


def loss_with_a_weight(x: Any, y: Any) -> Any:
    return functional.cross_entropy(x, y.argmax(-1), y[0].abs(), reduction="sum")


LOSS_SPECS = ((6, 16), (6, 16))
LOSSES: dict[Callable[..., Any], str] = {
    loss_of_a_language_model: "_to_copy argmax npu_cross_entropy_loss", loss_of_each_row: "argmax npu_cross_entropy_loss",
    loss_with_a_weight: "argmax abs npu_cross_entropy_loss",
}  # fmt: skip


def logarithm_by_itself(x: Any, y: Any) -> Any:
    return functional.nll_loss(torch.log(torch.softmax(x, -1)), y.argmax(-1))


def softmax_over_the_rows(x: Any, y: Any) -> Any:
    return functional.nll_loss(torch.log_softmax(x, 0), y.argmax(-1))


def weight_in_another_dtype(x: Any, y: Any) -> Any:
    return functional.nll_loss(torch.log_softmax(x.float(), -1).to(x.dtype), y.argmax(-1), y[0].abs())


NOT_LOSSES: dict[Callable[..., Any], str] = {
    logarithm_by_itself: "no logarithm of a softmax", softmax_over_the_rows: "not over the second",
    weight_in_another_dtype: "logits, weight and loss are",
}  # fmt: skip
