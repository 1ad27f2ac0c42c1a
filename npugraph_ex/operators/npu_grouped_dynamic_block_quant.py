"""Dynamic quantisation of blocks that begin anew with each group of rows.

Formula (operator documentation of ``torch_npu.npu_grouped_dynamic_block_quant``)::

    scale = min(max(abs(block)) / DTYPE_MAX, 1 / min_scale)         448 and 57344 for the 8-bit floats, 32768 or
                                                                    dst_type_max for hifloat8
    y     = round(x / scale)                                        half to even, saturated; hifloat8 away from zero

``group_list`` has the groups' ends along the last but one dimension. A block has ``row_block_size`` rows of one group and
``col_block_size`` columns; the last ones may be smaller. Not covered: the rounding ``hybrid``.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._hifloat8 import eight_bit
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_dynamic_block_quant import before_rounding, target_of

_NAME = "npu_grouped_dynamic_block_quant"
_ROWS, _COLUMNS = (1, 128, 256, 512), (64, 128, 192, 256)


@Operator(
    name=f"npu::{_NAME}",
    source="operator documentation of torch_npu.npu_grouped_dynamic_block_quant",
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randn(3, 200).half(), torch.tensor([1, 3], dtype=torch.int32)),
        lambda: call(
            torch.randn(2, 200, 70).bfloat16(), torch.tensor([30, 30, 200], dtype=torch.int32), dst_type=292,
            row_block_size=128, col_block_size=64,
        ),
    ),
)  # fmt: skip
def npu_grouped_dynamic_block_quant(
    x: torch.Tensor,
    group_list: torch.Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 291,
    row_block_size: int = 1,
    col_block_size: int = 128,
    group_list_type: int = 0,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)`` of x [..., M, N]: y like it with 8 bits; scale float32 [..., M / row_block_size + G, N / col_block_size].

    The scales of a group begin where no earlier group's can reach; those between them are 0.
    """
    for name, value, allowed in (
        ("row_block_size", row_block_size, _ROWS),
        ("col_block_size", col_block_size, _COLUMNS),
    ):
        if value not in allowed:
            raise refused(_NAME, name, value, f"one of {allowed}")
    if group_list_type != 0:
        raise refused(_NAME, "group_list_type", group_list_type, "0, the groups' ends")
    target, _ = target_of(_NAME, round_mode, dst_type, dst_type_max)
    if target == torch.int8:
        raise unsupported(_NAME, "dst_type", dst_type, "float8_e5m2 (291), float8_e4m3fn (292) and hifloat8 (290)")
    ends = group_list.tolist()
    starts = [0, *ends][: len(ends)]
    rows = x.shape[-2]
    if not ends or ends[-1] != rows or any(a > b for a, b in zip(starts, ends, strict=True)):
        raise refused(_NAME, "group_list", ends, f"ends of groups that do not fall, the last of them {rows}")
    bare = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    sizes = (*x.shape[:-2], rows // row_block_size + len(ends), -(-x.shape[-1] // col_block_size))
    scale = torch.zeros(sizes, dtype=compute_dtype(x), device=x.device)
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        quotient, of_group = before_rounding(
            x[..., start:end, :], min_scale=min_scale, round_mode=round_mode, dst_type=dst_type,
            row_block_size=row_block_size, col_block_size=col_block_size, dst_type_max=dst_type_max,
        )  # fmt: skip
        bare[..., start:end, :] = eight_bit(target, quotient).view(torch.uint8)
        first = start // row_block_size + group
        scale[..., first : first + of_group.shape[-2], :] = of_group
    return bare.view(target), scale
