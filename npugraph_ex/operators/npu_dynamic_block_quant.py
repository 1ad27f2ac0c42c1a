"""Dynamic quantisation of blocks, each with a scale of its own.

Formula (CANN operator documentation, aclnnDynamicBlockQuant)::

    scale = min(max(abs(block)) / DTYPE_MAX, 1 / min_scale)         127 for int8, 448 and 57344 for the 8-bit floats
    y     = round(x / scale)                                        half to even, saturated

A block has ``row_block_size`` rows and ``col_block_size`` columns of the last two dimensions; the last ones may be smaller. A block
of zeros quantises to zeros. Not covered: hifloat8, rounding other than ``rint``, and a maximum of one's own.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import HALVES, compute_dtype, largest_of, refused, round_to, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_dynamic_block_quant"
_OUTPUTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _target(x: torch.Tensor, round_mode: str, dst_type: int | torch.dtype, dst_type_max: float) -> torch.dtype:
    """The dtype of the output; raises for what the device refuses or the formula does not cover."""
    if x.dim() not in {2, 3}:
        raise refused(_NAME, "x", tuple(x.shape), "of 2 or 3 dimensions")
    if round_mode != "rint":
        raise unsupported(_NAME, "round_mode", round_mode, "'rint'")
    if dst_type_max != 0.0:
        raise unsupported(_NAME, "dst_type_max", dst_type_max, "0.0")
    target = dtype_of(dst_type, _NAME, "dst_type")
    if target not in _OUTPUTS:
        raise unsupported(_NAME, "dst_type", dst_type, ", ".join(map(str, _OUTPUTS)))
    return target


def _blocks(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``x`` [..., M, N] as [..., M / rows, rows, N / columns, columns], filled up with zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    blocks: torch.Tensor = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return blocks


def before_rounding(
    x: torch.Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(x / scale, scale)``, both float32, or float64 for float64 inputs."""
    target = _target(x, round_mode, dst_type, dst_type_max)
    blocks = _blocks(x.to(compute_dtype(x)), row_block_size, col_block_size)
    scale = blocks.abs().amax((-3, -1), keepdim=True) / largest_of(target)
    if min_scale > 0:
        scale = scale.clamp(max=1 / min_scale)
    quotient = torch.where(scale == 0, 0.0, blocks / scale).flatten(-2).flatten(-3, -2)
    return quotient[..., : x.shape[-2], : x.shape[-1]].contiguous(), scale.squeeze(-1).squeeze(-2).contiguous()


@Operator(
    name="npu::npu_dynamic_block_quant",
    source="CANN operator documentation, aclnnDynamicBlockQuant",
    dtypes=HALVES,
    before_rounding=before_rounding,
    examples=(
        lambda: call(torch.randn(3, 200).half()),
        lambda: call(torch.randn(2, 5, 70).bfloat16(), dst_type=24, row_block_size=2, col_block_size=32),
    ),
)
def npu_dynamic_block_quant(
    x: torch.Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)``, contiguous: y of the shape of ``x`` and 8 bits; scale float32, a number for each block."""
    target = _target(x, round_mode, dst_type, dst_type_max)
    quotient, scale = before_rounding(
        x,
        min_scale=min_scale,
        round_mode=round_mode,
        dst_type=dst_type,
        row_block_size=row_block_size,
        col_block_size=col_block_size,
        dst_type_max=dst_type_max,
    )
    return round_to(target, quotient), scale
