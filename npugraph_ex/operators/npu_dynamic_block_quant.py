"""Dynamic quantisation of blocks, each with a scale of its own.

Formula (CANN operator documentation, aclnnDynamicBlockQuant)::

    scale = min(max(abs(block)) / DTYPE_MAX, 1 / min_scale)         127 for int8, 448 and 57344 for the 8-bit floats, 32768 or
                                                                    dst_type_max for hifloat8
    y     = round(x / scale)                                        half to even, saturated; hifloat8 away from zero

A block has ``row_block_size`` rows and ``col_block_size`` columns of the last two dimensions; the last ones may be smaller. A block
of zeros quantises to zeros. Not covered: the rounding ``hybrid`` of hifloat8, of whose random half no document gives the numbers.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._hifloat8 import HIFLOAT8, LARGEST, eight_bit, largest_eight_bit
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_dynamic_block_quant"
_OUTPUTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def target_of(
    operator: str, round_mode: str, dst_type: int | torch.dtype, dst_type_max: float
) -> tuple[torch.dtype, float]:
    """The dtype of the output, uint8 for hifloat8, and its largest number.

    Raises for what the device refuses or the formula does not cover.
    """
    hifloat = dst_type == HIFLOAT8
    target = torch.uint8 if hifloat else dtype_of(dst_type, operator, "dst_type")
    if not hifloat and target not in _OUTPUTS:
        raise unsupported(operator, "dst_type", dst_type, f"{', '.join(map(str, _OUTPUTS))}, hifloat8 ({HIFLOAT8})")
    mode = "round" if hifloat else "rint"
    if round_mode != mode:
        raise unsupported(operator, "round_mode", round_mode, f"{mode!r} for this dst_type")
    highest = LARGEST if hifloat else 0.0
    if not 0 <= dst_type_max <= highest:
        raise refused(operator, "dst_type_max", dst_type_max, f"from 0.0 to {highest} for this dst_type")
    return target, dst_type_max or largest_eight_bit(target)


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
    _, highest = target_of(_NAME, round_mode, dst_type, dst_type_max)
    blocks = _blocks(x.to(compute_dtype(x)), row_block_size, col_block_size)
    scale = blocks.abs().amax((-3, -1), keepdim=True) / highest
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
    if x.dim() not in {2, 3}:
        raise refused(_NAME, "x", tuple(x.shape), "of 2 or 3 dimensions")
    quotient, scale = before_rounding(
        x,
        min_scale=min_scale,
        round_mode=round_mode,
        dst_type=dst_type,
        row_block_size=row_block_size,
        col_block_size=col_block_size,
        dst_type_max=dst_type_max,
    )
    return eight_bit(target_of(_NAME, round_mode, dst_type, dst_type_max)[0], quotient), scale
