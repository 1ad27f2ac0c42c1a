"""The extra rule npu_add_rms_norm + bias + npu_quantize: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fusion_cases import Table, TableTests, edits_at

RULE = "add_rms_norm_bias_quant"
FUSED = "npu_add_rms_norm_quant"
HALF, BF16, SINGLE, INT32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
# x1, x2, gamma, bias, scales, zero points
SPECS = [((4, 64), HALF), ((4, 64), HALF), ((64,), HALF), ((64,), HALF), ((64,), SINGLE), ((64,), INT32)]

norm = torch.ops.npu.npu_add_rms_norm
quantize = torch.ops.npu.npu_quantize


def scales(s: Any) -> Any:
    return s.abs() * 0.1 + 0.5


def plain(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g, 1e-5)
    return quantize(y + e, scales(s), z, torch.qint8, -1), x


def default_epsilon(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, scales(s), z, torch.qint8)


def default_epsilon_written(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g, epsilon=1e-6)[0] + e, scales(s), z, dtype=torch.qint8, axis=-1, div_mode=True)


def plain_int8(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, scales(s), z, torch.int8, -1)


def code_of_int8(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, scales(s), z, 1, -1, True)


def positive_axis(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, scales(s), z, torch.qint8, 1)


def written_alpha(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(torch.add(norm(a, b, g)[0], e, alpha=1), scales(s), z, torch.qint8)


def three_dimensions(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a.view(2, 2, -1), b.view(2, 2, -1), g)
    return quantize(y + e, scales(s), z, torch.qint8, -1), x


def residual_used_early(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    early = x * 2
    return quantize(y + e, scales(s), z, torch.qint8), early


def bias_is_gamma(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + g, scales(s), z, torch.qint8)


def bias_made_late(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    early = x + 1
    return quantize(y + e * 2, scales(s), z, torch.qint8), early


def two_layers(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    q = quantize(y + e, scales(s), z, torch.qint8)
    y2, _, x2 = norm(x, b, g, 1e-5)
    return q, quantize(y2 + e, scales(s), z, torch.qint8), x2


def of_bfloat16(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, s.abs() + 0.5, z, torch.qint8)


def residual_written_after(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    q = quantize(y + e, scales(s), z, torch.qint8)
    a.copy_(x)
    return q


def same_tensor_twice(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, a, g, 1e-5)
    return quantize(y + e, scales(s), z, torch.qint8, -1), x


def swapped_summands(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(b, a, g, 1e-5)
    return quantize(y + e, scales(s), z, torch.qint8, -1), x


MUST_FUSE: dict[Callable[..., Any], int] = {
    same_tensor_twice: 1, swapped_summands: 1,
    plain: 1, default_epsilon: 1, default_epsilon_written: 1, plain_int8: 1, code_of_int8: 1, positive_axis: 1,
    written_alpha: 1, three_dimensions: 1, residual_used_early: 1, bias_is_gamma: 1, bias_made_late: 1, two_layers: 2,
    of_bfloat16: 1, residual_written_after: 1,
}  # fmt: skip


def biased_by_a_row(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + a, scales(s), z, torch.qint8)


def biased_twice_over(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(torch.add(norm(a, b, g)[0], e, alpha=2), scales(s), z, torch.qint8)


def biased_by_a_number(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + 1, scales(s), z, torch.qint8)


def biased_norm_used(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y = norm(a, b, g)[0] + e
    return quantize(y, scales(s), z, torch.qint8), y


def norm_used(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y = norm(a, b, g)[0]
    return quantize(y + e, scales(s), z, torch.qint8), y * 2


def rstd_used(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, rstd, _ = norm(a, b, g)
    return quantize(y + e, scales(s), z, torch.qint8), rstd


def biases_the_residual(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quantize(x + e, scales(s), z, torch.qint8), y


def multiplying(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, scales(s), None, torch.qint8, -1, False)


def without_zero_points(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, scales(s), None, torch.qint8)


def to_uint8(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, scales(s), z, torch.quint8)


def first_axis(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e, scales(s)[:4], z[:4], torch.qint8, 0)


def bias_of_one_element(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(norm(a, b, g)[0] + e[:1], scales(s), z, torch.qint8)


def bias_depends_on_the_residual(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y, _, x = norm(a, b, g)
    return quantize(y + x[0], scales(s), z, torch.qint8), x


def swapped_sum(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    return quantize(e - norm(a, b, g)[0], scales(s), z, torch.qint8)


def unaligned(a: Any, b: Any, g: Any, e: Any, s: Any, z: Any) -> Any:
    y = norm(a[:, :24].clone(), b[:, :24].clone(), g[:24].clone())[0]
    return quantize(y + e[:24].clone(), scales(s)[:24], z[:24].clone(), torch.qint8)


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    biased_by_a_row: "beta must be a torch.float16 vector of x1's last size, 64; it is torch.float16[4, 64]",
    biased_twice_over: "alpha is 2, the pattern has 1", biased_by_a_number: "beta is 1, the pattern has a tensor",
    biased_norm_used: "add is also a result of the graph",
    norm_used: "output 0 of npu_add_rms_norm is also used by mul",
    rstd_used: "output 1 of npu_add_rms_norm is also a result of the graph",
    biases_the_residual: "output 2 of npu_add_rms_norm, the pattern has output 0",
    multiplying: "div_mode is False, the pattern has True", without_zero_points: "zero_points is None, the pattern has a tensor",
    to_uint8: "dtype is 0, the pattern has 1", first_axis: "axis is -2, the pattern has -1",
    bias_of_one_element: "beta must be a torch.float16 vector",
    bias_depends_on_the_residual: "depends on a replaced output", swapped_sum: "",
    unaligned: "last dim 24 of x1 takes 48 bytes, not a multiple of 32",
}  # fmt: skip
EDITS = edits_at(plain, "npu_quantize")
OTHER_SPECS = {of_bfloat16: [(shape, BF16) for shape, _ in SPECS]}
TABLE = Table(RULE, FUSED, MUST_FUSE, MUST_NOT_FUSE, EDITS, SPECS, other_specs=OTHER_SPECS)


class TestTable(TableTests):
    """Counts, reasons and values of every graph."""

    table = TABLE
