"""Adds the products of groups of rows, transposed, to a float32 tensor: the gradient of a grouped product's weight.

Formula (CANN operator documentation, aclnnGroupedMatmulAdd), for the rows of group i::

    y[i] = input[i] + x[rows of i]^T @ weight[rows of i]

Both operators write y to ``input``. The one without the underscore returns a copy, and its schema does not say that it writes.

Not covered: ``transpose_x=False``, ``transpose_weight=True``, ``group_type`` other than 2.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._grouped import spans
from npugraph_ex.operators._precision import HALVES, compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_NAME = "npu_grouped_matmul_add"
_SOURCE = "CANN operator documentation, aclnnGroupedMatmulAdd"
_DTYPES = (torch.float16, torch.bfloat16)


def _example() -> Call:
    return call(torch.randn(2, 3, 4), torch.randn(5, 3).half(), torch.randn(5, 4).half(), torch.tensor([2, 5]))


def _narrow() -> Call:
    made = _example()
    return call(made.args[0].reshape(6, 4), *made.args[1:])


@Operator(
    name="npu::npu_grouped_matmul_add", source=_SOURCE, writes=("input",), dtypes=HALVES, examples=(_example, _narrow)
)
def npu_grouped_matmul_add(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> torch.Tensor:
    """Like input, float32: [groups, m, n] or [groups * m, n]. x: [k, m] and weight: [k, n], float16 or bfloat16."""
    for name, value, only in (
        ("transpose_x", transpose_x, True),
        ("transpose_weight", transpose_weight, False),
        ("group_type", group_type, 2),
    ):
        if value != only:
            raise unsupported(_NAME, name, value, repr(only))
    wide = compute_dtype(input, x, weight)
    groups = group_list.shape[0]
    out = input.to(wide, copy=True).reshape(groups, x.shape[1], weight.shape[1])
    for group, start, end in spans(_NAME, group_list, group_list_type, x.shape[0], groups):
        out[group] += x[start:end].to(wide).t() @ weight[start:end].to(wide)
    return input.copy_(out.reshape(input.shape)).clone()


@Operator(name="npu::npu_grouped_matmul_add_", source=_SOURCE, dtypes=HALVES, examples=(_example,))
def npu_grouped_matmul_add_(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> torch.Tensor:
    """``input`` itself."""
    npu_grouped_matmul_add(
        input, x, weight, group_list, transpose_x=transpose_x, transpose_weight=transpose_weight,
        group_type=group_type, group_list_type=group_list_type,
    )  # fmt: skip
    return input
