"""A quantised product and an all-to-all exchange: columns to the ranks behind the product, or rows to columns before it.

Formula (operator documentation of ``torch_npu.npu_quant_matmul_all_to_all`` and ``npu_all_to_all_quant_matmul``; CANN operator
documentation, aclnnQuantMatmulAlltoAll and aclnnAlltoAllQuantMatmul), with W ranks::

    npu_quant_matmul_all_to_all:  y   = product(x1, x1_scale)                    this rank's columns of every rank's y, one
                                  out = the ranks' y[:, rank * n / W : ...]      below the other

    npu_all_to_all_quant_matmul:  permuted = the ranks' x1[rank * m / W : ...], side by side
                                  x, s     = permuted, its scales                          modes 6 and 6
                                  x, s     = permuted, quantised by rows                   modes 7 and 2
                                  out      = product(x, s)

    product by modes 3 or 7, and 2:  (x @ x2) * s * x2_scale + bias              int8: scales [m] and [n]
                                     (x @ x2 + bias) * s * x2_scale              8-bit floats
    product by modes 6 and 6:        (x * s) @ (x2 * x2_scale) + bias            [m, k / 64, 2] and [n, k / 64, 2] (MX)

Mode 7 divides each row by its largest magnitude over that of ``x1_quant_dtype``, float8_e5m2 by default, and rounds; a row of zeros
has scale 1. With an int8 ``x2`` the rows are first multiplied by ``x1_scale`` [k * W], if it is there.

``npu_all_to_all_quant_matmul`` returns ``permuted`` too, unless ``all2all_out_flag`` is False.

Not covered: int4 factors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import HALVES, compute_dtype, largest_of, refused, round_to
from npugraph_ex.operators._quantised_ranks import (
    MX_GROUPS,
    blocks,
    check_groups,
    check_no_int4,
    check_reserved,
    check_scale,
    check_shape,
    check_way,
    depth,
    in_dtype,
    mx_product,
    operands,
    result_dtype,
    token_product,
    width,
)
from npugraph_ex.operators._ranks import Exchange, Ranks, Steps
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_mm_reduce_scatter_base import check_ranks

_AFTER, _BEFORE = "npu_quant_matmul_all_to_all", "npu_all_to_all_quant_matmul"
_SIZES = (2, 4, 8, 16)
_CHANNELS, _TOKENS, _MX, _DYNAMIC = 2, 3, 6, 7
_DEEPEST = 65535


def _check_modes(operator: str, modes: tuple[int | None, int | None], usual: int) -> bool:
    """Whether the factors have powers of two as scales; raises for modes that do not go together."""
    found = (usual if modes[0] is None else modes[0], _CHANNELS if modes[1] is None else modes[1])
    if found not in {(usual, _CHANNELS), (_MX, _MX)}:
        raise refused(
            operator, "x1_quant_mode and x2_quant_mode", found, f"{usual} and {_CHANNELS}, or {_MX} and {_MX}"
        )
    return found == (_MX, _MX)


def _check_sizes(
    operator: str, factors: tuple[torch.Tensor, torch.Tensor], axes: Sequence[int] | None, allowed: list[int]
) -> None:
    """Raise where the factors are no matrices, are empty or too deep."""
    x1, x2 = factors
    if x1.dim() != 2 or x2.dim() != 2 or 0 in (*x1.shape, *x2.shape) or x2.shape[0] > _DEEPEST:
        raise refused(operator, "the factors", f"{tuple(x1.shape)} and {tuple(x2.shape)}", "two matrices, not empty")
    if axes and list(axes) != allowed:
        raise refused(operator, "all2all_axes", list(axes), f"None or {allowed}")


def _check_bias(operator: str, bias: torch.Tensor | None, n: int, dtypes: Sequence[torch.dtype]) -> None:
    if bias is not None:
        check_shape(operator, "bias", bias, (n,))
        if bias.dtype not in {*dtypes, torch.float64}:
            raise refused(operator, "bias", bias.dtype, " or ".join(map(str, dtypes)))


def _target(operator: str, y_dtype: int | None, *, whole: bool) -> torch.dtype:
    """The dtype of the result: float32 unless ``y_dtype`` names one, which it has to where the factors are int8."""
    allowed = HALVES if whole else (*HALVES, torch.float32)
    return result_dtype(operator, 6 if y_dtype in {None, -1} else y_dtype, allowed=allowed)


def _of_blocks(
    operator: str,
    factors: tuple[torch.Tensor, torch.Tensor],
    codes: tuple[int | None, int | None],
    scales: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The product of factors with powers of two as scales, not rounded."""
    left, right = operands(operator, factors, codes, ("x1", "x2"))
    return mx_product(operator, left, right, (scales[0], scales[1].transpose(0, 1)), bias)


def _check_blocks(
    operator: str,
    factors: tuple[torch.Tensor, torch.Tensor],
    codes: tuple[int | None, int | None],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    scale_codes: tuple[int | None, int | None],
    world_size: int,
) -> None:
    """Raise for factors and scales in blocks of 32 that do not fit; ``x2`` is ``world_size`` times as deep as ``x1``."""
    left, right = operands(operator, factors, codes, ("x1", "x2"))
    if left.hifloat:
        raise refused(operator, "x1_dtype", codes[0], "not hifloat8, which has no scales of 32 elements")
    k = depth(left)
    if world_size > 1 and k % 64:
        raise refused(operator, "x1's last dimension", k, "a multiple of 64")
    if factors[1].shape[0] != factors[0].shape[1] * world_size:
        raise refused(operator, "x2's first dimension", factors[1].shape[0], f"{factors[0].shape[1] * world_size}")
    check_shape(operator, "x1_scale", scales[0], (factors[0].shape[0], blocks(k), 2))
    check_shape(operator, "x2_scale", scales[1], (width(right, k * world_size), blocks(k * world_size), 2))
    for name, scale, code in zip(("x1_scale", "x2_scale"), scales, scale_codes, strict=True):
        check_scale(operator, name, scale, code, (), in_blocks=True)


def _eights(*size: int) -> torch.Tensor:
    return torch.randn(size).to(torch.float8_e4m3fn)


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


def _powers(*size: int) -> torch.Tensor:
    return torch.randint(124, 130, size).to(torch.uint8)


@Operator(
    name="npu::npu_quant_matmul_all_to_all",
    source="operator documentation of torch_npu.npu_quant_matmul_all_to_all; CANN operator documentation, aclnnQuantMatmulAlltoAll",
    dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
    first_factor=0,
    examples=(
        lambda: call(_eights(3, 16), _eights(8, 16).t(), "group", 2, torch.randn(8), torch.rand(3), torch.rand(8)),
        lambda: call(
            _eights(3, 64), _eights(8, 64).t(), "group", 2, torch.randn(8), _powers(3, 1, 2), _powers(8, 1, 2), x1_quant_mode=6,
            x2_quant_mode=6, x1_scale_dtype=293, x2_scale_dtype=293, y_dtype=torch.float16, group_sizes=[1, 1, 32],
        ),
    ),
)  # fmt: skip
def npu_quant_matmul_all_to_all(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    common_scale: torch.Tensor | None = None,
    x1_offset: torch.Tensor | None = None,
    x2_offset: torch.Tensor | None = None,
    x1_quant_mode: int | None = None,
    x2_quant_mode: int | None = None,
    common_quant_mode: int | None = None,
    group_sizes: Sequence[int] | None = None,
    all2all_axes: Sequence[int] | None = None,
    comm_quant_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
    output_scale_dtype: int | None = None,
    comm_scale_dtype: int | None = None,
    y_dtype: int | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """[m * world_size, n / world_size]. x1: [m, k]; x2: [k, n]; bias: [n]; scales as above."""
    check_ranks(_AFTER, world_size, _SIZES)
    check_reserved(
        _AFTER, common_scale=common_scale, x1_offset=x1_offset, x2_offset=x2_offset, common_quant_mode=common_quant_mode,
        comm_quant_dtype=comm_quant_dtype, output_scale_dtype=output_scale_dtype, comm_scale_dtype=comm_scale_dtype,
    )  # fmt: skip
    check_way(_AFTER, comm_mode)
    check_no_int4(_AFTER, x1_dtype=x1_dtype, x2_dtype=x2_dtype, x1=x1.dtype, x2=x2.dtype)
    _check_sizes(_AFTER, (x1, x2), all2all_axes, [-1, -2])
    in_blocks = _check_modes(_AFTER, (x1_quant_mode, x2_quant_mode), _TOKENS)
    whole = x1.dtype == x2.dtype == torch.int8 and not in_blocks
    target = _target(_AFTER, y_dtype, whole=whole)
    codes, scale_codes = (x1_dtype, x2_dtype), (x1_scale_dtype, x2_scale_dtype)
    _check_bias(_AFTER, bias, x2.shape[1], (target, torch.float32) if whole else (torch.float32,))
    if x2.shape[1] % world_size:
        raise refused(_AFTER, "the number of columns", x2.shape[1], f"a multiple of world_size, {world_size}")
    if in_blocks:
        _check_blocks(_AFTER, (x1, x2), codes, (x1_scale, x2_scale), scale_codes, 1)
        check_groups(_AFTER, "group_sizes", group_sizes, MX_GROUPS)
    else:
        check_shape(_AFTER, "x1_scale", x1_scale, (x1.shape[0],))
        check_shape(_AFTER, "x2_scale", x2_scale, (x2.shape[1],))
        if x1.shape[1] != x2.shape[0]:
            raise refused(_AFTER, "x2's first dimension", x2.shape[0], f"{x1.shape[1]}")
        if whole and bias is None:
            raise refused(_AFTER, "bias", None, "a tensor where the factors are int8")
        if not whole:
            operands(_AFTER, (x1, x2), codes, ("x1", "x2"))
    assert x1_scale is not None  # noqa: S101 - the checks see to it
    assert x2_scale is not None  # noqa: S101
    scales = (x1_scale, x2_scale)
    y = (
        _of_blocks(_AFTER, (x1, x2), codes, scales, bias)
        if in_blocks
        else token_product(_AFTER, (x1, x2), scales, bias)
    )
    columns = in_dtype(y, target).chunk(world_size, 1)
    rows = [x1.shape[0]] * world_size
    everyone: Ranks = yield Exchange(hcom, (torch.cat(columns),), (rows, rows), ranks=world_size)
    return torch.cat([given[0] for given in everyone.parts])


def _quantised_rows(
    rows: torch.Tensor, smooth: torch.Tensor | None, target: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows in the quantised dtype, scales [m])``."""
    wide = rows.to(compute_dtype(rows))
    wide = wide if smooth is None else wide * smooth.to(wide.dtype)
    largest = wide.abs().amax(1)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / largest_of(target))
    return round_to(target, wide / scale.unsqueeze(1)), scale


def _quantised_dtype(code: int | None, x2: torch.Tensor) -> torch.dtype:
    """What the rows become: int8 where ``x2`` is, else an 8-bit float."""
    target = torch.float8_e5m2 if code is None else dtype_of(code, _BEFORE, "x1_quant_dtype")
    allowed = (torch.int8,) if x2.dtype == torch.int8 else (torch.float8_e5m2, torch.float8_e4m3fn)
    if target not in allowed:
        raise refused(_BEFORE, "x1_quant_dtype", code, f"{' or '.join(map(str, allowed))} where x2 is {x2.dtype}")
    return target


def _check_dynamic(
    x1: torch.Tensor, x2: torch.Tensor, x1_scale: torch.Tensor | None, x2_scale: torch.Tensor | None, world_size: int
) -> None:
    """Raise for factors of mode 7 that do not fit."""
    k, whole = x1.shape[1] * world_size, x2.dtype == torch.int8
    if x1.dtype not in {*HALVES, torch.float64}:
        raise refused(_BEFORE, "x1", x1.dtype, "float16 or bfloat16, which mode 7 quantises")
    if x2.shape[0] != k:
        raise refused(_BEFORE, "x2's first dimension", x2.shape[0], f"{k}")
    if whole and k % 16:
        raise refused(_BEFORE, "x2's first dimension", k, "a multiple of 16 where x2 is int8")
    check_shape(_BEFORE, "x2_scale", x2_scale, (x2.shape[1],))
    if x1_scale is None:
        return
    if not whole:
        raise refused(_BEFORE, "x1_scale", "a tensor", "None where the rows become 8-bit floats")
    check_shape(_BEFORE, "x1_scale", x1_scale, (k,))
    if x1_scale.dtype != x1.dtype:
        raise refused(_BEFORE, "x1_scale", x1_scale.dtype, f"{x1.dtype}, as x1 is")


@Operator(
    name="npu::npu_all_to_all_quant_matmul",
    source="operator documentation of torch_npu.npu_all_to_all_quant_matmul; "
    "CANN operator documentation, aclnnAlltoAllQuantMatmul; op-plugin's test of it",
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randn(4, 8).half(), _eights(16, 6), "group", 2, bias=torch.randn(6), x2_scale=torch.rand(6)),
        lambda: call(
            torch.randn(4, 8).half(), _small(16, 6), "group", 2, x1_scale=torch.rand(16).half(), x2_scale=torch.rand(6),
            bias=torch.randn(6), x1_quant_dtype=torch.int8, y_dtype=torch.float16, all2all_out_flag=False,
        ),
    ),
)  # fmt: skip
def npu_all_to_all_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    all2all_out_flag: bool = True,
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    common_scale: torch.Tensor | None = None,
    x1_offset: torch.Tensor | None = None,
    x2_offset: torch.Tensor | None = None,
    x1_quant_mode: int | None = None,
    x2_quant_mode: int | None = None,
    common_quant_mode: int | None = None,
    group_sizes: Sequence[int] | None = None,
    all2all_axes: Sequence[int] | None = None,
    comm_quant_dtype: int | None = None,
    x1_quant_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
    output_scale_dtype: int | None = None,
    comm_scale_dtype: int | None = None,
    y_dtype: int | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """``(out [m / world_size, n], permuted [m / world_size, k * world_size])``. x1: [m, k]; x2: [k * world_size, n]; bias: [n]."""
    check_ranks(_BEFORE, world_size, _SIZES)
    check_reserved(
        _BEFORE, common_scale=common_scale, x1_offset=x1_offset, x2_offset=x2_offset, common_quant_mode=common_quant_mode,
        comm_quant_dtype=comm_quant_dtype, output_scale_dtype=output_scale_dtype, comm_scale_dtype=comm_scale_dtype,
    )  # fmt: skip
    check_way(_BEFORE, comm_mode)
    check_no_int4(_BEFORE, x1_dtype=x1_dtype, x2_dtype=x2_dtype, x1=x1.dtype, x2=x2.dtype)
    _check_sizes(_BEFORE, (x1, x2), all2all_axes, [-2, -1])
    in_blocks = _check_modes(_BEFORE, (x1_quant_mode, x2_quant_mode), _DYNAMIC)
    whole = x2.dtype == torch.int8 and not in_blocks
    target = _target(_BEFORE, y_dtype, whole=whole)
    codes, scale_codes = (x1_dtype, x2_dtype), (x1_scale_dtype, x2_scale_dtype)
    _check_bias(_BEFORE, bias, x2.shape[1], (target, torch.float32) if whole else (torch.float32,))
    if x1.shape[0] % world_size:
        raise refused(_BEFORE, "the number of rows", x1.shape[0], f"a multiple of world_size, {world_size}")
    if in_blocks:
        _check_blocks(_BEFORE, (x1, x2), codes, (x1_scale, x2_scale), scale_codes, world_size)
        check_groups(_BEFORE, "group_sizes", group_sizes, MX_GROUPS)
    else:
        _check_dynamic(x1, x2, x1_scale, x2_scale, world_size)
        quantised = _quantised_dtype(x1_quant_dtype, x2)
    rows = [x1.shape[0] // world_size] * world_size
    moved = (x1, x1_scale) if in_blocks and x1_scale is not None else (x1,)
    everyone: Ranks = yield Exchange(hcom, moved, (rows, rows), ranks=world_size)
    permuted = torch.cat([given[0] for given in everyone.parts], 1)
    assert x2_scale is not None  # noqa: S101 - the checks see to it
    if in_blocks:
        scale = torch.cat([given[1] for given in everyone.parts], 1)
        out = _of_blocks(_BEFORE, (permuted, x2), codes, (scale, x2_scale), bias)
    else:
        left, scale = _quantised_rows(permuted, x1_scale, quantised)
        out = token_product(_BEFORE, (left, x2), (scale, x2_scale), bias)
    return in_dtype(out, target), permuted if all2all_out_flag else None
