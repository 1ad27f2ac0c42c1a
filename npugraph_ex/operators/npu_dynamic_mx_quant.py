"""Quantisation to 8-bit floats with a power of two as scale of each block, the MX formats.

Formula (CANN operator documentation, aclnnDynamicMxQuant, scaleAlg 0)::

    e     = floor(log2(max(abs(block)))) - emax     emax is 8 for float8_e4m3fn, 15 for float8_e5m2
    y     = input / 2^e                             rounded half to even, saturated
    scale = e + 127, as a byte (E8M0)               0 for a block of zeros

A block is ``block_size`` elements along ``axis``; the last may be shorter. Scales come in pairs of neighbouring blocks; one that
fills up a pair is 0. Not covered: the 4-bit floats, ``scale_alg`` 1 and 2, a maximum of one's own.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, round_to, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_dynamic_mx_quant"
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_BIAS = 127


def covered(operator: str, dst_type: int | torch.dtype, **fixed: object) -> torch.dtype:
    """The dtype of the output; raises for what no formula of an MX format covers, ``fixed`` being arguments at their defaults."""
    for name, value in fixed.items():
        if value not in {None, 0, "rint"}:
            raise unsupported(operator, name, value, "its default")
    target = None if dst_type in {296, 297} else dtype_of(dst_type, operator, "dst_type")
    if target not in _LARGEST_EXPONENT:
        raise unsupported(operator, "dst_type", dst_type, "the 8-bit floats float8_e4m3fn and float8_e5m2")
    return target


@Operator(
    name="npu::npu_dynamic_mx_quant",
    source="CANN operator documentation, aclnnDynamicMxQuant",
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randn(3, 80).half(), dst_type=24),
        lambda: call(torch.randn(2, 70, 3).bfloat16(), axis=1, dst_type=291),
    ),
)
def npu_dynamic_mx_quant(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)``: y like ``input``, of 8 bits; scale uint8, the pairs of blocks along ``axis``, with a last dimension 2."""
    fixed = {
        "round_mode": round_mode,
        "scale_alg": scale_alg,
        "dst_type_max": dst_type_max,
        "max_low_bound": max_low_bound,
    }
    target = covered(_NAME, dst_type, **fixed)
    if block_size <= 0 or block_size % 32 or block_size > 1024:
        raise refused(_NAME, "block_size", block_size, "a multiple of 32 up to 1024")
    return quantised(input, input.to(compute_dtype(input)), axis, target, block_size)


def quantised(
    like: torch.Tensor, x: torch.Tensor, axis: int, target: torch.dtype, block_size: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)`` of ``x``, of the shape of ``like`` and in the precision of the computation; y has the layout of ``like``."""
    size = x.shape[axis]
    wide = x.movedim(axis, -1)
    blocks = torch.nn.functional.pad(wide, (0, -size % (2 * block_size))).unflatten(-1, (-1, block_size))
    largest = blocks.abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(largest)  # the fraction lies in [0.5, 1), so floor(log2) is one less
    shared = (exponent - 1 - _LARGEST_EXPONENT[target]).clamp(-_BIAS, _BIAS)
    y = (blocks * torch.exp2(-shared.to(wide.dtype))).flatten(-2)[..., :size].movedim(-1, axis)
    scale = torch.where(largest == 0, 0, shared + _BIAS).squeeze(-1).to(torch.uint8)
    pairs = scale.unflatten(-1, (-1, 2)).movedim(-2, axis - 1 if axis < 0 else axis)
    return stored_like(like, round_to(target, y), target), pairs.contiguous()
