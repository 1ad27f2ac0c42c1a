"""Spellings of dynamic quantisation and of products of quantised numbers, and what nearly is one."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

out_dtype: Any = torch.ops.higher_order.out_dtype

WIDTH = 64
SPECS = ((2, 3, WIDTH),)


def in_float32(x: Any) -> Any:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return (wide / scale).round().clamp(-128, 127).to(torch.int8), scale


def largest_by_max(x: Any) -> Any:
    scale = x.abs().max(dim=-1, keepdim=True)[0].float() * (1 / 127)
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale


def by_the_reciprocal(x: Any) -> Any:
    scale = x.abs().amax(dim=-1, keepdim=True).to(torch.float32).div(127.0)
    return torch.clamp(x * (1.0 / scale), min=-128, max=127).round().to(torch.int8), scale.squeeze(-1)


def dimension_put_back(x: Any) -> Any:
    largest = torch.amax(x.abs(), 2).float()
    return (x * (127 / largest.unsqueeze(-1))).round().to(torch.int8), largest / 127


def rounded_all_along(x: Any) -> Any:
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    return torch.round(x / scale).clamp_(-128, 127).to(torch.int8), scale


def both_ends_at_once(x: Any) -> Any:
    """As torch's observers have it."""
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    scale = (torch.max(-low, high) / 127).float()
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def both_ends(x: Any) -> Any:
    """As torchao has it."""
    low, high = torch.amin(x, -1), torch.amax(x, -1)
    low, high = torch.min(low, torch.zeros_like(low)), torch.max(high, torch.zeros_like(high))
    scale = (torch.max(-low, high) / (float(127 + 127) / 2)).float()
    return torch.clamp(torch.round(x * (1.0 / scale.unsqueeze(-1))), -127, 127).to(torch.int8), scale


def both_ends_by_max_and_min(x: Any) -> Any:
    scale = torch.maximum(x.max(-1, keepdim=True)[0], -x.min(-1, keepdim=True)[0]).float() / 127
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def magnitudes_of_both_ends(x: Any) -> Any:
    """As quantisers of weights have it."""
    scale = (torch.max(x.amin(-1).abs(), x.amax(-1).abs()).float() / 127).unsqueeze(-1)
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def of_a_smoothed_value(x: Any) -> Any:
    x = x * 3
    return in_float32(x)


def scale_used_nowhere(x: Any) -> Any:
    return in_float32(x)[0]


def of_flat_rows(x: Any) -> Any:
    return in_float32(x.reshape(-1, WIDTH))


def bound_below_all_numbers(x: Any) -> Any:
    """No number of float16 but 0 is so small, so that the whole numbers are as without it."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-9) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def largest_by_a_norm(x: Any) -> Any:
    scale = torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True).float() / 127
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8), scale


QUANTISED: dict[Callable[..., Any], str] = {
    in_float32: "npu_dynamic_quant", largest_by_a_norm: "npu_dynamic_quant",
    largest_by_max: "npu_dynamic_quant", by_the_reciprocal: "npu_dynamic_quant",
    dimension_put_back: "npu_dynamic_quant", rounded_all_along: "npu_dynamic_quant _to_copy _to_copy npu_quantize",
    both_ends_by_max_and_min: "npu_dynamic_quant", magnitudes_of_both_ends: "npu_dynamic_quant",
    both_ends: "npu_dynamic_quant", both_ends_at_once: "npu_dynamic_quant", of_a_smoothed_value: "mul npu_dynamic_quant",
    scale_used_nowhere: "npu_dynamic_quant", of_flat_rows: "npu_dynamic_quant",
    bound_below_all_numbers: "npu_dynamic_quant clamp_min",
}  # fmt: skip


def bounded_scale(x: Any) -> Any:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-5) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def bounded_in_flat_rows(x: Any) -> Any:
    return bounded_scale(x.view(-1, WIDTH))


def scale_bounded_later(x: Any) -> Any:
    scale = (x.abs().amax(-1, keepdim=True).float() / 127).clamp_(min=torch.finfo(torch.float32).eps)
    return (x * (1 / scale)).round().clamp(-127, 127).to(torch.int8), scale


def number_added_to_the_scale(x: Any) -> Any:
    scale = x.abs().amax(-1, keepdim=True).float() / 127 + 1e-6
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def half_the_range(x: Any) -> Any:
    """As torchao and compressed-tensors have it, with a zero point of 0."""
    low, high = torch.amin(x, [2], keepdim=True), torch.amax(x, [2], keepdim=True)
    low, high = torch.min(low, torch.zeros_like(low)), torch.max(high, torch.zeros_like(high))
    scale = torch.max(-low, high) / (float(127 + 128) / 2)
    zero = torch.full_like(scale, 0).to(torch.int8)
    scale = torch.clamp(scale, min=torch.finfo(torch.float32).eps).to(torch.float32)
    return torch.clamp(torch.round(x * (1.0 / scale)) + zero, -128, 127).to(torch.int8), scale


def largest_becomes_128(x: Any) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True) / 128
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def largest_becomes_100(x: Any) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True) / 100
    return (x / scale).round().to(torch.int8), scale


BOUNDED: dict[Callable[..., Any], str] = {
    bounded_scale: "npu_dynamic_quant clamp_min npu_quantize",
    bounded_in_flat_rows: "npu_dynamic_quant clamp_min npu_quantize",
    scale_bounded_later: "npu_dynamic_quant clamp_min npu_quantize",
    number_added_to_the_scale: "npu_dynamic_quant add npu_quantize",
    half_the_range: "npu_dynamic_quant mul clamp_min npu_quantize",
    largest_becomes_128: "abs amax _to_copy div npu_quantize",
    largest_becomes_100: "abs amax _to_copy div npu_quantize",
}


def largest_of_a_column(x: Any) -> Any:
    scale = x.float().abs().amax(-2, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def largest_of_all(x: Any) -> Any:
    scale = x.float().abs().max() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def beyond_the_range(x: Any) -> Any:
    """Without a clamp 128 becomes -128."""
    scale = x.float().abs().amax(-1, keepdim=True) / 128
    return (x / scale).round().to(torch.int8), scale


def half_the_range_without_its_end(x: Any) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def rounded_down(x: Any) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scale).floor().clamp(-128, 127).to(torch.int8), scale


def cut_off(x: Any) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scale).to(torch.int8), scale


def clamped_to_less(x: Any) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-64, 63).to(torch.int8), scale


def scale_of_another(x: Any) -> Any:
    scale = (x + 1).float().abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def largest_and_not_its_magnitude(x: Any) -> Any:
    scale = x.float().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def ends_of_aminmax_changed(x: Any) -> Any:
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    scale = torch.max(low, -high).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def smaller_of_both_ends(x: Any) -> Any:
    scale = torch.minimum(x.amax(-1, True).abs(), x.amin(-1, True).abs()).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def one_end_and_its_magnitude(x: Any) -> Any:
    high = x.amax(-1, True)
    scale = torch.maximum(high.abs(), high).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def same_end_twice(x: Any) -> Any:
    high = x.amax(-1, True)
    scale = torch.maximum(high, -high).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def with_a_zero_point(x: Any) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return ((x / scale).round() + 3).clamp(-128, 127).to(torch.int8), scale


def without_a_sign(x: Any) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(0, 255).to(torch.uint8), scale


NOT_QUANTISED: dict[Callable[..., Any], str] = {
    largest_of_a_column: "of the dimensions [1]", largest_of_all: "of all elements",
    beyond_the_range: "clamped to -inf and inf", half_the_range_without_its_end: "clamped to -127 and 127", rounded_down: "",
    cut_off: "is cut off", clamped_to_less: "clamped to -64 and 63", scale_of_another: "is something else",
    largest_and_not_its_magnitude: "", smaller_of_both_ends: "", one_end_and_its_magnitude: "", same_end_twice: "",
    ends_of_aminmax_changed: "", with_a_zero_point: "", without_a_sign: "",
}  # fmt: skip


COLUMNS = 48


def int_mm(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    total = torch._int_mm(q, w.t())
    return (total.float() * token * column).half()


def int_mm_of_rows(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    """As hand-written layers have it: three dimensions outside, two inside."""
    q, token = q.view(2, 3, WIDTH), token.view(2, 3, 1)
    total = torch._int_mm(q.view(-1, WIDTH), w.t()).view(2, 3, COLUMNS)
    return (total.to(torch.float32) * (token * column) + bias).to(torch.float16)


def scaled_by_token_first(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    """As torchao has it: the product with the token's scale, a reshape, the weight's scale, then a cast and the bias."""
    total = torch._int_mm(q, w.t()) * token
    y = (total.reshape(2, 3, COLUMNS) * column).to(torch.float16)
    return y + bias


def with_out_dtype(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    """As torchao has it where it compiles: the scale of a token is repeated for all columns."""
    total = out_dtype(torch.ops.aten.mm.default, torch.int32, q, w.t())
    y = (total * token.expand(total.shape)).to(torch.float16) * column.half()
    return y.reshape(2, 3, COLUMNS) + bias


def in_int32(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    return (column * (token * (q.to(torch.int32) @ w.to(torch.int32).t()))).half() + bias


def in_floating_point(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    total = torch.nn.functional.linear(q.float(), w.float())
    return (bias.float() + total * token * column[None]).half()


def weight_as_it_lies(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    w = w.reshape(WIDTH, COLUMNS)
    return (torch.matmul(q.half(), w.half()).float() * token * column).half()


def one_scale_for_the_weight(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    return (torch._int_mm(q, w.t()).float() * token * column[0]).half()


QUANT_SPECS = ((6, WIDTH), (COLUMNS, WIDTH), (6, 1), (COLUMNS,), (COLUMNS,))
PRODUCTS: dict[Callable[..., Any], str] = dict.fromkeys(
    (
        int_mm, int_mm_of_rows, scaled_by_token_first, with_out_dtype, in_int32, in_floating_point, weight_as_it_lies,
        one_scale_for_the_weight,
    ),
    "npu_quant_matmul",
)  # fmt: skip


def added_up_in_int8(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    """Sums beyond 127 begin anew at -128."""
    return ((q @ w.t()).float() * token * column).half()


def scale_by_columns_twice(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    return (torch._int_mm(q, w.t()).float() * column * column).half()


def scaled_by_a_number(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    return (torch._int_mm(q, w.t()).float() * token * 0.5 * column).half()


def divided_by_the_scale(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    return (torch._int_mm(q, w.t()).float() * token / column).half()


def in_float32_to_the_end(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    return torch._int_mm(q, w.t()).float() * token * column


def bias_before_the_scale(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    return ((torch._int_mm(q, w.t()) + bias) * token * column).half()


def scale_of_each_element(q: Any, w: Any, token: Any, column: Any, bias: Any) -> Any:
    return (torch._int_mm(q, w.t()).float() * token * (column + token)).half()


NOT_PRODUCTS: dict[Callable[..., Any], str] = {
    added_up_in_int8: "", scale_by_columns_twice: "one of tokens and one of columns",
    scaled_by_a_number: "by the number 0.5", divided_by_the_scale: "", in_float32_to_the_end: "",
    bias_before_the_scale: "", scale_of_each_element: "one of tokens and one of columns",
}  # fmt: skip


def weight_scaled_first(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(x, w.to(x.dtype) * scale[:, None])


def weight_scaled_first_with_a_bias(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(x, scale.unsqueeze(1) * w.to(x.dtype), bias)


def weight_of_rows(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    w = w.reshape(WIDTH, COLUMNS)
    return x @ (w.to(x.dtype) * scale) + bias


def one_scale_of_all(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(x, w.to(x.dtype) * scale[0], bias)


WEIGHT_SPECS = ((2, 3, WIDTH), (COLUMNS, WIDTH), (COLUMNS,), (COLUMNS,))
WEIGHTS = (weight_scaled_first, weight_scaled_first_with_a_bias, weight_of_rows, one_scale_of_all)


def product_scaled(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    """As torchao has it; with an infinite scale and a weight of 0 the operator would give NaN. A near-miss has the lines."""
    return torch.nn.functional.linear(x, w.to(x.dtype)) * scale + bias


def scale_of_each_row(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return (x[..., :COLUMNS] * 2) @ (w.to(x.dtype) * scale[:, None])


def with_a_zero_of_its_own(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(x, (w.to(x.dtype) - 3) * scale[:, None])


def weight_scaled_twice(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(x, w.to(x.dtype) * scale[:, None] * bias[:, None])


def product_and_bias_scaled(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(x, w.to(x.dtype), bias) * scale


def scaled_in_groups(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    grouped = w.to(x.dtype).view(COLUMNS, 1, WIDTH) * scale.view(COLUMNS, 1, 1)
    return torch.nn.functional.linear(x, grouped.flatten(1))


def product_in_float32(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(x.float(), w.float() * scale.float()[:, None])


NOT_WEIGHTS: dict[Callable[..., Any], str] = {
    product_scaled: "the product is scaled, and not the weight", product_and_bias_scaled: "product and bias are scaled together",
    scale_of_each_row: "a number for each column",
    weight_scaled_twice: "the weight is scaled by unsqueeze [48, 1] and unsqueeze_1 [48, 1]",
    scaled_in_groups: "the weight is scaled by", with_a_zero_of_its_own: "as by a zero point",
    product_in_float32: "the product is torch.float32",
}  # fmt: skip


def scaled_before_and_behind(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(x, w.to(x.dtype) * scale[:, None], bias) * scale


def scaled_before_and_by_a_number(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return 0.5 * torch.nn.functional.linear(x, w.to(x.dtype) * scale[:, None])
