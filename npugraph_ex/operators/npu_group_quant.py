"""Static quantisation of rows in groups, each with scales of its own.

Formula (operator documentation of ``torch_npu.npu_group_quant``)::

    y = round(x * scale[g] + offset)                half to even, saturated

for the rows from ``group_index[g - 1]`` to ``group_index[g]``. Int4 (``torch.quint4x2``) is packed, eight in one int32.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._groups import Groups
from npugraph_ex.operators._int4 import INT4, pack
from npugraph_ex.operators._precision import FLOATS, compute_dtype, round_to, round_to_int8, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_group_quant"


def before_rounding(
    x: torch.Tensor,
    scale: torch.Tensor,
    group_index: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    dst_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What the operator rounds: float32, or float64 for float64 inputs."""
    if dst_dtype not in {None, torch.int8, torch.qint8, 1, 12, *INT4}:
        raise unsupported(_NAME, "dst_dtype", dst_dtype, "None, torch.int8, torch.qint8 and torch.quint4x2")
    if x.dim() != 2 or scale.dim() != 2 or scale.shape[1] != x.shape[1]:
        raise ValueError(
            f"{_NAME}: x must be [S, H] and scale [E, H]; their shapes are {tuple(x.shape)} and {tuple(scale.shape)}."
        )
    dtype = compute_dtype(x, scale, offset)
    groups = Groups(group_index, x.shape[0], counts=False)
    wide = x.to(dtype) * groups.of_each_row("scale", scale.to(dtype))
    return wide if offset is None else wide + offset.to(dtype)


@Operator(
    name="npu::npu_group_quant",
    source="operator documentation of torch_npu.npu_group_quant",
    dtypes=FLOATS,
    before_rounding=before_rounding,
    examples=(lambda: call(torch.randn(4, 16).half(), torch.rand(2, 16), torch.tensor([1, 4]), offset=torch.ones(1)),),
)
def npu_group_quant(
    x: torch.Tensor,
    scale: torch.Tensor,
    group_index: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    dst_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Like ``x`` [S, H], int8, or int32 [S, H / 8] for int4; scale [E, H], group_index [E], offset [1]."""
    quotient = before_rounding(x, scale, group_index, offset=offset, dst_dtype=dst_dtype)
    if dst_dtype in INT4:
        return pack(_NAME, round_to(torch.int8, quotient))
    return stored_like(x, round_to_int8(quotient), torch.int8)
