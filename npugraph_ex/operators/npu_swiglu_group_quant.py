"""SwiGLU activation of a mixture's tokens, weighted, cut off, and quantised to HiFloat8 with one scale for each group of rows.

Formula (CANN operator documentation, aclnnSwigluGroupQuant), with A and B the halves of the last dimension of x::

    a = min(A, clamp_limit),  b = min(max(B, -clamp_limit), clamp_limit)      a = A and b = B where clamp_limit is -1
    y_origin = silu(a) * b * weight                                           without weight where there is none
    quant_mode 2:  y = hifloat8(y_origin * scale)                             a given factor for each group
    quant_mode 3:  y = hifloat8(y_origin / y_scale),  y_scale = max(max(abs(y_origin)), 1e-8) / dst_type_max

``group_index`` counts the rows of each group; without it all rows are one group. A group ends at the last row. Rows behind the
last group are not computed on the device; they are 0 here. The smallest magnitude, 1e-8, is from op-plugin's golden.
"""

from __future__ import annotations

import itertools

import torch

from npugraph_ex.operators._hifloat8 import encode
from npugraph_ex.operators._precision import FLOATS, compute_dtype, refused
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_swiglu_group_quant"
_STATIC, _DYNAMIC = 2, 3
_SMALLEST = 1e-8


def _groups(group_index: torch.Tensor | None, rows: int) -> list[tuple[int, int]]:
    """The first row of each group, and the one behind its last."""
    counts = [rows] if group_index is None else group_index.tolist()
    ends = [min(end, rows) for end in itertools.accumulate(counts, initial=0)]
    return list(itertools.pairwise(ends))


def _activated(x: torch.Tensor, weight: torch.Tensor | None, clamp_limit: float) -> torch.Tensor:
    """``y_origin`` of all rows, [rows, H], in the precision of the computation."""
    dtype = compute_dtype(x, weight)
    a, b = x.to(dtype).reshape(-1, x.shape[-1]).chunk(2, -1)
    if clamp_limit > 0:
        a, b = a.clamp(max=clamp_limit), b.clamp(-clamp_limit, clamp_limit)
    swiglu = torch.nn.functional.silu(a) * b
    return swiglu if weight is None else swiglu * weight.to(dtype).reshape(-1, 1)


@Operator(
    name=f"npu::{_NAME}",
    source="CANN operator documentation, aclnnSwigluGroupQuant",
    absent_on=("A2", "A3"),
    dtypes=FLOATS,
    examples=(
        lambda: call(torch.randn(4, 16).half(), quant_mode=3, output_origin=True),
        lambda: call(
            torch.randn(5, 16),
            weight=torch.rand(5),
            group_index=torch.tensor([2, 1]),
            quant_mode=3,
            clamp_limit=0.5,
            output_origin=True,
        ),
        lambda: call(
            torch.randn(5, 16),
            group_index=torch.tensor([2, 3]),
            scale=torch.tensor([2.0, 4.0]),
            quant_mode=2,
            output_origin=True,
        ),
    ),
)
def npu_swiglu_group_quant(
    x: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dst_type: int = 291,
    quant_mode: int = 0,
    block_size: int = 0,
    round_scale: bool = False,
    clamp_limit: float = -1.0,
    dst_type_max: float = 15.0,
    output_origin: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, y_scale, y_origin)`` of x [..., 2 H]: uint8 [..., H], float32 [G] or [1], and like x [..., H].

    ``y_scale`` is empty with ``quant_mode`` 2, ``y_origin`` without ``output_origin``. The modes use neither ``dst_type`` nor
    ``block_size`` nor ``round_scale``.
    """
    del dst_type, block_size, round_scale
    if quant_mode not in {_STATIC, _DYNAMIC}:
        raise refused(_NAME, "quant_mode", quant_mode, "2 or 3")
    if x.shape[-1] % 2:
        raise refused(_NAME, "the last dimension of x", x.shape[-1], "even")
    if clamp_limit <= 0 and clamp_limit != -1.0:
        raise refused(_NAME, "clamp_limit", clamp_limit, "positive, or -1 for none")
    origin = _activated(x, weight, clamp_limit)
    groups = _groups(group_index, len(origin))
    if quant_mode == _STATIC and (scale is None or scale.numel() != len(groups)):
        raise refused(
            _NAME, "scale", None if scale is None else tuple(scale.shape), f"[{len(groups)}], a factor for each group"
        )
    quotient, scales = torch.zeros_like(origin), origin.new_empty(0)
    if quant_mode == _DYNAMIC:
        largest = [origin[start:end].abs().amax() if end > start else origin.new_zeros(()) for start, end in groups]
        scales = torch.stack(largest).clamp(min=_SMALLEST) / dst_type_max
    for index, (start, end) in enumerate(groups):
        rows = origin[start:end]
        quotient[start:end] = rows / scales[index] if scale is None or quant_mode == _DYNAMIC else rows * scale[index]
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    kept = torch.where(torch.arange(len(origin)).unsqueeze(-1) < groups[-1][1], origin, 0.0) if output_origin else None
    return (
        encode(quotient, saturate=False).reshape(shape).contiguous(),
        scales.to(torch.float64 if x.dtype == torch.float64 else torch.float32),
        x.new_empty(0) if kept is None else kept.reshape(shape).to(x.dtype).contiguous(),
    )
