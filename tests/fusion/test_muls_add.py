"""The extra rule product with a number + sum: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fusion_cases import Table, TableTests, edits_at

RULE = "muls_add"
HALF, BF16, SINGLE, INT32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
SPECS = [((4, 64), HALF), ((4, 64), HALF)]


def scaled_first(x: Any, y: Any) -> Any:
    return x * 0.5 + y


def scaled_second(x: Any, y: Any) -> Any:
    return y + x * 3


def negative_scale(x: Any, y: Any) -> Any:
    return x * -1.5 + y


def scale_of_zero(x: Any, y: Any) -> Any:
    return x * 0.0 + y


def whole_number(x: Any, y: Any) -> Any:
    return x * 2 + y


def both_are_scaled(x: Any, y: Any) -> Any:
    return x * 0.5 + y * 2


def broadcast_sum(x: Any, y: Any) -> Any:
    return x * -1.5 + y[:1]


def broadcast_product(x: Any, y: Any) -> Any:
    return x[0] * 0.25 + y


def same_tensor_twice(x: Any, y: Any) -> Any:
    return x * 0.5 + x


def chain(x: Any, y: Any) -> Any:
    return (x * 0.5 + y) * 0.25 + x


def written_default(x: Any, y: Any) -> Any:
    return torch.add(x * 0.5, y, alpha=1)


def three_dimensions(x: Any, y: Any) -> Any:
    return x.view(2, 2, -1) * 0.5 + y.view(2, 2, -1)


def of_bfloat16(x: Any, y: Any) -> Any:
    return x * 0.5 + y


def of_single_precision(x: Any, y: Any) -> Any:
    return x * 0.3 + y


def output_written_to_input(x: Any, y: Any) -> Any:
    z = x * 0.5 + y
    y.copy_(z)
    return z.sum(-1)


MUST_FUSE: dict[Callable[..., Any], int] = {
    scaled_first: 1, scaled_second: 1, negative_scale: 1, scale_of_zero: 1, whole_number: 1, both_are_scaled: 1,
    broadcast_sum: 1, broadcast_product: 1, same_tensor_twice: 1, chain: 2, written_default: 1, three_dimensions: 1,
    of_bfloat16: 1, of_single_precision: 1, output_written_to_input: 1,
}  # fmt: skip


def product_used_otherwise(x: Any, y: Any) -> Any:
    z = x * 0.5
    return z + y, z * 2


def product_is_a_result(x: Any, y: Any) -> Any:
    z = x * 0.5
    return z + y, z


def sum_with_alpha(x: Any, y: Any) -> Any:
    return torch.add(x * 0.5, y, alpha=2)


def product_scaled_by_alpha(x: Any, y: Any) -> Any:
    return torch.add(y, x * 0.5, alpha=2)


def product_of_tensors(x: Any, y: Any) -> Any:
    return x * y + y


def scaled_by_a_tensor_of_one_number(x: Any, y: Any, s: Any) -> Any:
    return x * s + y


def scale_of_truth(x: Any, y: Any) -> Any:
    return x * True + y


def sum_with_a_number(x: Any, y: Any) -> Any:
    return x * 0.5 + 1


def sum_of_two_dtypes(x: Any, y: Any) -> Any:
    return x * 0.5 + y.float()


def integers(x: Any, y: Any) -> Any:
    return x.to(INT32) * 2 + y.to(INT32)


def difference(x: Any, y: Any) -> Any:
    return x * 0.5 - y


def something_in_between(x: Any, y: Any) -> Any:
    return (x * 0.5).abs() + y


def quotient(x: Any, y: Any) -> Any:
    return x / 2 + y


def sum_then_product(x: Any, y: Any) -> Any:
    return (x + y) * 0.5


def turned_layout(x: Any, y: Any) -> Any:
    return x.t() * 0.5 + y.view(64, 4)


def scale_no_float16(x: Any, y: Any) -> Any:
    return x * 1e-6 + y


def scale_no_bfloat16(x: Any, y: Any) -> Any:
    return x * 0.3 + y


def scale_beyond_float16(x: Any, y: Any) -> Any:
    return x * 65536.0 + y


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    product_used_otherwise: "mul is also used by mul_1", product_is_a_result: "mul is also a result of the graph",
    sum_with_alpha: "alpha is 2", product_scaled_by_alpha: "alpha is 2",
    product_of_tensors: "scale is the tensor arg1_1 (float16[4, 64]), the pattern has a number",
    scaled_by_a_tensor_of_one_number:
        "scale is the tensor arg1_1 (float32[]), the pattern has a number (a Python number in the tensor's place would match)",
    scale_of_truth: "only one of them is a truth value",
    sum_with_a_number: "y is 1, the pattern has a tensor", sum_of_two_dtypes: "floating-point tensors of one dtype",
    integers: "only one of them is a whole number, as mul reads", difference: "", something_in_between: "", quotient: "",
    sum_then_product: "", turned_layout: "would have strides",
    scale_no_float16: "1e-06 is no torch.float16, which alpha would be rounded to",
    scale_no_bfloat16: "0.3 is no torch.bfloat16", scale_beyond_float16: "65536.0 is no torch.float16",
}  # fmt: skip
EDITS = edits_at(scaled_first, "add")
OTHER_SPECS = {
    of_bfloat16: [((4, 64), BF16)] * 2,
    of_single_precision: [((4, 64), SINGLE)] * 2,
    scale_no_bfloat16: [((4, 64), BF16)] * 2,
    scaled_by_a_tensor_of_one_number: [*SPECS, ((), SINGLE)],
}
TABLE = Table(RULE, "add", MUST_FUSE, MUST_NOT_FUSE, EDITS, SPECS, other_specs=OTHER_SPECS, exact=False)


class TestTable(TableTests):
    """Counts, reasons and values of every graph."""

    table = TABLE
