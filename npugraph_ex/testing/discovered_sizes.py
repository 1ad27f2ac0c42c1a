"""Whether a discovered operator computes its part at the other sizes that the guard of a written rule lets through.

The guard is `LikeExamples`: counted from the last dimension, equal sizes of two inputs stay equal, a size of 1 stays 1, and all
else is free. So each size is changed by itself, and all at once to different ones; the search saw one setting, perhaps a square.
No such setting is against the rule in which the part does not run, the results have other shapes, or the record's constraints
refuse the call: then a match is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from npugraph_ex.operators import PreparedGraph, record_of

_Place = tuple[int, int]
"""A dimension, counted from the last, and its size: inputs that have both share the size."""


def wrong_at(
    spelled: fx.Graph, fused: fx.Graph, inputs: Sequence[torch.Tensor], equal: Callable[[Any, Any], bool]
) -> list[tuple[int, ...]] | None:
    """The first shapes of ``inputs`` with which the results differ or the operator alone fails; None where there are none.

    Where the two are not ``equal`` in float64 with the shapes of ``inputs`` themselves, nothing can be told.
    """
    sides = PreparedGraph(spelled, wide=True), PreparedGraph(fused, wide=True)
    if not _agree(*sides, _drawn([value.shape for value in inputs], inputs), equal):
        return None
    for changed in _settings(inputs):
        shapes = [
            tuple(changed.get((place, size), size) for place, size in enumerate(value.shape, -value.dim()))
            for value in inputs
        ]
        drawn = _drawn(shapes, inputs)
        if not _agree(*sides, drawn, equal) and not _constraints_refuse(fused, drawn):
            return shapes
    return None


def _settings(inputs: Sequence[torch.Tensor]) -> Iterator[Mapping[_Place, int]]:
    places = dict.fromkeys(
        (place, size) for value in inputs for place, size in enumerate(value.shape, -value.dim()) if size > 1
    )
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
) -> bool:
    """Whether the operator gives what the part gives, or the part does not run, or gives other shapes."""
    wanted: list[Any] = []
    with suppress(Exception):  # sizes that are written in the part are a reason not to match
        wanted = list(spelled.run(*inputs))
    if not wanted:
        return True
    try:
        found = list(fused.run(*inputs))
    except Exception:  # noqa: BLE001 - whatever fails here would fail on the device
        return False
    pairs = list(zip(found, wanted, strict=True))
    return any(one.shape != other.shape for one, other in pairs) or all(equal(*pair) for pair in pairs)


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
