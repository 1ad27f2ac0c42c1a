"""The default rule npu_add_rms_norm + cast to float32: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_cases import Edit, Table, TableTests, limited_cores, on_stream, written_before

RULE = "add_rms_norm_cast"
FUSED = "npu_add_rms_norm_cast"
HALF, BF16 = torch.float16, torch.bfloat16
ROWS = [((2, 3, 64), HALF), ((2, 3, 64), HALF), ((64,), HALF)]

norm = torch.ops.npu.npu_add_rms_norm


def direct(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    return y.to(torch.float32), y, x


def through_view(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    return y.view(-1, y.size(-1)).to(torch.float32), x


def norm_unused_otherwise(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0].float()


def npu_cast(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    return torch.ops.npu._npu_dtype_cast(y.view(-1, y.size(-1)), torch.float32), x


def npu_cast_direct(a: Any, b: Any, g: Any) -> Any:
    return torch.ops.npu._npu_dtype_cast(norm(a, b, g)[0], torch.float32)


def npu_cast_by_code(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    return torch.ops.npu.npu_dtype_cast(y, 6), x


def written_epsilon(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g, 1e-3)[0].float()


def default_epsilon_written(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g, epsilon=1e-6)[0].flatten(0, 1).float()


def every_output_used(a: Any, b: Any, g: Any) -> Any:
    y, rstd, x = norm(a, b, g)
    return y.float(), y * 2, rstd, x


def view_used_otherwise(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    rows = y.view(-1, y.size(-1))
    return rows.float(), rows * 2, x


def default_keywords_written(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0].to(torch.float32, non_blocking=False, copy=False)


def residual_used_early(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    early = x * 2
    return y.float(), early


def two_layers(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    y2, _, x2 = norm(x, y, g)
    return y.float(), y2.view(-1, y2.size(-1)).float(), x2


def matrix_gamma(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g.expand(3, 64).contiguous())[0].float()


def residual_written_after(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    wide = y.float()
    a.copy_(x)
    return wide


def swapped_summands(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(b, a, g)
    return y.float(), x


def same_tensor_twice(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, a, g)
    return y.float(), x


MUST_FUSE: dict[Callable[..., Any], int] = {
    swapped_summands: 1, same_tensor_twice: 1,
    direct: 1, through_view: 1, norm_unused_otherwise: 1, npu_cast: 1, npu_cast_direct: 1, npu_cast_by_code: 1,
    written_epsilon: 1, default_epsilon_written: 1, every_output_used: 1, view_used_otherwise: 1,
    default_keywords_written: 1, residual_used_early: 1, two_layers: 2, matrix_gamma: 1, residual_written_after: 1,
}  # fmt: skip


def to_bfloat16(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0].to(BF16)


def to_float64(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0].double()


def casts_the_residual(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    return x.float(), y


def something_in_between(a: Any, b: Any, g: Any) -> Any:
    return (norm(a, b, g)[0] + 1).float()


def other_view(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0].view(-1, 32).float()


def partly_flat(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0].flatten(1).float()


def single_precision(a: Any, b: Any, g: Any) -> Any:
    return norm(a.float(), b.float(), g.float())[0].to(HALF)


def transposed_first(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0].transpose(0, 1).float()


def only_rms_norm(a: Any, b: Any, g: Any) -> Any:
    return torch.ops.npu.npu_rms_norm(a + b, g)[0].float()


def sliced_norm(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0][:, :1].float()


def to_integers(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0].to(torch.int32)


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    to_integers: "dtype is 3, the pattern has 6",
    to_bfloat16: "dtype is 15, the pattern has 6",
    to_float64: "dtype is 7, the pattern has 6",
    casts_the_residual: "output 2 of npu_add_rms_norm, the pattern has output 0",
    something_in_between: "",
    other_view: "size is",
    partly_flat: "size is",
    single_precision: "_to_copy_3",
    transposed_first: "",
    only_rms_norm: "",
    sliced_norm: "",
}

EDITS: dict[str, tuple[Callable[..., Any], Edit, str]] = {
    "other stream": (through_view, on_stream("_to_copy"), "stream_label None and _to_copy has 'side'"),
    "core limit": (direct, limited_cores("_to_copy"), "core_limit"),
    "input written in between": (direct, written_before("_to_copy"), "writes arg0_1 between the matched operators"),
}


TABLE = Table(RULE, FUSED, MUST_FUSE, MUST_NOT_FUSE, EDITS, ROWS)


class TestTable(TableTests):
    """Counts, reasons and values of every graph."""

    table = TABLE


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (1, 64), (2, 2, 3, 16), (5, 2), (1, 1, 1, 1, 1, 1, 2, 8)], ids=str)
def test_every_documented_rank_and_dtype_fuses(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ranks 1 to 8 and sizes of one."""
    TABLE.check_fused(direct, dynamic=False, specs=[(shape, dtype), (shape, dtype), (shape[-1:], dtype)])


def test_empty_tensors_do_not_fuse() -> None:
    """The fused operator is documented not to take them."""
    TABLE.check_refused(direct, "empty", specs=[((0, 8), HALF), ((0, 8), HALF), ((8,), HALF)])
