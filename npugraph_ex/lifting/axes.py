"""Axes: what a dimension of a tensor counts, wherever the tensor's values go.

Two dimensions that an operator walks along together count one axis. A reshape makes one dimension of several axes, their product; a
concatenation makes their sum. An axis is *mixed* where an operator makes one result of several of its elements, as a sum does.
Along all others an operator of each element computes alike, whatever the other elements are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence


class Axis:
    """So many elements.

    Attributes:
        size: how many.
        mixed: whether elements of it meet; asked of an axis without parts.
        parts: the axes that it consists of, the slowest or the first one first; empty for one that is whole.
        joined: whether the parts follow each other; otherwise it has an element for each choice of one of each part.
        same_as: another one that stands for it.
        addressed_by: the axes of the numbers that choose among its elements, where they come from outside; then it has as many
            elements as there are numbers, or more.
    """

    def __init__(self, size: int, parts: Sequence[Axis] = (), *, joined: bool = False, mixed: bool = False) -> None:
        self.size = size
        self.mixed = mixed
        self.parts = tuple(parts)
        self.joined = joined
        self.same_as: Axis | None = None
        self.addressed_by: tuple[Axis, ...] = ()

    def found(self) -> Axis:
        """The one that stands for all that are the same."""
        axis = self
        while axis.same_as is not None:
            axis = axis.same_as
        return axis

    def wholes(self) -> Iterator[Axis]:
        """The axes without parts that it consists of."""
        axis = self.found()
        if not axis.parts:
            yield axis
        for part in axis.parts:
            yield from part.wholes()

    def counted(self, size: Callable[[Axis], int]) -> int:
        """Its size where its axes without parts have these sizes."""
        axis = self.found()
        if not axis.parts:
            return size(axis)
        sizes = [part.counted(size) for part in axis.parts]
        return sum(sizes) if axis.joined else math.prod(sizes)


def mix(*axes: Axis) -> None:
    """Elements along them meet."""
    for axis in axes:
        for whole in axis.wholes():
            whole.mixed = True


def address(axis: Axis, by: Sequence[Axis]) -> None:
    """Numbers choose among its elements: any will do, unless the numbers count something."""
    if any(whole.mixed for one in by for whole in one.wholes()):
        mix(axis)
    for whole in axis.wholes():
        whole.addressed_by += tuple(by)


def same(one: Axis, other: Axis) -> None:
    """An operator walks along both together. Axes of which it is not known how they fit are mixed."""
    one, other = one.found(), other.found()
    if one is other:
        return
    if one.size != other.size:
        mix(one, other)
    elif not one.parts or not other.parts:
        whole, kept = (one, other) if not one.parts else (other, one)
        if whole in kept.wholes():  # the others of its parts have one element, or none
            return
        whole.same_as = kept
        if whole.mixed:
            mix(kept)
        for part in kept.wholes() if whole.addressed_by else ():
            part.addressed_by += whole.addressed_by
    else:
        _same_parts(one, other)


def _same_parts(one: Axis, other: Axis) -> None:
    sizes = [part.size for part in one.parts]
    if one.joined or other.joined:
        alike = one.joined == other.joined and [part.size for part in other.parts] == sizes
        taken = [*other.parts] if alike else None
    else:
        taken = regrouped(other.parts, sizes)
    if taken is None:
        mix(one, other)
        return
    for left, right in zip(one.parts, taken, strict=True):
        same(left, right)


def follow(parts: Sequence[Axis]) -> Axis:
    """The axis of a concatenation."""
    if len(parts) == 1:
        return parts[0]
    return Axis(sum(part.size for part in parts), parts, joined=True)


def cut(axis: Axis, sizes: Sequence[int]) -> Sequence[Axis] | None:
    """The parts of so many elements that follow each other; None where it consists of others."""
    axis = axis.found()
    if not axis.parts and not axis.mixed and not axis.addressed_by:
        axis.parts, axis.joined = tuple(map(Axis, sizes)), True
    return axis.parts if axis.joined and [part.size for part in axis.parts] == [*sizes] else None


def regrouped(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis] | None:
    """Dimensions of these sizes with the same elements in the same order; None where an axis cannot be cut so."""
    waiting = [factor for axis in axes for factor in _factors(axis)]
    found = []
    for size in sizes:
        taken: list[Axis] = []
        missing = size
        while missing > 1:
            if not waiting:
                return None
            first = waiting.pop(0)
            if missing % first.size == 0:
                taken.append(first)
                missing //= first.size
                continue
            pair = _in_two(first, missing)
            if pair is None:
                return None
            taken.append(pair[0])
            waiting.insert(0, pair[1])
            missing = 1
        found.append(taken[0] if len(taken) == 1 else Axis(size, taken))
    return None if waiting else found


def _factors(axis: Axis) -> Iterator[Axis]:
    """The axes of whose elements it has each choice; those of one element have none."""
    axis = axis.found()
    if axis.parts and not axis.joined:
        for part in axis.parts:
            yield from _factors(part)
    elif axis.size != 1:
        yield axis


def _in_two(axis: Axis, first: int) -> tuple[Axis, Axis] | None:
    """An axis as a product of two, the first of this size."""
    if axis.size % first or axis.parts:
        return None
    pair = Axis(first, mixed=axis.mixed), Axis(axis.size // first, mixed=axis.mixed)
    for part in pair:
        part.addressed_by = axis.addressed_by
    axis.parts = pair
    return pair
