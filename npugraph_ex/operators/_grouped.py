"""Products of groups: which rows belong to which group, and what one group's product is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._int4 import unpack
from npugraph_ex.operators._integers import in_groups, matrix_of, offset_of, product, scale_of
from npugraph_ex.operators._precision import compute_dtype, refused

CUMULATIVE, COUNTS, PAIRS = 0, 1, 2
"""What ``group_list_type`` says of a group list: ends, sizes, or pairs of a group's number and size."""
_LOW_HALF = 8


class GroupRows(NamedTuple):
    """The rows from ``start`` to ``end``, which belong to the group of that number."""

    group: int
    start: int
    end: int


def spans(name: str, group_list: torch.Tensor, kind: int | None, rows: int, groups: int) -> list[GroupRows]:
    """The rows of each group. Raises where the list does not fit the rows or the number of groups."""
    kind = CUMULATIVE if kind is None else kind
    if kind not in {CUMULATIVE, COUNTS, PAIRS}:
        raise refused(name, "group_list_type", kind, "0 (ends), 1 (sizes) or 2 (pairs of group and size)")
    given = group_list.tolist()
    numbers = [pair[0] for pair in given] if kind == PAIRS else list(range(len(given)))
    if kind == CUMULATIVE:
        ends = given
    else:
        sizes = group_list[:, 1] if kind == PAIRS else group_list
        ends = sizes.cumsum(0).tolist()
    if len(given) > groups or any(not 0 <= number < groups for number in numbers):
        raise refused(name, "group_list", given, f"a list for {groups} groups, as many as there are weights")
    starts = [0, *ends][: len(ends)]
    if any(end < start for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > rows):
        raise refused(name, "group_list", given, f"a list of groups of the {rows} rows of x")
    return [GroupRows(*span) for span in zip(numbers, starts, ends, strict=True)]


class Factors(NamedTuple):
    """What is multiplied with the rows of one group. Beside the matrix each may be None.

    matrix: [k, n], int4 ones packed; bias: [n]; scale: [n], [1] or [groups, n], floating or encoded; offset: like scale.
    """

    matrix: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    token: torch.Tensor | None = None


def of_each(given: Sequence[torch.Tensor] | None, groups: int, *, stacked: bool) -> list[torch.Tensor | None]:
    """One entry for each group: those of a list, or the parts of its only tensor where all groups are stacked in one."""
    if not given:
        return [None] * groups
    if stacked and len(given) == 1:
        return [*given[0].unbind()]
    return [*given]


def multiplied(rows: torch.Tensor, factors: Factors) -> torch.Tensor:
    """``rows @ matrix`` with bias, scale, offset and the scale of each row: float32 or float64, not rounded.

    Int8 and packed int4 rows. A scale of groups of the matrix's rows goes into the matrix; int8 rows with an int4 matrix are then
    taken as 8 less, which the bias makes good (see ``npu_quant_matmul``).
    """
    left = unpack(rows) if rows.dtype == torch.int32 else rows
    matrix = matrix_of(factors.matrix, left.shape[-1])
    wide = compute_dtype(rows, factors.scale, factors.token, factors.bias)
    bias = factors.bias
    mixed = rows.dtype == torch.int8 and factors.matrix.dtype == torch.int32
    scale = None if factors.scale is None else scale_of(factors.scale)
    if scale is not None and (mixed or (scale.dim() == 2 and scale.shape[0] > 1)):
        weight = in_groups(matrix, scale.reshape(-1, scale.shape[-1]).to(wide))
        out = (left.to(wide) - (_LOW_HALF if mixed else 0)) @ weight
        out = out if bias is None else out + bias.to(wide)
        return out if factors.token is None else out * factors.token.to(wide).reshape(-1, 1)
    if left.is_floating_point():
        out = torch.matmul(left.to(wide), matrix.to(wide))
    else:
        total = product(left, matrix)
        if bias is not None and not bias.is_floating_point():
            total, bias = total + bias.to(torch.float64), None
        out = total.to(wide)
    if scale is not None:
        out = out * scale.to(wide)
    if factors.token is not None:
        out = out * factors.token.to(wide).reshape(-1, 1)
    if bias is not None:
        out = out + bias.to(wide)
    offset = factors.offset
    if offset is None and factors.scale is not None and factors.token is None:
        offset = offset_of(factors.scale)
    return out if offset is None else out + offset.to(wide)
