"""Parts of one value of which some are written: alone, from each other, or from another value, as buffers and caches are updated.

Torch says what a write from another part gives only where the two share no element. Where they may, the program copies first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from npugraph_ex.testing.generator.builder import Builder, Value
from npugraph_ex.testing.generator.inputs import Dim, Input
from npugraph_ex.testing.generator.program import Ref, Step

_FROM = ("copy_.default", "copy_.default", "add_.Tensor", "sub_.Tensor", "bitwise_xor_.Tensor")
_ALONE = (("neg_.default",), ("fill_.Scalar", 7), ("zero_.default",), ("mul_.Tensor", 3), ("add_.Tensor", 5))


class _Division(NamedTuple):
    """Two views of a value, of one shape.

    Attributes:
        views: an operator and its arguments but the first, for each; one operator with both results if the other is None.
        shape: of each.
        apart: whether they share no element.
    """

    views: tuple[tuple[Any, ...], tuple[Any, ...] | None]
    shape: tuple[Dim, ...]
    apart: bool = True


def write_parts(builder: Builder) -> None:
    """Take a value apart and write some of its parts; then read the whole, or another view of it."""
    divisible = [name for name in builder.latest() if any(_divisions(builder.values[name]))]
    if not divisible:
        return
    whole = given = str(builder.pick(divisible))
    if builder.chance(40):
        value = builder.values[given]
        whole = builder.emit("aten.clone.default", given, shape=value.shape, dtype=value.dtype)
    # Torch functionalises no write through `as_strided` of a view.
    storage = [] if whole == given and not whole.startswith("x") else _by_storage(builder.values[whole])
    for _ in range(builder.choices.number(1, 3)):
        _write(builder, whole, storage)
    if builder.chance(70):
        value = builder.values[whole]
        builder.emit("aten.add.Tensor", whole, 1, shape=value.shape, dtype=value.dtype)


def _write(builder: Builder, whole: str, storage: Sequence[_Division]) -> None:
    """One write, or an exchange, of parts, or of parts of these."""
    division = builder.pick([*_divisions(builder.values[whole]), *storage])
    if builder.chance(25):
        source = _taken(builder, _overtaken(builder, whole), division)[1]
        _call(builder, "copy_.default", _taken(builder, whole, division)[0], source)
        return
    parts = _taken(builder, whole, division)
    inner = list(_divisions(builder.values[parts[0]]))
    if inner and division.apart and builder.chance(30):
        within = builder.pick(inner)
        parts = (_taken(builder, parts[0], within)[0], _taken(builder, parts[1], within)[1])
    target, source = builder.choices.order(parts)
    value, what = builder.values[target], builder.choices.number(0, 5)
    if what == 0:
        operator, *number = builder.pick(_ALONE)
        _call(builder, operator, target, *number)
    elif what == 1:
        _by_index(builder, target, value)
    elif what == 2:
        _call(builder, builder.pick(_FROM), target, _copied(builder, builder.produce(value.shape, value.dtype, 1)))
    elif what == 3:
        kept = _copied(builder, target)
        _call(builder, "copy_.default", target, source if division.apart else _copied(builder, source))
        _call(builder, "copy_.default", source, kept)
    else:
        if builder.chance(25):  # a number for each element, of another dtype
            wide = (("dtype", torch.int64),)
            source = builder.emit("aten._to_copy.default", source, shape=value.shape, dtype=torch.int64, keywords=wide)
            _call(builder, "copy_.default", target, source)
            return
        if not division.apart or builder.chance(30):
            source = _copied(builder, source)
        _call(builder, builder.pick(_FROM), target, source)


def _overtaken(builder: Builder, whole: str) -> str:
    """A new value like ``whole``, after which an operator has come that could take its memory."""
    value = builder.values[whole]
    operator = "aten.neg.default" if value.dtype.is_floating_point else "aten.bitwise_not.default"
    made = builder.emit(operator, builder.produce(value.shape, value.dtype, 1), shape=value.shape, dtype=value.dtype)
    builder.emit(operator, made, shape=value.shape, dtype=value.dtype)
    return made


def _by_index(builder: Builder, target: str, value: Value) -> None:
    """Write elements that only the call knows: by a mask, or rows by an index."""
    rows = value.shape[0] if value.shape else 0
    if not isinstance(rows, int) or rows < 2 or builder.chance(40):
        _call(builder, "masked_fill_.Scalar", target, builder.new_input(value.shape, torch.bool, plain=True), 9)
        return
    count = builder.choices.number(1, rows)
    index = f"x{len(builder.inputs)}"  # no value: nothing may write an index
    builder.inputs.append(Input((count,), "int64", seed=builder.choices.number(0, 999), below=rows, distinct=True))
    if builder.chance(40):
        _call(builder, "index_fill_.int_Scalar", target, 0, index, 9)
        return
    rows_given = builder.new_input((count, *value.shape[1:]), value.dtype)
    _call(builder, "index_put_.default", target, (index,), _copied(builder, rows_given))


def _call(builder: Builder, operator: str, *args: Any) -> None:
    """A call for its effect; names are values."""

    def given(arg: Any) -> Any:
        return Ref(arg) if isinstance(arg, str) else tuple(map(Ref, arg)) if isinstance(arg, tuple) else arg

    builder.steps.append(Step(f"aten.{operator}", tuple(map(given, args))))


def _copied(builder: Builder, name: str) -> str:
    value = builder.values[name]
    copy = builder.emit("aten.clone.default", name, shape=value.shape, dtype=value.dtype)
    builder.values[copy] = dataclasses.replace(builder.values[copy], memory_of=None)
    return copy


def _taken(builder: Builder, name: str, division: _Division) -> tuple[str, ...]:
    """The parts of a value."""
    value, (first, second) = builder.values[name], division.views
    if second is None:
        operator, *args = first
        return builder.emit_parts(
            f"aten.{operator}", name, *args, shapes=(division.shape,) * 2, dtype=value.dtype, memory_of=value.memory_of
        )
    made = []
    for operator, *args in (first, second):
        part = builder.emit(
            f"aten.{operator}", name, *args, shape=division.shape, dtype=value.dtype, memory_of=value.memory_of
        )
        builder.values[part] = dataclasses.replace(builder.values[part], contiguous=False)
        made.append(part)
    return tuple(made)


def _by_storage(value: Value) -> list[_Division]:
    """The first and the second half of a storage, whatever view of it the value is. Twice, for it is one of many divisions."""
    sizes = [size for size in value.shape if isinstance(size, int)]
    half = math.prod(sizes) // 2
    if not half or len(sizes) < len(value.shape):
        return []
    first, second = (("as_strided.default", (half,), (1,), start) for start in (0, half))
    return [_Division((first, second), (half,))] * 2


def _divisions(value: Value) -> Iterator[_Division]:
    """How a value can be taken apart."""
    shape = value.shape
    for dim, size in enumerate(shape):
        if not isinstance(size, int) or size < 2:
            continue
        before, after, half = shape[:dim], shape[dim + 1 :], size // 2
        part = (*before, half, *after)
        yield _Division((("slice.Tensor", dim, 0, half), ("slice.Tensor", dim, half, 2 * half)), part)
        yield _Division((("slice.Tensor", dim, 0, 2 * half, 2), ("slice.Tensor", dim, 1, 2 * half, 2)), part)
        yield _Division((("select.int", dim, 0), ("select.int", dim, size - 1)), (*before, *after))
        if size % 2 == 0:
            yield _Division((("split.Tensor", half, dim), None), part)
        part = (*before, size - 1, *after)
        yield _Division((("slice.Tensor", dim, 1, size), ("slice.Tensor", dim, 0, size - 1)), part, apart=size == 2)
    if len(shape) == 2 and shape[0] == shape[1] and isinstance(shape[0], int) and shape[0] > 1:
        part = (shape[0] - 1,)
        yield _Division((("diagonal.default", 1), ("diagonal.default", -1)), part)
