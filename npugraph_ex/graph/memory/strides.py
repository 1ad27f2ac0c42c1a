"""Whether two views of one storage have a byte in common, if the ranges that they span overlap.

The even and the odd elements of a vector, or two blocks of columns, span the same bytes and share none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


def share_no_byte(left: torch.Tensor, right: torch.Tensor, *, starts: tuple[int, int]) -> bool:
    """Whether two tensors in one storage provably have no byte in common; False if there is no proof.

    For a period ``g``: if every step of ``g`` bytes or more is a multiple of ``g``, a tensor's bytes modulo ``g`` lie in
    one interval, which its smaller steps span. Disjoint intervals for some ``g`` prove disjoint tensors, and so do
    disjoint bytes inside the intervals. The candidates for ``g`` are the steps of both tensors and the greatest common
    divisor of all steps.

    Args:
        left: any shape and strides, with concrete numbers; symbolic ones prove nothing.
        right: likewise.
        starts: the offsets of the two first elements in the storage, in bytes.
    """
    if not (_is_concrete(left) and _is_concrete(right)):
        return False
    return _are_apart(*map(_View.from_tensor, (left, right), starts))


def _is_concrete(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
    return tensor.layout == torch.strided and all(type(number) is int for number in numbers)


class _View(NamedTuple):
    """A layout in bytes: where it starts, its steps with their counts, and the width of an element."""

    start: int
    dims: tuple[tuple[int, int], ...]
    width: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, start: int) -> _View:
        width = tensor.element_size()
        pairs = zip(tensor.stride(), tensor.size(), strict=True)
        return cls(start, tuple((step * width, size) for step, size in pairs if size > 1 and step > 0), width)

    @property
    def length(self) -> int:
        """The number of bytes from the first to the last."""
        return self.width + sum(step * (size - 1) for step, size in self.dims)

    def modulo(self, period: int) -> _View | None:
        """The bytes modulo ``period``, from the first one; None if they do not repeat with this period."""
        if any(step % period for step, _ in self.dims if step >= period):
            return None
        return _View(self.start % period, tuple(dim for dim in self.dims if dim[0] < period), self.width)


def _are_apart(left: _View, right: _View) -> bool:
    if left.start + left.length <= right.start or right.start + right.length <= left.start:
        return True
    steps = {step for view in (left, right) for step, _ in view.dims}
    return any(_apart(left, right, period) for period in sorted({*steps, math.gcd(*steps)} - {0}))


def _apart(left: _View, right: _View, period: int) -> bool:
    """Whether the bytes of both are disjoint on a circle of ``period`` bytes."""
    here, there = left.modulo(period), right.modulo(period)
    if here is None or there is None:
        return False
    gap = (there.start - here.start) % period
    if here.length <= gap and gap + there.length <= period:
        return True
    # Inside the period they may interleave. Then compare the inner steps, of which at least one view has fewer.
    inside = all(view.start + view.length <= period for view in (here, there))
    fewer = len(here.dims) + len(there.dims) < len(left.dims) + len(right.dims)
    return inside and fewer and _are_apart(here, there)
