"""Products of groups of rows with a matrix each, as a mixture of experts needs them.

Formula (operator documentation of ``torch_npu.npu_grouped_matmul``), for group i::

    floating:       y = x @ weight + bias
    quantised:      y = (x @ weight + int32 bias) * scale [* per_token_scale] [+ offset], a floating bias added behind
    int4 weight, scale of groups of its rows:    as in ``npu_quant_matmul``
    anti-quantised: y = x @ ((weight + antiquant_offset) * antiquant_scale) + bias
    act_type 1 to 5: relu, gelu by tanh, gelu by erf, fast gelu, silu of y

    group_type -1 (no split):    x, weight and y have one tensor for each group
    group_type  0 (rows split):  the rows of x fall into consecutive groups; rows behind the last one are 0
    group_type  2 (k split):     y[i] = x[:, columns of i] @ weight[rows of i]

``group_list`` has the groups' ends (``group_list_type`` 0), sizes (1), or pairs of a group's number and size (2). ``split_item``
0 and 1 give a tensor for each group, 2 and 3 one for all. An integer y is rounded half to even and saturated.

8-bit and 4-bit floating operands, with powers of two of 32 elements or with scales of tensors, rows and columns:
``_floating_products``. The scale of such a weight is ``scale``, or ``antiquant_scale`` where x has 8 bits and the weight 4.

Not covered: quantised activations, ``split_item`` 0 and 1 of one tensor x, 8-bit and 4-bit floats where k is split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._floating_products import are_small_floats, check_scales, small_product
from npugraph_ex.operators._grouped import Factors, multiplied, of_each, spans
from npugraph_ex.operators._integers import matrix_of
from npugraph_ex.operators._precision import RefusedArgumentError, gelu, refused, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_weight_quant_batchmatmul import antiquantised

_NAME = "npu_grouped_matmul"
_OUTPUTS = (torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _activated(y: torch.Tensor, act_type: int | None) -> torch.Tensor:
    """The activation that ``act_type`` names."""
    if act_type == 1:
        return y.relu()
    if act_type in {2, 3}:
        return gelu(y, "tanh" if act_type == 2 else "none")
    if act_type == 4:
        return y * torch.sigmoid(1.702 * y)
    return torch.nn.functional.silu(y) if act_type == 5 else y


def _stored(y: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    return round_to_int8(y) if target == torch.int8 else y.to(target)


def _halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_grouped_matmul",
    source="operator documentation of torch_npu.npu_grouped_matmul",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(
            [_halves(4, 8)], [_halves(2, 8, 5)], group_list=torch.tensor([1, 4]), split_item=3, group_type=0
        ),
        lambda: call([_halves(4, 8), _halves(2, 3)], [_halves(8, 5), _halves(3, 2)], group_type=-1, act_type=5),
        lambda: call([_halves(3, 8)], [_halves(8, 5)], group_list=torch.tensor([2, 8]), split_item=3, group_type=2),
        lambda: call(
            [_small(4, 16)], [_small(2, 16, 8)], scale=[torch.rand(2, 8)], per_token_scale=[torch.rand(4)],
            group_list=torch.tensor([1, 2]), split_item=3, group_type=0, group_list_type=1, output_dtype=torch.float16,
        ),
    ),
)  # fmt: skip
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
    """x: [m_i, k] each, or one [m, k]; weight: [k, n] each, or one [groups, k, n]; all else as a list or stacked, like weight.

    x: floating or int8; weight: floating, int8, or int32 with eight int4 values each. per_token_scale: [m] or [m, 1] for each x.
    Of 8-bit and 4-bit floats in blocks: per_token_scale [m, k / 64, 2] and scale or antiquant_scale [groups, k / 64, n, 2], bytes.
    """
    check_scales(_NAME, scale_dtype=scale_dtype, per_token_scale_dtype=per_token_scale_dtype)
    _refuse(
        activation_input=activation_input, activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
    )  # fmt: skip
    if not x or not weight:
        raise refused(_NAME, "x and weight", (len(x), len(weight)), "lists with a tensor at least")
    if group_type is None:
        raise RefusedArgumentError(f"{_NAME}: Requires manual passing group_type, one of -1, 0 and 2; it is None.")
    if group_type not in {-1, 0, 2}:
        raise RefusedArgumentError(f"{_NAME}: The group type must be -1, 0 or 2; group_type is {group_type}.")
    target = x[0].dtype if output_dtype is None else dtype_of(output_dtype, _NAME, "output_dtype")
    if act_type not in {None, 0, 1, 2, 3, 4, 5} or target not in _OUTPUTS:
        name, value = ("act_type", act_type) if target in _OUTPUTS else ("output_dtype", target)
        raise unsupported(_NAME, name, value, "act_type 0 to 5, and int8, int32 and floating outputs")
    codes = (x_dtype, weight_dtype)
    small = are_small_floats(_NAME, x[0], weight[0], codes)
    if small:
        _refuse_small(x[0], group_type, target, offset or antiquant_offset)
    else:
        _refuse_without_scales(x[0], weight[0], scale, antiquant_scale, target)
    if group_type == 2:
        return _split_columns(x[0], weight, group_list, group_list_type, split_item)
    stacked = len(weight) == 1 and weight[0].dim() == 3
    matrices = [*weight[0].unbind()] if stacked else [*weight]
    factors = (bias, scale, offset, antiquant_scale, antiquant_offset)
    others = [of_each(each, len(matrices), stacked=stacked) for each in factors]
    products = []
    for group, rows, token in _pieces(x, per_token_scale, group_list, group_type, group_list_type, len(matrices)):
        given = [each[group] for each in others]
        y = _product(rows, matrices[group], token, given, codes if small else None)
        products.append(_stored(_activated(y, act_type), target))
    return _gathered(products, x, split_item, group_type)


def _product(
    rows: torch.Tensor,
    matrix: torch.Tensor,
    token: torch.Tensor | None,
    others: Sequence[torch.Tensor | None],
    codes: tuple[int | None, int | None] | None,
) -> torch.Tensor:
    """One group's product; ``others`` are its bias, scale, offset and anti-quantisation, ``codes`` the dtypes of small floats."""
    bias, scale, offset, anti_scale, anti_offset = others
    if codes is not None:
        return small_product(_NAME, (rows, matrix), codes, (token, anti_scale if scale is None else scale), bias)
    plain = matrix if anti_scale is None else _floating(matrix, rows, anti_scale, anti_offset)
    return multiplied(rows, Factors(plain, bias, scale, offset, token))


def _floating(
    matrix: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None
) -> torch.Tensor:
    """An anti-quantised matrix, in the dtype of the rows, as the cube unit takes it."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    shift = None if offset is None else offset.to(wide)
    return antiquantised(matrix_of(matrix, rows.shape[-1]), scale.to(wide), shift)


def _refuse_small(x: torch.Tensor, group_type: int, target: torch.dtype, offset: Sequence[torch.Tensor] | None) -> None:
    """Raise for 8-bit and 4-bit floats in a form that is not covered."""
    if group_type == 2 or not target.is_floating_point or target.itemsize == 1 or offset:
        raise unsupported(_NAME, "x", x.dtype, "such floats without offsets, with a wider floating output, and whole k")


def _refuse_without_scales(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: Sequence[torch.Tensor] | None,
    antiquant_scale: Sequence[torch.Tensor] | None,
    target: torch.dtype,
) -> None:
    """Raise where integers would be taken for what they stand for."""
    if weight.is_floating_point():
        if not x.is_floating_point():
            raise unsupported(_NAME, "x", x.dtype, "floating-point tensors with a floating-point weight")
    elif x.is_floating_point():
        if not antiquant_scale:
            raise unsupported(_NAME, "antiquant_scale", None, "tensors where x is floating and the weight is not")
    elif not scale and target != torch.int32:
        raise unsupported(_NAME, "scale", None, "tensors where x and weight are integers and the result is not int32")


def _gathered(
    products: list[torch.Tensor], x: Sequence[torch.Tensor], split_item: int | None, group_type: int
) -> list[torch.Tensor]:
    """The results in the form that ``split_item`` asks for."""
    if split_item in {0, 1}:
        if group_type == 0 and len(x) == 1:
            raise unsupported(_NAME, "split_item", split_item, "2 and 3 where group_type is 0 and x is one tensor")
        return products
    if split_item not in {2, 3}:
        raise refused(_NAME, "split_item", split_item, "0, 1, 2 or 3")
    whole = products[0].new_zeros((sum(part.shape[0] for part in x), products[0].shape[-1]))
    joined = torch.cat(products)
    whole[: joined.shape[0]] = joined
    return [whole]


def _refuse(**only_none: object) -> None:
    for name, value in only_none.items():
        if value is not None:
            raise unsupported(_NAME, name, value if isinstance(value, int) else "tensors", "None")


def _pieces(
    x: Sequence[torch.Tensor],
    tokens: Sequence[torch.Tensor] | None,
    group_list: torch.Tensor | None,
    group_type: int,
    kind: int | None,
    groups: int,
) -> list[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """For each group its number, its rows, and the scale of each row."""
    if group_type == -1 or len(x) > 1:
        return [(i, rows, tokens[i] if tokens else None) for i, rows in enumerate(x)]
    if group_list is None:
        raise refused(_NAME, "group_list", None, "given where the rows of one x are split")
    found = spans(_NAME, group_list, kind, x[0].shape[0], groups)
    token = tokens[0] if tokens else None
    return [(i, x[0][a:b], None if token is None else token[a:b]) for i, a, b in found]


def _split_columns(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    group_list: torch.Tensor | None,
    kind: int | None,
    split_item: int | None,
) -> list[torch.Tensor]:
    """The products of groups of columns of ``x`` [m, k] and rows of the weight [k, n]."""
    if group_list is None:
        raise refused(_NAME, "group_list", None, "given where the columns of x are split")
    whole = torch.cat([*weight])
    found = spans(_NAME, group_list, kind, x.shape[1], group_list.shape[0])
    products = [multiplied(x[:, a:b], Factors(whole[a:b])).to(x.dtype) for _, a, b in found]
    return products if split_item in {0, 1} else [torch.stack(products)]


@Operator(
    name="npu::npu_grouped_matmul.List",
    source="operator documentation of torch_npu.npu_grouped_matmul",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call([_halves(4, 8)], [_halves(8, 5), _halves(8, 5)], group_list=[1, 4], split_item=3),),
)
def npu_grouped_matmul_list(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    scale: Sequence[torch.Tensor] | None = None,
    offset: Sequence[torch.Tensor] | None = None,
    antiquant_scale: Sequence[torch.Tensor] | None = None,
    antiquant_offset: Sequence[torch.Tensor] | None = None,
    per_token_scale: Sequence[torch.Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    activation_input: Sequence[torch.Tensor] | None = None,
    activation_quant_scale: Sequence[torch.Tensor] | None = None,
    activation_quant_offset: Sequence[torch.Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """The same with the group list on the host; without ``group_type`` the rows of one x are split, and several x are not."""
    split = bool(group_list) and len(x) == 1
    inferred = 0 if split or split_item in {2, 3} else -1
    return npu_grouped_matmul(
        x, weight, bias=bias, scale=scale, offset=offset, antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset, per_token_scale=per_token_scale,
        group_list=torch.tensor(group_list) if split else None, activation_input=activation_input,
        activation_quant_scale=activation_quant_scale, activation_quant_offset=activation_quant_offset,
        split_item=split_item, group_type=inferred if group_type is None else group_type,
        group_list_type=group_list_type, act_type=act_type, output_dtype=output_dtype,  # type: ignore[arg-type]
    )  # fmt: skip
