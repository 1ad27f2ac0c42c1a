"""Spellings of layer norms, and what nearly is one: functions by name. Their shapes are those of `spelled_norms.py`."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from spelled_norms import EPSILON, WIDTH
from torch.nn import functional


def layer_norm_of_cohere(x: Any, w: Any) -> Any:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (w.float() * ((wide - mean) * torch.rsqrt(variance + EPSILON))).to(x.dtype)


def layer_norm_with_a_bias(x: Any, w: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return w + w * centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPSILON)


def layer_norm_by_var(x: Any, w: Any) -> Any:
    wide = x.float()
    centred = (wide - wide.mean(-1, True)) / (wide.var(-1, unbiased=False, keepdim=True) + EPSILON).sqrt()
    return (centred * w + w).to(x.dtype)


def layer_norm_by_var_mean(x: Any, w: Any) -> Any:
    variance, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    return ((x.float() - mean) * torch.rsqrt(variance + EPSILON)).to(x.dtype) + w


def layer_norm_and_its_bias_by_addcmul(x: Any, w: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return torch.addcmul(w, centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPSILON), w)


def layer_norm_by_addcdiv(x: Any, w: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return torch.addcdiv(w, w * centred, torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + EPSILON))


def layer_norm_by_pools(x: Any, w: Any) -> Any:
    centred = x - functional.avg_pool1d(x, WIDTH)
    return w + w * centred * torch.rsqrt(functional.avg_pool1d(centred * centred, WIDTH) + EPSILON)


def layer_norm_by_ones(x: Any, w: Any) -> Any:
    part = torch.full((WIDTH, 1), 1 / WIDTH, dtype=x.dtype, device=x.device)
    centred = x - x @ part
    return w * centred / torch.sqrt((centred * centred) @ part + EPSILON) + w


def layer_norm_by_a_difference_of_squares(x: Any, w: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    variance = ((x * x).mean(-1, keepdim=True) - mean**2).clamp(min=0)
    return (x - mean) / torch.sqrt(variance + EPSILON) * w + w


LAYER_NORMS: tuple[Callable[..., Any], ...] = (
    layer_norm_of_cohere, layer_norm_with_a_bias, layer_norm_by_var, layer_norm_by_var_mean,
    layer_norm_and_its_bias_by_addcmul, layer_norm_by_addcdiv, layer_norm_by_pools, layer_norm_by_ones,
)  # fmt: skip


def norm_of_a_step(x: Any, w: Any) -> Any:
    """As DiT has it: one image, whose scale and shift come from the step."""
    row = w[None, None]
    return functional.layer_norm(x, (WIDTH,), eps=EPSILON) * row.sigmoid() + row


def norm_of_a_step_by_addcmul(x: Any, w: Any) -> Any:
    row = w[None, None]
    return torch.addcmul(row, functional.layer_norm(x, (WIDTH,), eps=EPSILON), row.sigmoid())


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


def layer_norm_with_a_correction(x: Any, w: Any) -> Any:
    return w * (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + EPSILON).sqrt()


def layer_norm_by_a_deviation(x: Any, w: Any) -> Any:
    """As older code has it."""
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, unbiased=False) + 1e-6)


def layer_norm_of_the_annotated_transformer(x: Any, w: Any) -> Any:
    """A deviation by one less than the size."""
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def deviation_of_another(x: Any, w: Any) -> Any:
    return w * (x - x.mean(-1, keepdim=True)) / ((x + w).std(-1, keepdim=True) + 1e-6)


def square_by_a_deviation(x: Any, w: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return w * centred * centred / (x.std(-1, keepdim=True) + 1e-6)


def layer_norm_by_std_mean(x: Any, w: Any) -> Any:
    deviation, mean = torch.std_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) / deviation.clamp(min=1e-5) * w


def layer_norm_with_epsilon_outside(x: Any, w: Any) -> Any:
    centred = x - x.mean(-1, True)
    return w * centred / (centred.pow(2).mean(-1, True).sqrt() + EPSILON)


def layer_norm_by_a_pool_of_halves(x: Any, w: Any) -> Any:
    centred = x - functional.avg_pool1d(x, WIDTH)
    return w * centred * torch.rsqrt(functional.avg_pool1d(centred * centred, WIDTH // 2)[..., :1] + EPSILON)


def layer_norm_by_one_less(x: Any, w: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    part = torch.full((WIDTH, 1), 1 / (WIDTH - 1), dtype=x.dtype, device=x.device)
    return w * centred * torch.rsqrt((centred * centred) @ part + EPSILON)


def layer_norm_of_channels(x: Any, w: Any) -> Any:
    """As SAM has it, whose channels come first."""
    centred = x - x.mean(1, keepdim=True)
    return w * (centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + EPSILON))


def layer_norm_by_another_variance(x: Any, w: Any) -> Any:
    other = x + w
    return (x - x.mean(-1, True)) * torch.rsqrt(other.var(-1, correction=0, keepdim=True) + EPSILON)


def layer_norm_with_a_scale_for_each_row(x: Any, w: Any) -> Any:
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * variance * torch.rsqrt(variance + EPSILON) * w


def norm_of_a_step_of_several_images(x: Any, w: Any) -> Any:
    return functional.layer_norm(x, (WIDTH,), eps=EPSILON) * x[:, :1] + w


def square_of_a_norm(x: Any, w: Any) -> Any:
    normed = functional.layer_norm(x, (WIDTH,), eps=EPSILON)
    return normed * normed + w


NOT_LAYER_NORMS: dict[Callable[..., Any], str] = {
    layer_norm_of_a_scaled_sum: "no sum of two tensors",
    layer_norm_of_a_wider_sum: "npu_add_layer_norm takes one shape",
    layer_norm_without_a_bias: "no weight or no bias",
    layer_norm_over_two_dimensions: "over the last 2 dimensions",
    layer_norm_with_its_mean: "the norm's second result is used",
    layer_norm_with_a_correction: "the variance has the correction 1, so it is divided by size - 1",
    layer_norm_by_a_deviation: "epsilon is added to the root",
    layer_norm_by_std_mean: "the deviation divides without an epsilon",
    layer_norm_of_the_annotated_transformer: "divides it by the size; epsilon is added to the root",
    deviation_of_another: "",
    square_by_a_deviation: "",
    layer_norm_with_epsilon_outside: "epsilon is added to the root; the operator adds it under the root",
    layer_norm_by_a_pool_of_halves: "",
    layer_norm_by_one_less: "not divided by how many they are",
    layer_norm_of_channels: "the mean is over the dimensions [1] of 3",
    layer_norm_by_another_variance: "the variance is that of add, and the mean that of",
    layer_norm_with_a_scale_for_each_row: "multiplied by more than a weight",
    norm_of_a_step_of_several_images: "the operator takes torch.float16 vectors",
    square_of_a_norm: "multiplied by more than a weight",
}
