"""Products of groups of rows with a matrix each, weighted and added up for each token, with a shared expert's result.

Formula (operator documentation of ``torch_npu.npu_grouped_matmul_finalize_routing``; order of the terms from op-plugin's golden)::

    y[r]                  = (x[r] @ w * scale + bias) * pertoken_scale[r]             of the group of row r; int32 bias before scale
    int8 x with int4 w:     y[r] = ((x[r] - 8) @ (w * scale) + x[r] @ offset + bias) * pertoken_scale[r]
    out[t]                = sum over the rows r with row_index[r] = t of logit[r] * y[r]
    out[shared_input_offset + j] += shared_input_weight * shared_input[j]

Not covered: 8-bit and 4-bit floating operands (the dtype arguments).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._grouped import COUNTS, Factors, multiplied, spans
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_grouped_matmul_finalize_routing"


@Operator(
    name="npu::npu_grouped_matmul_finalize_routing",
    source="operator documentation of torch_npu.npu_grouped_matmul_finalize_routing",
    dtypes=(torch.float32,),
    examples=(
        lambda: call(
            torch.randint(-8, 8, (4, 16)).to(torch.int8),
            torch.randint(-8, 8, (2, 16, 8)).to(torch.int8),
            torch.tensor([1, 3]),
            scale=torch.rand(2, 8),
            pertoken_scale=torch.rand(4),
            shared_input=torch.randn(1, 8).bfloat16(),
            logit=torch.rand(4),
            row_index=torch.tensor([0, 1, 0, 1]),
            shared_input_offset=1,
            output_bs=2,
        ),
    ),
)
def npu_grouped_matmul_finalize_routing(
    x: torch.Tensor,
    w: torch.Tensor,
    group_list: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    shared_input: torch.Tensor | None = None,
    logit: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    shared_input_weight: float | None = 1.0,
    shared_input_offset: int | None = 0,
    output_bs: int | None = 0,
    group_list_type: int | None = 1,
    tuning_config: Sequence[int] | None = None,
    x_dtype: int | None = None,
    w_dtype: int | None = None,
    scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
) -> torch.Tensor:
    """[output_bs or m, n] float32. x: [m, k] int8; w: [groups, k, n] int8, or int32 [groups, k, n / 8] with packed int4.

    scale: [groups, n], or [groups, parts, n] with int4; pertoken_scale, logit, row_index: [m]; shared_input: [rows, n].
    """
    for name, value in (
        ("x_dtype", x_dtype),
        ("w_dtype", w_dtype),
        ("scale_dtype", scale_dtype),
        ("pertoken_scale_dtype", pertoken_scale_dtype),
    ):
        if value is not None:
            raise unsupported(_NAME, name, value, "None")
    if dtype is not None and dtype_of(dtype, _NAME, "dtype") != torch.float32:
        raise unsupported(_NAME, "dtype", dtype, "float32")
    if x.dtype != torch.int8 or w.dtype not in {torch.int8, torch.int32} or w.dim() != 3:
        raise unsupported(
            _NAME, "x and w", (x.dtype, w.dtype, w.dim()), "int8 x, and w [groups, k, n] of int8 or packed int4"
        )
    wide = compute_dtype(scale, pertoken_scale, logit, shared_input)
    n = w.shape[-1] * (8 if w.dtype == torch.int32 else 1)
    y = torch.zeros(x.shape[0], n, dtype=wide)
    kind = COUNTS if group_list_type is None else group_list_type
    for group, start, end in spans(_NAME, group_list, kind, x.shape[0], w.shape[0]):
        rows = x[start:end]
        each = multiplied(rows, Factors(w[group], *(None if t is None else t[group] for t in (bias, scale)))).to(wide)
        if offset is not None:
            parts = rows.to(wide).reshape(rows.shape[0], offset.shape[1], -1).sum(-1)
            each = each + parts @ offset[group].to(wide)
        y[start:end] = each if pertoken_scale is None else each * pertoken_scale.to(wide).reshape(-1, 1)[start:end]
    if logit is not None:
        y = y * logit.to(wide).unsqueeze(1)
    out = torch.zeros(output_bs or x.shape[0], n, dtype=wide)
    out = out.index_add_(0, row_index.long(), y) if row_index is not None else y
    if shared_input is not None:
        first = shared_input_offset or 0
        weight = 1.0 if shared_input_weight is None else shared_input_weight
        out[first : first + shared_input.shape[0]] += weight * shared_input.to(wide)
    return out
