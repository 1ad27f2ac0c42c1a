"""Views whose schemas declare none, such as `_unsafe_view`, of a copy that the compiler may remove.

What `device_put` returns is the copy itself, where that is on the device. Torch makes such a view only of fresh memory. It
promises nothing about a write to the copy while the view is used, nor the other way around, nor to one part of it while another
is used. So a program goes on with the copy or with one of the views, which it may write, and reads all other views at once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from npugraph_ex.testing.generator.builder import Builder, Value
from npugraph_ex.testing.generator.inputs import Dim

_Shape = tuple[Dim, ...]
_DENSE = (("memory_format", torch.contiguous_format),)
_READERS = (("aten.mul.Tensor", 2), ("aten.neg.default",), ("aten.add.Tensor", 2))
"""What reads a view: operators that may be computed in place."""


class _ViewCall(NamedTuple):
    """A call that views a value.

    Attributes:
        operator: of ATen.
        args: but the first.
        shapes: of its results.
        dense: whether the results are dense where the value is.
    """

    operator: str
    args: tuple[Any, ...]
    shapes: tuple[_Shape, ...]
    dense: bool = True


def view_a_copy(builder: Builder) -> None:
    """Copy a value, view the copy undeclared, keep the copy or one of the views to be used, and read the other views."""
    viewable = [name for name in builder.latest() if _views(builder.values[name])]
    if not viewable:
        return
    copy = _copied(builder, str(builder.pick(viewable)))
    (part,) = _called(builder, copy, builder.pick((None, None, *_rows(builder.values[copy]))))
    views = _called(builder, part, builder.pick(_views(builder.values[part])))
    last = _called(builder, views[-1], builder.pick((None, *_views(builder.values[views[-1]]))))
    made, kept = {copy, part, *views, *last}, builder.pick((copy, last[-1]))
    for view in dict.fromkeys((*views[:-1], *last)):
        if view != kept:
            value, (operator, *number) = builder.values[view], builder.pick(_READERS)
            builder.emit(operator, view, *number, shape=value.shape, dtype=value.dtype)
    for name in made - {kept}:
        del builder.values[name]


def _copied(builder: Builder, name: str) -> str:
    """A dense copy: in any spelling where the value is dense, else in the one that makes it so."""
    value = builder.values[name]
    cast = (("dtype", value.dtype),)
    spellings: tuple[tuple[Any, ...], ...] = (
        ("aten.clone.default", (), _DENSE), ("aten.clone.default", (), ()), ("aten._to_copy.default", (), cast),
        ("aten.mul.Tensor", (1,), ()),
    )  # fmt: skip
    operator, number, keywords = builder.pick(spellings if value.contiguous else spellings[:1])
    copy = builder.emit(operator, name, *number, shape=value.shape, dtype=value.dtype, keywords=keywords)
    builder.values[copy] = Value(value.shape, value.dtype)
    return copy


def _called(builder: Builder, name: str, view: _ViewCall | None) -> tuple[str, ...]:
    """The results of a view of a value; without a view the value itself."""
    if view is None:
        return (name,)
    dtype, dense = builder.values[name].dtype, builder.values[name].contiguous and view.dense
    operator = view.operator if "prims" in view.operator else f"aten.{view.operator}"
    results = builder.emit_parts(operator, name, *view.args, shapes=view.shapes, dtype=dtype)
    for result, shape in zip(results, view.shapes, strict=True):
        builder.values[result] = Value(shape, dtype, contiguous=dense)
    return results


def _rows(value: Value) -> list[_ViewCall]:
    """The declared view of all rows but the first: it begins within the copy, and can be divided."""
    rows, *rest = value.shape or (0,)
    if isinstance(rows, str) or rows <= 2:
        return []
    return [_ViewCall("slice.Tensor", (0, 1, rows), ((rows - 1, *rest),))]


def _views(value: Value) -> list[_ViewCall]:
    """The undeclared views of a value."""
    found = [_ViewCall("prims.device_put.default", (torch.device("npu"),), (value.shape,), value.contiguous)] * 3
    if sum(isinstance(dim, str) for dim in value.shape) <= 1:  # `view` finds one size by itself
        shapes = _shapes(value.shape) if value.contiguous else [value.shape]
        found += [_ViewCall("_unsafe_view.default", (tuple(map(_size, shape)),), (shape,)) for shape in shapes]
    for dim, size in enumerate(value.shape):
        if isinstance(size, int) and size > 1:
            sizes = (-(-size // 2), size // 2)
            parts = tuple((*value.shape[:dim], part, *value.shape[dim + 1 :]) for part in sizes)
            found += [
                _ViewCall("unsafe_split.Tensor", (sizes[0], dim), parts, dim == 0),
                _ViewCall("unsafe_split_with_sizes.default", (sizes, dim), parts, dim == 0),
                _ViewCall("unsafe_chunk.default", (len(sizes), dim), parts, dim == 0),
            ]
    return found


def _size(dim: Dim) -> int:
    return -1 if isinstance(dim, str) else dim


def _shapes(shape: _Shape) -> list[_Shape]:
    """Shapes of the same elements: what stands behind a symbol, or all, is divided otherwise."""
    at = max((position + 1 for position, dim in enumerate(shape) if isinstance(dim, str)), default=0)
    count = math.prod(map(_size, shape[at:]))
    ends = [shape[at:], (count,), (1, count), (count, 1)]
    ends += [(2, count // 2), (count // 2, 2)] if count % 2 == 0 else []
    return [(*shape[:at], *end) for end in ends]
