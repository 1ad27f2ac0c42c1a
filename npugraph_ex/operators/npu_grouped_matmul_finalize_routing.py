"""Products of groups of rows with a matrix each, weighted and added up for each token, with a shared expert's result.

Formula (operator documentation of ``torch_npu.npu_grouped_matmul_finalize_routing``; order of the terms from op-plugin's golden)::

    y[r]                  = (x[r] @ w * scale + bias) * pertoken_scale[r]             of the group of row r; int32 bias before scale
    int8 x with int4 w:     y[r] = ((x[r] - 8) @ (w * scale) + x[r] @ offset + bias) * pertoken_scale[r]
    out[t]                = sum over the rows r with row_index[r] = t of logit[r] * y[r]
    out[shared_input_offset + j] += shared_input_weight * shared_input[j]

8-bit and 4-bit floating operands, with powers of two of 32 elements or scales of rows and columns: ``_floating_products``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._floating_products import are_small_floats, check_scales, small_product
from npugraph_ex.operators._grouped import COUNTS, Factors, multiplied, spans
from npugraph_ex.operators._precision import compute_dtype, refused, unsupported
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
        lambda: call(
            torch.randint(-8, 8, (4, 16)).to(torch.int8),
            torch.randint(-(2**31), 2**31, (2, 16, 1)).int(),
            torch.tensor([1, 3]),
            scale=torch.rand(2, 1, 8),
            bias=torch.randn(2, 8),
            offset=torch.randn(2, 1, 8),
            pertoken_scale=torch.rand(4),
            logit=torch.rand(4),
            row_index=torch.tensor([0, 1, 0, 1]),
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
    """[output_bs or m, n] float32. x: [m, k] int8; w: [groups, k, n] int8, or int32 [groups, k, n / 8] with packed int4; or floats.

    scale: [groups, n], or [groups, parts, n] with int4; pertoken_scale, logit, row_index: [m]; shared_input: [rows, n]. Of floats
    in blocks: scale [groups, k / 64, n, 2] and pertoken_scale [m, k / 64, 2], bytes.
    """
    check_scales(_NAME, scale_dtype=scale_dtype, pertoken_scale_dtype=pertoken_scale_dtype)
    codes = (x_dtype, w_dtype)
    small = are_small_floats(_NAME, x, w, codes, "w_dtype")
    if dtype is not None and dtype_of(dtype, _NAME, "dtype") != torch.float32:
        raise unsupported(_NAME, "dtype", dtype, "float32")
    if not small and (x.dtype != torch.int8 or w.dtype not in {torch.int8, torch.int32}):
        raise unsupported(
            _NAME, "x and w", (x.dtype, w.dtype), "int8 x with int8 or packed int4 w, and 8-bit and 4-bit floats"
        )
    wide = compute_dtype(scale, pertoken_scale, logit, shared_input)
    n = _columns(w, scale, offset, shared_input, small=small)
    y = torch.zeros(x.shape[0], n, dtype=wide)
    kind = COUNTS if group_list_type is None else group_list_type
    for group, start, end in spans(_NAME, group_list, kind, x.shape[0], w.shape[0]):
        token = None if pertoken_scale is None else pertoken_scale[start:end]
        given = [None if each is None else each[group] for each in (bias, scale, offset)]
        y[start:end] = _product(x[start:end], w[group], token, given, codes if small else None).to(wide)
    if logit is not None:
        y = y * logit.to(wide).unsqueeze(1)
    out = torch.zeros(output_bs or x.shape[0], n, dtype=wide)
    out = out.index_add_(0, row_index.long(), y) if row_index is not None else y
    if shared_input is not None:
        first = shared_input_offset or 0
        weight = 1.0 if shared_input_weight is None else shared_input_weight
        out[first : first + shared_input.shape[0]] += weight * shared_input.to(wide)
    return out


def _product(
    rows: torch.Tensor,
    matrix: torch.Tensor,
    token: torch.Tensor | None,
    given: Sequence[torch.Tensor | None],
    codes: tuple[int | None, int | None] | None,
) -> torch.Tensor:
    """One group's product; ``given`` are its bias, scale and offset, ``codes`` the dtypes of small floats."""
    bias, scale, offset = given
    if codes is not None:
        return small_product(_NAME, (rows, matrix), codes, (token, scale), bias)
    y = multiplied(rows, Factors(matrix, bias, scale))
    if offset is not None:
        wide = compute_dtype(y, offset)
        parts = rows.to(wide).reshape(rows.shape[0], offset.shape[0], -1).sum(-1)
        y = y.to(wide) + parts @ offset.to(wide)
    return y if token is None else y * token.to(compute_dtype(y, token)).reshape(-1, 1)


def _columns(
    w: torch.Tensor,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    shared_input: torch.Tensor | None,
    *,
    small: bool,
) -> int:
    """The columns of the result; ``small`` says that the operands are 8-bit or 4-bit floats."""
    if w.dim() != 3 or (small and (scale is None or offset is not None)):
        raise unsupported(_NAME, "w", w.dim(), "w [groups, k, n]; 8-bit and 4-bit floats with a scale and no offset")
    n = int(w.shape[-1]) * (8 if w.dtype == torch.int32 else 1)
    if small and scale is not None:
        n = int(scale.shape[-2 if scale.element_size() == 1 else -1])
    if shared_input is not None and shared_input.shape[-1] != n:
        raise refused(_NAME, "shared_input", shared_input.shape, f"of {n} columns, as many as the result has")
    return n
