"""Quantisation to 8-bit floats with given scales, and the largest magnitude for the scales of the next step.

Formula (CANN operator documentation, aclnnQuantMax and aclnnGroupedQuantMax)::

    y    = x * scale                                rounded half to even, saturated
    amax = max(abs(x))

With ``group_list`` [G], which holds where each group of rows ends, each group has its own scale and maximum, 0 for a group without
rows. hifloat8 rounds ties away from zero (``round``).
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._groups import Groups
from npugraph_ex.operators._hifloat8 import HIFLOAT8, eight_bit
from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_quant_max"
_OUTPUTS = (torch.float8_e5m2, torch.float8_e4m3fn)


@Operator(
    name="npu::npu_quant_max",
    source="CANN operator documentation, aclnnQuantMax and aclnnGroupedQuantMax",
    absent_on=("A2", "A3"),
    dtypes=FLOATS,
    examples=(
        lambda: call(torch.randn(4, 8).half(), torch.tensor([0.5])),
        lambda: call(torch.randn(4, 8), torch.tensor([0.5]), round_mode="round", dst_dtype=290),
        lambda: call(torch.randn(4, 8), torch.tensor([0.5, 2.0, 1.0]), group_list=torch.tensor([1, 1, 4])),
    ),
)
def npu_quant_max(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    round_mode: str = "rint",
    dst_dtype: int = 291,
    group_list: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, amax)``: y like ``x``, of 8 bits; amax [1], or [G], of the dtype of ``x``; scale [1], or [G]."""
    mode = "round" if dst_dtype == HIFLOAT8 else "rint"
    if round_mode != mode:
        raise unsupported(_NAME, "round_mode", round_mode, f"{mode!r} for this dst_dtype")
    target = torch.uint8 if dst_dtype == HIFLOAT8 else dtype_of(dst_dtype, _NAME, "dst_dtype")
    if dst_dtype != HIFLOAT8 and target not in _OUTPUTS:
        raise unsupported(_NAME, "dst_dtype", dst_dtype, ", ".join(map(str, (*_OUTPUTS, HIFLOAT8))))
    wide = x.to(compute_dtype(x, scale))
    if group_list is None:
        y = stored_like(x, eight_bit(target, wide * scale.to(wide.dtype)), target)
        return y, wide.abs().amax().reshape(1).to(x.dtype)
    rows = wide.reshape(x.shape[0], -1)
    groups = Groups(group_list, x.shape[0], counts=False)
    scaled = rows * groups.of_each_row("scale", scale.reshape(-1, 1).to(wide.dtype))
    ends = group_list.long()
    starts = torch.nn.functional.pad(ends[:-1], (1, 0)).unsqueeze(-1)
    row = torch.arange(x.shape[0], device=x.device)
    mine = (row >= starts) & (row < ends.unsqueeze(-1))
    amax = torch.where(mine, rows.abs().amax(-1), 0.0).amax(-1)
    return stored_like(x, eight_bit(target, scaled).reshape(x.shape), target), amax.to(x.dtype)
