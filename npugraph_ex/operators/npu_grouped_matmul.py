"""Products of groups of rows with a matrix each, as a mixture of experts needs them.

Formula (operator documentation of ``torch_npu.npu_grouped_matmul``)::

    group_type -1 (no split):    y_i = x_i @ weight_i (+ bias_i)
    group_type  0 (rows split):  the rows of x fall into consecutive groups;  y[rows of i] = x[rows of i] @ weight_i (+ bias_i)

``group_list`` tells the groups: cumulative ends (``group_list_type`` 0) or sizes (1). Rows behind the last group are 0.
``split_item`` 0 gives a list with one output for each x; 2 and 3 give one tensor for all.
Not covered: quantised and anti-quantised operands, activations, ``group_type`` 2, ``split_item`` 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_grouped_matmul"


@Operator(
    name="npu::npu_grouped_matmul",
    source="operator documentation of torch_npu.npu_grouped_matmul",
    examples=(
        lambda: call(
            [torch.randn(4, 8).half()],
            [torch.randn(2, 8, 5).half()],
            group_list=torch.tensor([1, 4]),
            group_type=0,
            split_item=3,
        ),
    ),
)
def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    scale: Sequence[torch.Tensor] | None = None,
    offset: Sequence[torch.Tensor] | None = None,
    antiquant_scale: Sequence[torch.Tensor] | None = None,
    antiquant_offset: Sequence[torch.Tensor] | None = None,
    per_token_scale: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    activation_input: Sequence[torch.Tensor] | None = None,
    activation_quant_scale: Sequence[torch.Tensor] | None = None,
    activation_quant_offset: Sequence[torch.Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:
    """x: [m_i, k] each, or one [m, k]; weight: [k, n] each, or one [groups, k, n]; bias: [n] each, or one [groups, n]."""
    _refuse(
        act_type=act_type or None,
        output_dtype=output_dtype,
        scale=scale,
        offset=offset,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        per_token_scale=per_token_scale,
        activation_input=activation_input,
        activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        scale_dtype=scale_dtype,
        per_token_scale_dtype=per_token_scale_dtype,
    )
    for name, operands in (("x", x), ("weight", weight)):
        if not all(operand.is_floating_point() for operand in operands):
            raise unsupported(_NAME, name, operands[0].dtype, "floating-point tensors")
    matrices = list(weight[0].unbind()) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    vectors = list(bias[0].unbind()) if bias and len(bias) == 1 and bias[0].dim() == 2 else list(bias or ())
    pieces = _pieces(x, group_list, group_type, group_list_type, len(matrices))
    products = [_product(piece, matrices[i], vectors[i] if vectors else None) for i, piece in enumerate(pieces)]
    if split_item == 0:
        if group_type == 0:
            raise unsupported(_NAME, "split_item", split_item, "2 and 3 where group_type is 0")
        return products
    if split_item not in {2, 3}:
        raise unsupported(_NAME, "split_item", split_item, "0, 2 and 3")
    whole = products[0].new_zeros((sum(part.shape[0] for part in x), matrices[0].shape[-1]))
    joined = torch.cat(products)
    whole[: joined.shape[0]] = joined
    return [whole]


def _refuse(**only_none: object) -> None:
    for name, value in only_none.items():
        if value is not None:
            raise unsupported(_NAME, name, value if isinstance(value, int) else "tensors", "None")


def _pieces(
    x: Sequence[torch.Tensor], group_list: torch.Tensor | None, group_type: int | None, kind: int | None, groups: int
) -> list[torch.Tensor]:
    """The rows of each group."""
    if group_type == -1:
        return list(x)
    if group_type != 0:
        raise unsupported(_NAME, "group_type", group_type, "-1 and 0")
    if len(x) > 1:
        return list(x)
    if group_list is None or kind not in {0, 1}:
        raise unsupported(_NAME, "group_list_type", kind, "0 and 1, with a group_list")
    given = group_list.tolist()
    if len(given) != groups:
        raise ValueError(f"{_NAME}: there are {groups} weights, but group_list has {len(given)} entries.")
    ends = given if kind == 0 else torch.cumsum(group_list, 0).tolist()
    if any(later < earlier for earlier, later in zip([0, *ends], ends, strict=False)) or ends[-1] > x[0].shape[0]:
        raise ValueError(f"{_NAME}: group_list must tell groups of the {x[0].shape[0]} rows of x; it is {given}.")
    return [x[0][start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _product(rows: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor | None) -> torch.Tensor:
    dtype = compute_dtype(rows, matrix)
    product = rows.to(dtype) @ matrix.to(dtype)
    if vector is not None:
        product = product + vector.to(dtype)
    return product.to(rows.dtype)
