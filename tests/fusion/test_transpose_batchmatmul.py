"""The default rule matmul + transpose: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_cases import Table, TableTests, edits_at, tensors
from fx_helpers import aot_graph, optimise, targets

RULE = "transpose_batchmatmul"
FUSED = "npu_transpose_batchmatmul"
HALF = torch.float16
# (B, M, K), (B, K, N), and (M, B, K) for a first operand that the graph transposes
SPECS = [((2, 3, 128), HALF), ((2, 128, 256), HALF), ((3, 2, 128), HALF)]
SQUARE = [((2, 128, 128), HALF)] * 3


def reshaped(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(0, 1).reshape(a.shape[1], -1)


def made_contiguous(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(0, 1).contiguous()


def other_order(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(1, 0).contiguous()


def negative_dims(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(-3, -2).contiguous()


def mixed_dims(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(-2, 0).contiguous()


def batched_operator(a: Any, b: Any, c: Any) -> Any:
    return torch.bmm(a, b).transpose(0, 1).contiguous()


def permuted(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).permute(1, 0, 2).contiguous()


def permuted_negatively(a: Any, b: Any, c: Any) -> Any:
    return torch.bmm(a, b).permute(-2, -3, -1).contiguous()


def first_transposed(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(c.transpose(0, 1), b).transpose(0, 1).contiguous()


def first_transposed_for_bmm(a: Any, b: Any, c: Any) -> Any:
    return torch.bmm(c.transpose(-2, -3), b).transpose(1, 0).flatten(1)


def first_transposed_and_used(a: Any, b: Any, c: Any) -> Any:
    t = c.transpose(0, 1)
    return torch.matmul(t, b).transpose(0, 1).contiguous(), t * 2


def summed(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(0, 1).sum(-1)


def computed_with(a: Any, b: Any, c: Any) -> Any:
    return (torch.matmul(a, b).transpose(0, 1) * 2 + 1).reshape(-1, 256)


def second_is_transposed_view(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b.transpose(1, 2).contiguous().transpose(1, 2)).transpose(0, 1).contiguous()


def two_products(a: Any, b: Any, c: Any) -> Any:
    y = torch.matmul(a, b).transpose(0, 1).contiguous()
    return torch.matmul(y.transpose(0, 1), b.transpose(1, 2).contiguous()).transpose(0, 1).flatten(1)


def swapped_operands(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(b, a).transpose(0, 1).contiguous()


def same_tensor_twice(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, a).transpose(0, 1).contiguous()


MUST_FUSE: dict[Callable[..., Any], int] = {
    swapped_operands: 1, same_tensor_twice: 1,
    reshaped: 1, made_contiguous: 1, other_order: 1, negative_dims: 1, mixed_dims: 1, batched_operator: 1, permuted: 1,
    permuted_negatively: 1, first_transposed: 1, first_transposed_for_bmm: 1, first_transposed_and_used: 1, summed: 1,
    computed_with: 1, second_is_transposed_view: 1, two_products: 2,
}  # fmt: skip


def view_is_a_result(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(0, 1)


def strides_reach_a_result(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(0, 1) + 1


def strides_are_read(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(0, 1).as_strided((3, 256), (256, 1)).clone()


def random_in_memory_order(a: Any, b: Any, c: Any) -> Any:
    return torch.rand_like(torch.matmul(a, b).transpose(0, 1)).sum(0)


def product_used_elsewhere(a: Any, b: Any, c: Any) -> Any:
    y = torch.matmul(a, b)
    return y.transpose(0, 1).contiguous(), y * 2


def last_dims(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(1, 2).contiguous()


def outer_dims(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(0, 2).contiguous()


def equal_dims(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).transpose(1, 1).contiguous() + 1


def other_permutation(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b).permute(1, 2, 0).contiguous()


def broadcast_batches(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b[:1]).transpose(0, 1).contiguous()


def two_dimensional_second(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b[0]).transpose(0, 1).contiguous()


def four_dimensions(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a.unsqueeze(0), b.unsqueeze(0)).transpose(0, 1).contiguous()


def unaligned_inner(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a[..., :100], b[:, :100]).transpose(0, 1).contiguous()


def unaligned_columns(a: Any, b: Any, c: Any) -> Any:
    return torch.matmul(a, b[..., :130]).transpose(0, 1).contiguous()


def added_product(a: Any, b: Any, c: Any) -> Any:
    return torch.baddbmm(torch.matmul(a, b), a, b).transpose(0, 1).contiguous()


def something_in_between(a: Any, b: Any, c: Any) -> Any:
    return (torch.matmul(a, b) + 1).transpose(0, 1).contiguous()


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    view_is_a_result: "instead of [256, 768, 1], and it is a result of the graph",
    strides_reach_a_result: "and it is a result of the graph",
    strides_are_read: "(aten.as_strided.default) may depend on them",
    product_used_elsewhere: "matmul is also used by mul",
    last_dims: "(aten.transpose.int): dim0 is 1, the pattern has 0",
    outer_dims: "dim1 is 2, the pattern has 1",
    equal_dims: "dim0 is 1, the pattern has 0",
    other_permutation: "dims is (1, 2, 0), the pattern has (1, 0, 2)",
    broadcast_batches: "x1 has 2 batches and x2 1; the fused operator does not broadcast",
    two_dimensional_second: "the operands must have 3 dimensions each",
    four_dimensions: "the operands must have 3 dimensions each",
    unaligned_inner: "K is 100, not a multiple of 128",
    unaligned_columns: "N is 130, not a multiple of 128",
    added_product: "",
    random_in_memory_order: "(aten.rand_like.default) may depend on them",
    something_in_between: "",
}

EDITS = edits_at(made_contiguous, "transpose")
OTHER_SPECS = {swapped_operands: SQUARE, same_tensor_twice: SQUARE}
TABLE = Table(
    RULE, FUSED, MUST_FUSE, MUST_NOT_FUSE, EDITS, SPECS, other_specs=OTHER_SPECS, unknown=(random_in_memory_order,)
)


class TestTable(TableTests):
    """Counts, reasons and values of every graph."""

    table = TABLE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_documented_dtypes_fuse(dtype: torch.dtype) -> None:
    """float16, bfloat16 and float32."""
    TABLE.check_fused(first_transposed, dynamic=False, specs=[(shape, dtype) for shape, _ in SPECS])


def test_double_precision_is_refused() -> None:
    """The operator does not take float64."""
    wide = [(shape, torch.float64) for shape, _ in SPECS]
    TABLE.check_refused(made_contiguous, "the operands are torch.float64", specs=wide)


@pytest.mark.parametrize("batches", [512, 511])
def test_inner_size_times_batches_is_limited(batches: int) -> None:
    """K * B must be below 65536: 128 * 512 is not, 128 * 511 is."""
    shapes = ((batches, 2, 128), (batches, 128, 128), (1,))
    report = optimise(aot_graph(made_contiguous, *(torch.empty(shape, dtype=HALF, device="npu") for shape in shapes)))
    assert report.fusions(RULE) == (batches == 511)
    assert batches == 511 or "K * B is 65536; it must be below 65536" in report.near_misses(RULE)[0].reason


def test_empty_operands_are_refused() -> None:
    """No rows, or an inner size of zero, which every number divides."""
    for m, k in ((0, 128), (2, 0)):
        report = optimise(aot_graph(made_contiguous, *tensors([((4, m, k), HALF), ((4, k, 128), HALF), ((1,), HALF)])))
        assert "may be empty" in report.near_misses(RULE)[0].reason


def test_symbolic_limits_become_guards() -> None:
    """With symbolic sizes the limits hold for the sizes compiled for, and the report shows the guards."""
    report = optimise(aot_graph(made_contiguous, *tensors(SPECS), dynamic=True))
    ((fusion,),) = [record.fusions for record in report.rules if record.name == RULE]
    assert any("65536" in guard for guard in fusion.guards)
    assert any("128" in guard for guard in fusion.guards)


def test_a_copy_that_made_it_dense_goes() -> None:
    """The fused result is dense already; a copy stays where it changes something."""
    gm = aot_graph(made_contiguous, *tensors(SPECS))
    optimise(gm)
    assert targets(gm) == [FUSED]
    gm = aot_graph(computed_with, *tensors(SPECS))
    optimise(gm)
    assert targets(gm)[:3] == [FUSED, "mul", "add"]


def test_not_in_max_autotune() -> None:
    """The specification leaves this rule out of that mode; the report says so."""
    report = optimise(aot_graph(made_contiguous, *tensors(SPECS)), mode="max-autotune")
    assert "'max-autotune'" in {record.name: record.inactive for record in report.rules}[RULE]
    assert report.fusions(RULE) == 0
