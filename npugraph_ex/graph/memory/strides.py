"""Whether two views of one storage have a byte in common, where the ranges that they span cannot tell.

The even and the odd elements of a vector, or two blocks of columns, span the same bytes and share none.
"""

from __future__ import annotations

import math

import torch


def share_no_byte(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors in one storage are proven to have no byte in common; False where nothing is proven.

    For a period ``g``: if every step of ``g`` bytes or more is a multiple of ``g``, a tensor's bytes modulo ``g`` lie in
    one interval, which its smaller steps span. Disjoint intervals for some ``g`` prove disjoint tensors. The steps of
    both tensors, and the greatest common divisor of all steps, are tried for ``g``.

    Args:
        left: any shape and strides, with concrete numbers; symbolic ones prove nothing.
        right: likewise.
    """
    if not (_is_concrete(left) and _is_concrete(right)):
        return False
    one, other = _View(left), _View(right)
    steps = {step for view in (one, other) for step, _ in view.dims}
    return any(_apart(one, other, period) for period in sorted({*steps, math.gcd(*steps)} - {0}))


def _is_concrete(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
    return tensor.layout == torch.strided and all(type(number) is int for number in numbers)


class _View:
    """A tensor's layout in bytes: where it starts, its steps with their counts, and the width of an element."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.width = tensor.element_size()
        self.start = int(tensor.storage_offset()) * self.width
        pairs = zip(tensor.stride(), tensor.size(), strict=True)
        self.dims = [(step * self.width, size) for step, size in pairs if size > 1 and step > 0]

    def interval(self, period: int) -> tuple[int, int] | None:
        """First byte modulo ``period``, and how many follow at most; None if the bytes do not repeat so."""
        if any(step % period for step, _ in self.dims if step >= period):
            return None
        length = self.width + sum(step * (size - 1) for step, size in self.dims if step < period)
        return self.start % period, length


def _apart(left: _View, right: _View, period: int) -> bool:
    """Whether the intervals of both lie apart on a circle of ``period`` bytes."""
    here, there = left.interval(period), right.interval(period)
    if here is None or there is None:
        return False
    gap = (there[0] - here[0]) % period
    return here[1] <= gap and gap + there[1] <= period
