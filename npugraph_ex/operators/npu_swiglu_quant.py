"""SwiGLU activation and quantisation to int8 or int4 in one operator.

Formula (CANN operator documentation, aclnnSwiGluQuantV2; operator documentation of ``torch_npu.npu_swiglu_quant``)::

    A, B  = the halves of the last dimension of x; the activated half A is the first with activate_left, else the second
    s     = A * sigmoid(A) * B * smooth_scales      (no factor when there are none)

    quant_mode=1 (dynamic): scale = 127 / row_max(abs(s));  out = round(s * scale)      half to even, saturated; 7 for int4
    quant_mode=0 (static):  out = round(s + offsets);       scale is not computed, here 0

So ``scale`` is what the row is multiplied by, the *reciprocal* of the scale of ``npu_dynamic_quant``. Nothing is rounded before
the quotient, unlike in ``npu_swiglu`` followed by ``npu_dynamic_quant``.

With ``group_index`` [G] the rows of group g take entry g of ``smooth_scales`` and ``offsets``, [G, N] or [G]; without it all
rows take the first. The index holds where each group ends (``group_list_type`` 0) or how many rows it has (1). The device does
not write rows of no group; here they are 0.

Two int4 values lie in one byte, so that out has half as many columns as torch_npu's meta function announces: what op-plugin
allocates.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._groups import Groups
from npugraph_ex.operators._int4 import INT4, INT4_MAX, pack_bytes
from npugraph_ex.operators._precision import (
    FLOATS,
    INT8_MAX,
    compute_dtype,
    refused,
    round_to_int8,
    rounded,
    unsupported,
)
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_swiglu_quant"
_DYNAMIC = 1


def _refuse(x: torch.Tensor, quant_mode: int, group_list_type: int, dst_type: object) -> None:
    """Raise for what the documentation forbids or the formula does not cover."""
    for name, value in (("quant_mode", quant_mode), ("group_list_type", group_list_type)):
        if value not in {0, 1}:
            raise unsupported(_NAME, name, value, "0 and 1")
    int4 = dst_type in INT4
    if not int4 and dst_type is not None and dtype_of(dst_type, _NAME, "dst_type") != torch.int8:  # type: ignore[arg-type]
        raise unsupported(_NAME, "dst_type", dst_type, "None, torch.int8 and torch.quint4x2")
    if int4 and x.shape[-1] % 4:
        raise refused(_NAME, "the last dimension of x", x.shape[-1], "a multiple of 4 for int4")
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ValueError(
            f"{_NAME}: x must have 2 or more dimensions, the last of even size; it has shape {tuple(x.shape)}."
        )


def before_rounding(
    x: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    group_list_type: int = 0,
    dst_type: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(s * scale, scale)``, both float32, or float64 for float64 inputs."""
    _refuse(x, quant_mode, group_list_type, dst_type)
    rows = x.numel() // max(x.shape[-1], 1)
    groups = None if group_index is None else Groups(group_index, rows, counts=group_list_type == 1)

    def of_each_row(name: str, values: torch.Tensor) -> torch.Tensor:
        """One entry a group, [G, N] or [G], as what broadcasts to the rows."""
        wide = values.to(compute_dtype(x, values))
        wide = wide.unsqueeze(-1) if wide.dim() == 1 else wide
        return wide[:1] if groups is None else groups.of_each_row(name, wide)

    first, second = x.to(compute_dtype(x, smooth_scales)).reshape(rows, x.shape[-1]).chunk(2, dim=-1)
    active, other = (first, second) if activate_left else (second, first)
    s = torch.nn.functional.silu(active) * other
    if smooth_scales is not None:
        s = s * of_each_row("smooth_scales", smooth_scales)
    if quant_mode == _DYNAMIC:
        largest = s.abs().amax(dim=-1) if s.shape[-1] else s.new_zeros(rows)
        scale = (INT4_MAX if dst_type in INT4 else INT8_MAX) / largest
        s = s * scale.unsqueeze(-1)
    else:
        scale = s.new_zeros(rows)
        s = s if offsets is None else s + of_each_row("offsets", offsets)
    if groups is not None:
        s = torch.where(groups.inside.unsqueeze(-1), s, 0.0)
        scale = torch.where(groups.inside, scale, 0.0)
    return s.reshape(*x.shape[:-1], -1 if rows else x.shape[-1] // 2), scale.reshape(x.shape[:-1])


def _stored(target: torch.dtype, quotient: torch.Tensor) -> torch.Tensor:
    """``quotient`` rounded; two int4 values in one int8."""
    whole = round_to_int8(quotient).contiguous()
    return pack_bytes(whole).view(torch.int8) if target == torch.quint4x2 else whole


npu_swiglu_quant = Operator(
    name="npu::npu_swiglu_quant",
    dtypes=FLOATS,
    source="CANN operator documentation, aclnnSwiGluQuantV2; operator documentation of torch_npu.npu_swiglu_quant",
    before_rounding=before_rounding,
    synonyms={"dst_type": {1: None}},
    examples=(
        lambda: call(torch.randn(3, 16).half(), activate_left=True, quant_mode=1),
        lambda: call(
            torch.randn(4, 16).half(),
            smooth_scales=torch.rand(2, 8),
            offsets=torch.rand(2, 8),
            group_index=torch.tensor([1, 3], dtype=torch.int32),
        ),
    ),
)(
    rounded(
        before_rounding,
        results=1,
        target=lambda given: torch.quint4x2 if given.get("dst_type") in INT4 else torch.int8,
        store=_stored,
    )
)
"""``(out, scale)``: out int8, half of ``x`` along its last dimension, a quarter with int4; scale float32, without it."""
