"""Quantised products of groups of rows with a matrix each, SwiGLU, and dynamic quantisation to int8.

Formula (operator documentation of ``torch_npu.npu_grouped_matmul_swiglu_quant_v2``), for the rows of group i::

    c         = (x @ weight) * weight_scale * x_scale
    int8 x with int4 weight:   c = ((x - 8) @ (weight * weight_scale) + assist) * x_scale
    act, gate = c split in halves
    s         = act * sigmoid(act) * gate * smooth_scale
    scale     = max(abs(s)) / 127 of each row;   out = round(s / scale)

``assist`` is ``weight_assist_matrix``, and ``bias`` in the first version. Rows behind the last group are 0.

Not covered: weights in the cube unit's own order (five dimensions): give them in the order of [groups, k, n]; 8-bit and 4-bit
floating operands and outputs; ``offset``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._grouped import Factors, multiplied, spans
from npugraph_ex.operators._precision import compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._routing import dynamic_quotient
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_grouped_matmul_swiglu_quant"
_V2 = f"{_NAME}_v2"


def _quotients(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    groups: tuple[torch.Tensor, int | None],
    assist: torch.Tensor | None = None,
    smooth: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(s / scale [m, n / 2], scale [m])``; ``scales`` are those of weight and x, ``groups`` the list and its type."""
    if weight.dim() != 3:
        raise unsupported(name, "weight", f"a tensor of {weight.dim()} dimensions", "tensors [groups, k, n]")
    if x.dtype not in {torch.int8, torch.int32} or weight.dtype not in {torch.int8, torch.int32}:
        raise unsupported(name, "x and weight", (x.dtype, weight.dtype), "int8, and int32 with packed int4")
    weight_scale, x_scale = scales
    wide = compute_dtype(weight_scale, x_scale)
    n = weight_scale.shape[-1]
    out = torch.zeros(x.shape[0], n // 2, dtype=wide)
    scale = torch.zeros(x.shape[0], dtype=wide)
    for group, start, end in spans(name, groups[0], groups[1], x.shape[0], weight.shape[0]):
        factors = Factors(
            weight[group],
            None if assist is None else assist[group],
            weight_scale[group],
            None,
            x_scale.reshape(-1)[start:end],
        )
        act, gate = multiplied(x[start:end], factors).chunk(2, -1)
        s = torch.nn.functional.silu(act) * gate
        s = s if smooth is None else s * smooth[group].to(wide)
        out[start:end], scale[start:end] = dynamic_quotient(s.to(wide))
    return out, scale


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_grouped_matmul_swiglu_quant",
    source="operator documentation of torch_npu.npu_grouped_matmul_swiglu_quant_v2",
    examples=(lambda: call(_small(5, 16), _small(2, 16, 8), torch.tensor([2, 5]), torch.rand(2, 8), torch.rand(5)),),
)
def npu_grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out int8 [m, n / 2], scale float32 [m], an unwritten number, 0 here)``.

    x: [m, k] int8; weight: [groups, k, n] int8, or int32 [groups, k, n / 8] with packed int4; group_list: [groups], the ends;
    weight_scale: [groups, n] or [groups, parts, n], float32 or int64 with its bits; x_scale: [m] float32; bias: [groups, n].
    """
    if offset is not None:
        raise unsupported(_NAME, "offset", "a tensor", "None")
    out, scale = _quotients(_NAME, x, weight, (weight_scale, x_scale), (group_list, 0), bias)
    return round_to_int8(out), scale, scale.new_zeros(())


@Operator(
    name="npu::npu_grouped_matmul_swiglu_quant_v2",
    source="operator documentation of torch_npu.npu_grouped_matmul_swiglu_quant_v2",
    examples=(
        lambda: call(
            _small(5, 16), [_small(2, 16, 8)], [torch.rand(2, 8)], torch.rand(5), torch.tensor([2, 3]), group_list_type=1
        ),
        lambda: call(
            _small(5, 16), [torch.randint(-(2**31), 2**31, (2, 16, 1)).int()], [torch.rand(2, 2, 8)], torch.rand(5),
            torch.tensor([2, 4]), weight_assist_matrix=[torch.randn(2, 8)],
        ),
    ),
)  # fmt: skip
def npu_grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    smooth_scale: torch.Tensor | None = None,
    weight_assist_matrix: Sequence[torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 6,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 1,
    group_list_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    weight_scale_dtype: int | None = None,
    x_scale_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out int8 [m, n / 2], scale float32 [m])``. x: also int32 with packed int4; smooth_scale: [groups, n / 2] or [groups]."""
    for name, value, only in (
        ("bias", bias, None),
        ("quant_mode", quant_mode, 0),
        ("x_dtype", x_dtype, None),
        ("weight_dtype", weight_dtype, None),
        ("weight_scale_dtype", weight_scale_dtype, None),
        ("x_scale_dtype", x_scale_dtype, None),
    ):
        if value is not None and value != only:
            raise unsupported(_V2, name, "a tensor" if isinstance(value, torch.Tensor) else value, repr(only))
    if dequant_mode not in {0, 1} or dtype_of(quant_dtype or 1, _V2, "quant_dtype") != torch.int8:
        raise unsupported(_V2, "dequant_mode", dequant_mode, "0 and 1, with an int8 quant_dtype")
    if len(weight) != 1 or len(weight_scale) != 1:
        raise unsupported(_V2, "weight", f"a list of {len(weight)} tensors", "one tensor, and one weight_scale")
    assist = weight_assist_matrix[0] if weight_assist_matrix else None
    scales, groups = (weight_scale[0], x_scale), (group_list, group_list_type)
    smooth = None if smooth_scale is None else smooth_scale.reshape(weight[0].shape[0], -1)
    out, scale = _quotients(_V2, x, weight[0], scales, groups, assist, smooth)
    return round_to_int8(out), scale
