"""The default rule npu_add_rms_norm + npu_dynamic_quant: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fusion_cases import Table, TableTests, edits_at, tensors
from fx_helpers import aot_graph, optimise

from npugraph_ex.testing.generator.client_operators import client_operators

RULE = "add_rms_norm_dynamic_quant"
FUSED = "npu_add_rms_norm_dynamic_quant"
HALF, BF16 = torch.float16, torch.bfloat16

norm = torch.ops.npu.npu_add_rms_norm
quant = torch.ops.npu.npu_dynamic_quant


@pytest.fixture(autouse=True, scope="module")
def _operators() -> Iterator[None]:
    """The client's norm exists while this module is tested."""
    with client_operators():
        yield


def plain(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    return (*quant(y), x)


def smoothed(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    return (*quant(y, smooth_scales=s), x)


def written_epsilon(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g, 1e-5)
    return (*quant(y, smooth_scales=s), x)


def written_epsilon_unsmoothed(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g, 1e-5)
    return (*quant(y), x)


def written_epsilon_alone(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g, 1e-5)[0])


def nothing_optional(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0])


def smoothed_alone(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], smooth_scales=s)


def default_epsilon_written(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g, epsilon=1e-6)
    return (*quant(y), x)


def no_residual(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g, 1e-4)[0], smooth_scales=s)


def scale_unused(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0])[0]


def only_scale(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0])[1]


def defaults_spelled_out(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], smooth_scales=None, group_index=None, dst_type=torch.int8, quant_mode="pertoken")


def residual_used_early(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    early = x * 2
    return (*quant(y), early)


def smooth_defined_late(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    early = x + 1
    return (*quant(y, smooth_scales=s * 2), early)


def same_tensor_twice(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, a, g)
    return (*quant(y, smooth_scales=g), x)


def twice_in_a_row(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    q, t = quant(y)
    y2, _, x2 = norm(x, b, g, 1e-5)
    return (q, t, *quant(y2, smooth_scales=s), x2)


def residual_written_after(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    q, t = quant(y)
    a.copy_(x)
    return q, t


def flattened(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.unsqueeze(0), b.unsqueeze(0), g)
    q, t = quant(y.flatten(0, 1))
    return q, t.view(-1, 1), x


def flattened_by_view(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g, 1e-5)
    q, t = quant(y.view(-1, y.size(-1)))
    return q, t.view(-1, 1), x


def flattened_and_smoothed(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, _ = norm(a.unsqueeze(1), b.unsqueeze(1), g)
    return quant(y.flatten(0, 1), smooth_scales=s)


def partly_flattened(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, 1, -1), b.view(2, 2, 1, -1), g)
    q, t = quant(y.flatten(0, 1))
    return q, t.view(-1, 1), x


def swapped_summands(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(b, a, g)
    return (*quant(y, smooth_scales=s), x)


def swapped_vectors(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, s)
    return (*quant(y, smooth_scales=g), x)


def client_norm(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = torch.ops._C_ascend.npu_add_rms_norm_bias(a, b, g, None, 1e-5)
    return (*quant(y), x)


def client_norm_without_optional_operands(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(torch.ops._C_ascend.npu_add_rms_norm_bias(a, b, g)[0])


MUST_FUSE: dict[Callable[..., Any], int] = {
    swapped_summands: 1,
    swapped_vectors: 1,
    plain: 1,
    smoothed: 1,
    written_epsilon: 1,
    written_epsilon_unsmoothed: 1,
    written_epsilon_alone: 1,
    nothing_optional: 1,
    smoothed_alone: 1,
    default_epsilon_written: 1,
    no_residual: 1,
    scale_unused: 1,
    only_scale: 1,
    defaults_spelled_out: 1,
    residual_used_early: 1,
    smooth_defined_late: 1,
    same_tensor_twice: 1,
    twice_in_a_row: 2,
    residual_written_after: 1,
    flattened: 1,
    flattened_by_view: 1,
    flattened_and_smoothed: 1,
    partly_flattened: 1,
    client_norm: 1,
    client_norm_without_optional_operands: 1,
}


def norm_used_elsewhere(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, _ = norm(a, b, g)
    return (*quant(y), y * 2)


def norm_is_a_result(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, _ = norm(a, b, g)
    return (*quant(y), y)


def rstd_used(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, rstd, _ = norm(a, b, g)
    return (*quant(y), rstd)


def int4_output(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], dst_type=torch.quint4x2)


def per_tensor(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], quant_mode="pertensor")


def grouped(a: Any, b: Any, g: Any, s: Any) -> Any:
    index = torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device)
    return quant(norm(a, b, g)[0], smooth_scales=s.unsqueeze(0), group_index=index)


def custom_maximum(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0], dst_type_max=15.0)


def quantises_the_residual(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    return (*quant(x), y)


def smooth_depends_on_residual(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quant(y, smooth_scales=x[0] * 2)


def something_in_between(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a, b, g)[0] * 2)


def permuted_layout(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.unsqueeze(0).repeat(2, 1, 1).transpose(0, 1), b.unsqueeze(1).repeat(1, 2, 1), g)
    return (*quant(y), x)


def two_dimensional_gamma(a: Any, b: Any, g: Any, s: Any) -> Any:
    return quant(norm(a.unsqueeze(0), b.unsqueeze(0), g.expand(a.shape))[0])


def flattened_otherwise(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g)
    return (*quant(y.view(8, -1)), x)


def flattened_at_the_end(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g)
    return (*quant(y.flatten(1, 2)), x)


def flat_norm_used_elsewhere(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g)
    flat = y.flatten(0, 1)
    return (*quant(flat), flat * 2, x)


def client_norm_with_a_bias(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = torch.ops._C_ascend.npu_add_rms_norm_bias(a, b, g, s, 1e-5)
    return (*quant(y), x)


def client_norm_then_smoothed(a: Any, b: Any, g: Any, s: Any) -> Any:
    y, _, x = torch.ops._C_ascend.npu_add_rms_norm_bias(a, b, g, None, 1e-5)
    return (*quant(y, smooth_scales=s), x)


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    norm_used_elsewhere: "output 0 of npu_add_rms_norm is also used by mul",
    norm_is_a_result: "output 0 of npu_add_rms_norm is also a result of the graph",
    rstd_used: "output 1 of npu_add_rms_norm is also a result of the graph",
    int4_output: "dst_type is 16",
    per_tensor: "quant_mode is pertensor",
    grouped: "group_index is full",
    custom_maximum: "dst_type_max is 15.0",
    smooth_depends_on_residual: "depends on a replaced output",
    permuted_layout: "would have strides",
    two_dimensional_gamma: "gamma must be",
    quantises_the_residual: "output 2 of npu_add_rms_norm, the pattern has output 0",
    something_in_between: "",
    flattened_otherwise: "size is (8, 32), the pattern has (4, 64)",
    flattened_at_the_end: "size is (2, 128), the pattern has (4, 64)",
    client_norm_with_a_bias: "beta is arg3_1, the pattern has None",
    client_norm_then_smoothed: "smooth_scales is",
    flat_norm_used_elsewhere: "view_2 is also used by mul",
}


SPECS = [((4, 64), HALF)] * 2 + [((64,), HALF)] * 2
EDITS = edits_at(plain, "npu_dynamic_quant")
TABLE = Table(
    RULE, FUSED, MUST_FUSE, MUST_NOT_FUSE, EDITS, SPECS, unknown=(int4_output, per_tensor, grouped, custom_maximum)
)


class TestTable(TableTests):
    """Counts, reasons and values of every graph."""

    table = TABLE


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (2, 1, 3, 16), (1, 16), (5, 2)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_every_documented_rank_and_dtype_fuses(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ranks 2 to 4 and sizes of one, in float16 and bfloat16."""
    TABLE.check_fused(smoothed, dynamic=False, specs=[(shape, dtype)] * 2 + [(shape[-1:], dtype)] * 2)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"), [((4, 64), torch.float32, "x1 is torch.float32"), ((0, 16), HALF, "empty")]
)
def test_undocumented_operands_are_refused(shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
    """float32 and empty tensors."""
    TABLE.check_refused(plain, reason, specs=[(shape, dtype)] * 2 + [(shape[-1:], dtype)] * 2)


def test_near_miss_names_the_source_line() -> None:
    """The user's file and line, not a node number alone."""
    report = optimise(aot_graph(norm_used_elsewhere, *tensors(SPECS)))
    (miss,) = report.near_misses()
    assert miss.node == "npu_dynamic_quant"
    line = norm_used_elsewhere.__code__.co_firstlineno + 2
    assert miss.source == f"{__file__}:{line}"
