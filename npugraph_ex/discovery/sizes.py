"""At which other sizes a discovered operator computes its part, for the guard of the rule that is written of it.

The guard has `LikeExamples`: counted from the last dimension, equal sizes of two inputs stay equal, a size of 1 stays 1, and all
else is free. So each size is changed by itself, and all at once to different ones; the search saw one setting, perhaps a square.
A size is fixed where each other one is refused: the part does not run, as its numbers say how large a tensor is, the results have
other shapes, or the record's constraints refuse the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import fx

from npugraph_ex.operators import PreparedGraph, record_of

Dimension = tuple[int, int]
"""A dimension, counted from the last, and its size: inputs that have both share the size."""


class OtherSizes(NamedTuple):
    """What other sizes of a part's inputs showed."""

    wrong: list[tuple[int, ...]] | None = None
    """The first shapes of the inputs with which the results differ or the operator alone fails; None where there are none."""
    fixed: frozenset[Dimension] = frozenset()
    """The sizes that must stay."""


def try_other_sizes(
    spelled: fx.Graph, fused: fx.Graph, inputs: Sequence[torch.Tensor], equal: Callable[[Any, Any], bool]
) -> OtherSizes:
    """Compute the part and the operator at other sizes.

    Where the two are not ``equal`` in float64 with the shapes of ``inputs`` themselves, nothing can be told.
    """
    sides = PreparedGraph(spelled, wide=True), PreparedGraph(fused, wide=True)
    if not _agree(*sides, _drawn([value.shape for value in inputs], inputs), equal):
        return OtherSizes()
    fixed = set(_dimensions(inputs))
    for changed in _settings(inputs):
        shapes = [
            tuple(changed.get((place, size), size) for place, size in enumerate(value.shape, -value.dim()))
            for value in inputs
        ]
        drawn = _drawn(shapes, inputs)
        agree = _agree(*sides, drawn, equal)
        if agree is False and not _constraints_refuse(fused, drawn):
            return OtherSizes(wrong=shapes)
        if agree:
            fixed -= set(changed)
    return OtherSizes(fixed=frozenset(fixed))


def _dimensions(inputs: Sequence[torch.Tensor]) -> list[Dimension]:
    every = (at for value in inputs for at in enumerate(value.shape, -value.dim()))
    return list(dict.fromkeys((place, size) for place, size in every if size > 1))


def _settings(inputs: Sequence[torch.Tensor]) -> Iterator[Mapping[Dimension, int]]:
    places = _dimensions(inputs)
    for one in places:
        yield {one: 2 * one[1]}
        yield {one: one[1] + 1}
    yield {one: 2 * (one[1] + at) for at, one in enumerate(places, 1)}


def _drawn(shapes: Sequence[Sequence[int]], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes)
    return [
        value if one.is_floating_point() else (value > 1).to(one.dtype)
        for value, one in zip(numbers, like, strict=True)
    ]


def _agree(
    spelled: PreparedGraph, fused: PreparedGraph, inputs: Sequence[torch.Tensor], equal: Callable[[Any, Any], bool]
) -> bool | None:
    """Whether the operator gives what the part gives; None where the part does not run, or gives other shapes."""
    wanted: list[Any] = []
    with suppress(Exception):  # sizes that are written in the part are a reason not to match
        wanted = list(spelled.run(*inputs))
    if not wanted:
        return None
    try:
        found = list(fused.run(*inputs))
    except Exception:  # noqa: BLE001 - whatever fails here would fail on the device
        return False
    pairs = list(zip(found, wanted, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return None
    return all(equal(*pair) for pair in pairs)


def _constraints_refuse(fused: fx.Graph, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the record knows that the device refuses the call; then no match is replaced."""
    given = dict(zip(fused.find_nodes(op="placeholder"), inputs, strict=True))
    for node in fused.nodes:
        record = record_of(node.target)
        if record is not None and record.constraints is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), given.get)
            try:
                record.constraints(*args, **kwargs)
            except RuntimeError:
                return True
    return False
