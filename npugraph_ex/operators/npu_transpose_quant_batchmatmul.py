"""Batched matrix product of 8-bit floating operands, scaled, with a permuted first operand and a permuted result.

Formula (operator documentation of ``torch_npu.npu_transpose_quant_batchmatmul``)::

    a = permute(x1, [1, 0, 2])   (B, M, K);   b = permute(x2, perm_x2)   (B, K, N)
    out = permute(a @ b * x2_scale * x1_scale, [1, 0, 2])                  (M, B, N)

x1_scale is (M) or (1), x2_scale (N). Or both are powers of two (float8_e8m0fnu) for each 32 elements along K, of shapes
(M, B, K / 64, 2) and (B, K / 64, N, 2), or (B, N, K / 64, 2) with perm_x2 [0, 2, 1]. With ``batch_split_factor`` f > 1, out is
(f, M, B * N / f).

``x1_dtype`` and ``x2_dtype`` name hifloat8 in uint8; ``dtype`` may, too. Not covered: ``bias``, which the documentation reserves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._floating_products import eight_bits
from npugraph_ex.operators._hifloat8 import HIFLOAT8, encode
from npugraph_ex.operators._integers import scale_of
from npugraph_ex.operators._precision import compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_transpose_quant_batchmatmul"
_BLOCK = 32
_PERMUTATIONS = {"perm_x1": ([1, 0, 2],), "perm_x2": ([0, 1, 2], [0, 2, 1]), "perm_y": ([1, 0, 2],)}
_OUTPUTS = (torch.float16, torch.bfloat16, torch.float32)


def _order(name: str, given: Sequence[int] | None) -> list[int]:
    order = list(given) if given else _PERMUTATIONS[name][0]
    if order not in _PERMUTATIONS[name]:
        raise refused(_NAME, name, order, " or ".join(map(str, _PERMUTATIONS[name])))
    return order


def _target(dtype: int) -> torch.dtype:
    """The dtype of the result; uint8 for hifloat8."""
    target = torch.uint8 if dtype == HIFLOAT8 else dtype_of(dtype, _NAME, "dtype")
    if dtype != HIFLOAT8 and target not in _OUTPUTS:
        raise unsupported(_NAME, "dtype", target, f"float16, bfloat16, float32 and hifloat8 ({HIFLOAT8})")
    return target


def _of_blocks(scale: torch.Tensor, k: int, wide: torch.dtype) -> torch.Tensor:
    """Scales (..., K / 64, 2) of blocks along K, one for each element: (..., k)."""
    return scale.to(wide).flatten(-2).repeat_interleave(_BLOCK, -1)[..., :k]


def _eighths(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size).to(torch.float8_e4m3fn)


def _example() -> Call:
    permutations = {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}
    x1, x2 = _eighths(3, 2, 16), _eighths(2, 16, 4)
    return call(x1, x2, 15, x1_scale=torch.rand(3), x2_scale=torch.rand(4), **permutations)


@Operator(
    name="npu::npu_transpose_quant_batchmatmul",
    source="operator documentation of torch_npu.npu_transpose_quant_batchmatmul; "
    "CANN operator documentation, aclnnTransposeQuantBatchMatMul",
    absent_on=("A2", "A3"),
    first_factor=0,
    dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
    examples=(_example,),
)
def npu_transpose_quant_batchmatmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    dtype: int,
    *,
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
) -> torch.Tensor:
    """(M, B, N) of ``dtype``: float16, bfloat16, float32 or hifloat8. x1: (M, B, K), x2: (B, K, N) or (B, N, K), of 8 bits."""
    target = _target(dtype)
    if bias is not None:
        raise unsupported(_NAME, "bias", "a tensor", "None")
    wide = compute_dtype(x1_scale, x2_scale)
    factors = eight_bits(_NAME, (x1, x2), (x1_dtype, x2_dtype), wide)
    _order("perm_x1", perm_x1)
    turned = _order("perm_x2", perm_x2) == [0, 2, 1]
    left, right = factors[0], factors[1].mT if turned else factors[1]
    if x1_scale is not None and x1_scale.dim() == 4:
        left = left * _of_blocks(x1_scale, left.shape[-1], wide)
        x1_scale = None
    if x2_scale is not None and x2_scale.dim() == 4:
        rows = x2_scale if turned else x2_scale.transpose(1, 2)
        right = right * _of_blocks(rows, right.shape[1], wide).mT
        x2_scale = None
    out = torch.bmm(left.transpose(0, 1), right).permute(_order("perm_y", perm_y))
    if x2_scale is not None:
        out = out * scale_of(x2_scale).to(wide)
    if x1_scale is not None:
        out = out * scale_of(x1_scale).to(wide).reshape(-1, 1, 1)
    factor = batch_split_factor or 1
    m, batches, n = out.shape
    if factor != 1:
        if factor < 1 or batches % factor:
            raise refused(_NAME, "batch_split_factor", factor, f"a divisor of the {batches} batches")
        out = out.reshape(m, factor, batches * n // factor).transpose(0, 1)
    if target == torch.uint8:
        return encode(out, saturate=True).contiguous()
    return out.to(wide if wide == torch.float64 else target).contiguous()
