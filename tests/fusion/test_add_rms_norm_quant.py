"""The default rule npu_add_rms_norm + npu_quantize: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_cases import Table, TableTests, edits_at, tensors
from fx_helpers import aot_graph, optimise, targets

RULE = "add_rms_norm_quant"
FUSED = "npu_add_rms_norm_quant"
HALF, BF16, SINGLE, INT32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
# x1, x2, gamma, scales, zero points
FLOAT16 = [((4, 64), HALF), ((4, 64), HALF), ((64,), HALF), ((64,), SINGLE), ((64,), INT32)]
BFLOAT16 = [((4, 64), BF16), ((4, 64), BF16), ((64,), BF16), ((64,), BF16), ((64,), BF16)]

norm = torch.ops.npu.npu_add_rms_norm
quantize = torch.ops.npu.npu_quantize


def dividing(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quantize(y, s * 0.1 + 0.5, z, torch.qint8, -1), x


def without_zero_points(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quantize(y, s * 0.1 + 0.5, None, torch.qint8, -1), x


def multiplying(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quantize(y, s * 5, None, torch.qint8, -1, False), x


def plain_int8(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s * 0.1 + 0.5, z, torch.int8, -1)


def code_of_int8(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s * 0.1 + 0.5, z, 1, -1, True)


def default_axis_is_the_last(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s * 0.1 + 0.5, z, torch.qint8)


def positive_axis(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s * 0.1 + 0.5, z, torch.qint8, axis=1)


def any_axis_above_minus_two_when_multiplying(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s * 5, None, torch.qint8, 0, False)


def written_epsilon(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g, 1e-3)
    return quantize(y, s * 0.1 + 0.5, z, torch.qint8, -1), x


def default_epsilon_written(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g, epsilon=1e-6)[0], s * 0.1 + 0.5, z, dtype=torch.qint8, axis=-1, div_mode=True)


def residual_used_early(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    early = x * 2
    return quantize(y, s * 0.1 + 0.5, z, torch.qint8, -1), early


def two_layers(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    q = quantize(y, s * 0.1 + 0.5, z, torch.qint8, -1)
    y2, _, x2 = norm(x, b, g, 1e-5)
    return q, quantize(y2, s * 0.2 + 0.5, None, torch.qint8, -1), x2


def residual_written_after(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    q = quantize(y, s * 0.1 + 0.5, z, torch.qint8, -1)
    a.copy_(x)
    return q


def bfloat16(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quantize(y, s.abs() + 0.5, z, torch.qint8, -1), x


def swapped_summands(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(b, a, g)
    return quantize(y, s * 0.1 + 0.5, z, torch.qint8, -1), x


def same_tensor_twice(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, a, g)
    return quantize(y, s * 0.1 + 0.5, z, torch.qint8, -1), x


MUST_FUSE: dict[Callable[..., Any], int] = {
    swapped_summands: 1, same_tensor_twice: 1,
    dividing: 1, without_zero_points: 1, multiplying: 1, plain_int8: 1, code_of_int8: 1, default_axis_is_the_last: 1,
    positive_axis: 1, any_axis_above_minus_two_when_multiplying: 1, written_epsilon: 1, default_epsilon_written: 1,
    residual_used_early: 1, two_layers: 2, residual_written_after: 1,
    bfloat16: 1,
}  # fmt: skip


def norm_used_elsewhere(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, _ = norm(a, b, g)
    return quantize(y, s, z, torch.qint8, -1), y * 2


def norm_is_a_result(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, _ = norm(a, b, g)
    return quantize(y, s, z, torch.qint8, -1), y


def rstd_used(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, rstd, _ = norm(a, b, g)
    return quantize(y, s, z, torch.qint8, -1), rstd


def to_uint8(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s, z, torch.quint8, -1)


def to_int32(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s, z, torch.qint32, -1)


def first_axis(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s[:4], z[:4], torch.qint8, 0)


def last_axis_but_one(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s[:4], None, torch.qint8, -2, False)


def one_scale_for_all(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s[:1], None, torch.qint8, -1)


def narrow_zero_points(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s, z.to(torch.int8), torch.qint8, -1)


def half_scales(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0], s.half(), None, torch.qint8, -1, False)


def quantises_the_residual(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quantize(x, s, z, torch.qint8, -1), y


def something_in_between(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] * 2, s, z, torch.qint8, -1)


def scales_depend_on_the_residual(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quantize(y, x[0].float(), z, torch.qint8, -1)


def unaligned(a: Any, b: Any, g: Any, s: Any, z: Any) -> Any:
    y, _, _ = norm(a[:, :24].clone(), b[:, :24].clone(), g[:24].clone())
    return quantize(y, s[:24].clone(), None, torch.qint8, -1)


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    norm_used_elsewhere: "output 0 of npu_add_rms_norm is also used by mul",
    norm_is_a_result: "output 0 of npu_add_rms_norm is also a result of the graph",
    rstd_used: "output 1 of npu_add_rms_norm is also a result of the graph",
    to_uint8: "dtype is 0, the pattern has 1",
    to_int32: "dtype is 3, the pattern has 1",
    first_axis: "axis is -2, the pattern has -1",
    last_axis_but_one: "axis is -2, the pattern has -1",
    one_scale_for_all: "scales must be a torch.float32 vector of x1's last size, 64; it is torch.float32[1]",
    narrow_zero_points: "zero_points must be a torch.int32 vector",
    half_scales: "scales must be a torch.float32 vector",
    quantises_the_residual: "output 2 of npu_add_rms_norm, the pattern has output 0",
    something_in_between: "",
    scales_depend_on_the_residual: "depends on a replaced output",
    unaligned: "last dim 24 of x1 takes 48 bytes, not a multiple of 32",
}

EDITS = edits_at(dividing, "npu_quantize")
TABLE = Table(RULE, FUSED, MUST_FUSE, MUST_NOT_FUSE, EDITS, FLOAT16, other_specs={bfloat16: BFLOAT16})


class TestTable(TableTests):
    """Counts, reasons and values of every graph."""

    table = TABLE


@pytest.mark.parametrize("function", [dividing, without_zero_points, multiplying], ids=lambda f: f.__name__)
def test_bfloat16_fuses_with_bfloat16_scales(function: Callable[..., Any]) -> None:
    """The other row of the documented table of dtypes."""
    TABLE.check_fused(function, dynamic=False, specs=BFLOAT16)


def test_single_precision_is_refused() -> None:
    """x1 in float32 is in no row of the table."""
    wide = [(shape, SINGLE if dtype == HALF else dtype) for shape, dtype in FLOAT16]
    TABLE.check_refused(dividing, "x1 is torch.float32", specs=wide)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 1, 3, 16)], ids=str)
def test_every_documented_rank_fuses(shape: tuple[int, ...]) -> None:
    """The last axis whatever the rank."""
    last = shape[-1:]
    specs = [(shape, HALF), (shape, HALF), (last, HALF), (last, SINGLE), (last, INT32)]
    TABLE.check_fused(dividing, dynamic=False, specs=specs)


def test_a_symbolic_alignment_becomes_a_guard() -> None:
    """A last dimension known only as a symbol: the rule holds for the sizes compiled for, and the report shows the guard."""
    report = optimise(aot_graph(dividing, *tensors(FLOAT16), dynamic=True))
    ((fusion,),) = [record.fusions for record in report.rules if record.name == RULE]
    assert any("32" in guard for guard in fusion.guards)


def test_not_in_max_autotune() -> None:
    """The specification leaves this rule out of that mode; the report says so."""
    gm = aot_graph(dividing, *tensors(FLOAT16))
    report = optimise(gm, mode="max-autotune")
    assert FUSED not in targets(gm)
    (record,) = [record for record in report.rules if record.name == RULE]
    assert "max-autotune" in record.inactive


def test_rules_are_switched_by_name() -> None:
    """``fusion_rules={name: False}`` leaves the operators and says so; other rules stay on."""
    gm = aot_graph(dividing, *tensors(FLOAT16))
    report = optimise(gm, fusion_rules={RULE: False})
    assert FUSED not in targets(gm)
    assert {record.name: record.inactive for record in report.rules}[RULE].startswith("the option fusion_rules")
    assert [record.name for record in report.rules if record.inactive] == [RULE]
