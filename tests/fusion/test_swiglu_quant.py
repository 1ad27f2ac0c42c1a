"""The extra rule npu_swiglu + npu_dynamic_quant: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fusion_cases import Table, TableTests, edits_at

RULE = "swiglu_quant"
FUSED = "npu_swiglu_quant"
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
SPECS = [((4, 64), HALF), ((4, 64), HALF)]

quant = torch.ops.npu.npu_dynamic_quant
swiglu = torch.ops.npu.npu_swiglu


def plain(x: Any, y: Any) -> Any:
    return quant(swiglu(x))


def last_dim_written(x: Any, y: Any) -> Any:
    return quant(swiglu(x, 1), dst_type=torch.int8)


def last_dim_negative(x: Any, y: Any) -> Any:
    return quant(swiglu(x, dim=-1), smooth_scales=None, group_index=None, quant_mode="pertoken")


def of_a_sum(x: Any, y: Any) -> Any:
    return quant(swiglu(x + y))[0]


def only_the_scale(x: Any, y: Any) -> Any:
    return quant(swiglu(x))[1]


def of_three_dimensions(x: Any, y: Any) -> Any:
    return quant(swiglu(x.view(2, 2, -1)))


def of_four_dimensions(x: Any, y: Any) -> Any:
    return quant(swiglu(x.view(2, 1, 2, -1), 3))


def of_a_slice(x: Any, y: Any) -> Any:
    return quant(swiglu(x[1:, 16:48]))


def of_bfloat16(x: Any, y: Any) -> Any:
    return quant(swiglu(x))


def of_single_precision(x: Any, y: Any) -> Any:
    return quant(swiglu(x))


def of_one_row(x: Any, y: Any) -> Any:
    return quant(swiglu(x))


def twice(x: Any, y: Any) -> Any:
    q, s = quant(swiglu(x))
    return (*quant(swiglu(y)), q, s)


def results_used_further(x: Any, y: Any) -> Any:
    q, s = quant(swiglu(x))
    return q.to(torch.int32), s.unsqueeze(-1) * 2


def input_written_after(x: Any, y: Any) -> Any:
    q, s = quant(swiglu(x))
    x.mul_(2)
    return q, s


def swapped_halves(x: Any, y: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return quant(swiglu(torch.cat([up, gate], -1)))


MUST_FUSE: dict[Callable[..., Any], int] = {
    swapped_halves: 1,
    plain: 1, last_dim_written: 1, last_dim_negative: 1, of_a_sum: 1, only_the_scale: 1, of_three_dimensions: 1,
    of_four_dimensions: 1, of_a_slice: 1, of_bfloat16: 1, of_single_precision: 1, of_one_row: 1, twice: 2,
    results_used_further: 1, input_written_after: 1,
}  # fmt: skip


def first_dim(x: Any, y: Any) -> Any:
    return quant(swiglu(x, 0))


def smoothed(x: Any, y: Any) -> Any:
    return quant(swiglu(x), smooth_scales=y[0, :32])


def used_otherwise(x: Any, y: Any) -> Any:
    z = swiglu(x)
    return (*quant(z), z * 2)


def a_result_itself(x: Any, y: Any) -> Any:
    z = swiglu(x)
    return (*quant(z), z)


def to_int4(x: Any, y: Any) -> Any:
    return quant(swiglu(x), dst_type=torch.quint4x2)[0].abs()


def per_tensor(x: Any, y: Any) -> Any:
    return quant(swiglu(x), quant_mode="pertensor")


def other_maximum(x: Any, y: Any) -> Any:
    return quant(swiglu(x), dst_type_max=15.0)


def something_in_between(x: Any, y: Any) -> Any:
    return quant(swiglu(x) * 2)


def flattened_in_between(x: Any, y: Any) -> Any:
    return quant(swiglu(x.view(2, 2, -1)).flatten(0, 1))


def too_wide(x: Any, y: Any) -> Any:
    return quant(swiglu(x.repeat(1, 130)))


def empty(x: Any, y: Any) -> Any:
    return quant(swiglu(x[:0]))


def middle_dim(x: Any, y: Any) -> Any:
    return quant(swiglu(x.view(2, 2, -1), 1))


def by_hand(x: Any, y: Any) -> Any:
    a, b = x.chunk(2, -1)
    return quant(torch.nn.functional.silu(a) * b)


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    first_dim: "dim is 0, the pattern has 1", smoothed: "smooth_scales is",
    used_otherwise: "npu_swiglu is also used by mul", a_result_itself: "npu_swiglu is also a result of the graph",
    to_int4: "dst_type is 16", per_tensor: "quant_mode is pertensor", other_maximum: "dst_type_max is 15.0",
    something_in_between: "", flattened_in_between: "", too_wide: "last dim 8320 of x is above 8192",
    empty: "x may be empty", middle_dim: "dim is 1, the pattern has 2", by_hand: "",
}  # fmt: skip
EDITS = edits_at(plain, "npu_dynamic_quant")
TABLE = Table(
    RULE, FUSED, MUST_FUSE, MUST_NOT_FUSE, EDITS, SPECS, unknown=(to_int4, per_tensor, other_maximum),
    other_specs={
        of_bfloat16: [((4, 64), BF16)] * 2, of_single_precision: [((4, 64), SINGLE)] * 2, of_one_row: [((1, 2), HALF)] * 2,
    },
    exact=False,  # the fused operator gives the scale's reciprocal
)  # fmt: skip


class TestTable(TableTests):
    """Counts, reasons and values of every graph."""

    table = TABLE
