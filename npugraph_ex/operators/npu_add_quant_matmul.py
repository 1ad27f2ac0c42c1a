"""Adds the product of a transposed 8-bit floating matrix and another one, scaled, to a float32 tensor.

Formula (operator documentation of ``torch_npu.npu_add_quant_matmul_``)::

    out = input + x1^T @ x2 * x1_scale * x2_scale

The scales are single numbers, or powers of two for each 32 elements along K, of shapes (K / 64, M, 2) and (K / 64, N, 2):
float8_e8m0fnu, or 8 bits with ``x1_scale_dtype`` and ``x2_scale_dtype``. ``x1_dtype`` and ``x2_dtype`` name hifloat8 in uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._floating_products import eight_bits
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_NAME = "npu_add_quant_matmul"
_SOURCE = "operator documentation of torch_npu.npu_add_quant_matmul_"
_BLOCK = 32


def _of_blocks(scale: torch.Tensor, dtype: int | None, k: int, wide: torch.dtype) -> torch.Tensor:
    """Scales (K / 64, N, 2) of blocks along K, one for each element: (k, N)."""
    if dtype is not None and scale.dtype in {torch.uint8, torch.int8}:
        scale = scale.view(torch.float8_e8m0fnu)
    if not scale.is_floating_point():
        raise unsupported(_NAME, "x2_scale", scale.dtype, "floating-point tensors, and 8 bits with their dtype")
    return scale.to(wide).transpose(1, 2).flatten(0, 1).repeat_interleave(_BLOCK, 0)[:k]


def _example() -> Call:
    x1, x2 = (torch.randint(-8, 8, size).to(torch.float8_e5m2) for size in ((16, 3), (16, 4)))
    return call(torch.randn(3, 4), x1, x2, torch.rand(1), x1_scale=torch.rand(1))


_CODES: dict[str, tuple[object, ...]] = dict.fromkeys(("x1_scale_dtype", "x2_scale_dtype"), (None, 44, 293))


@Operator(
    name="npu::npu_add_quant_matmul", source=_SOURCE, covers=_CODES, dtypes=(torch.float32,), examples=(_example,)
)
def npu_add_quant_matmul(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x1: torch.Tensor,
    x2: torch.Tensor,
    x2_scale: torch.Tensor,
    *,
    x1_scale: torch.Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
) -> torch.Tensor:
    """(M, N) float32 like input. x1: (K, M), x2: (K, N), float8_e4m3fn, float8_e5m2 or hifloat8."""
    wide = compute_dtype(input, x1_scale, x2_scale)
    left, right = eight_bits(_NAME, (x1, x2), (x1_dtype, x2_dtype), wide)
    k = x1.shape[0]
    factor = torch.ones((), dtype=wide)
    if x1_scale is not None and x1_scale.dim() == 3:
        left = left * _of_blocks(x1_scale, x1_scale_dtype, k, wide)
    elif x1_scale is not None:
        factor = factor * x1_scale.to(wide)
    if x2_scale.dim() == 3:
        right = right * _of_blocks(x2_scale, x2_scale_dtype, k, wide)
    else:
        factor = factor * x2_scale.to(wide)
    return (input.to(wide) + left.t() @ right * factor).to(input.dtype)


@Operator(
    name="npu::npu_add_quant_matmul_", source=_SOURCE, covers=_CODES, dtypes=(torch.float32,), examples=(_example,)
)
def npu_add_quant_matmul_(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x1: torch.Tensor,
    x2: torch.Tensor,
    x2_scale: torch.Tensor,
    *,
    x1_scale: torch.Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
) -> torch.Tensor:
    """The same in place."""
    return input.copy_(
        npu_add_quant_matmul(
            input, x1, x2, x2_scale, x1_scale=x1_scale, group_sizes=group_sizes, x1_dtype=x1_dtype, x2_dtype=x2_dtype,
            x1_scale_dtype=x1_scale_dtype, x2_scale_dtype=x2_scale_dtype,
        )
    )  # fmt: skip
