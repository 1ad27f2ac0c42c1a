"""The bytes of device memory that a kernel touches, and whether two accesses share a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Access", "of_range", "of_tensor", "overlap"]


class Access(NamedTuple):
    """A strided set of bytes."""

    start: int
    end: int
    """One past the last byte."""
    itemsize: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    writes: bool

    @property
    def is_dense(self) -> bool:
        """Whether it touches every byte from `start` to `end`."""
        count = 1
        for extent, step in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: pair[1]):
            if extent == 1 or step == 0:
                continue
            if step != count:
                return False
            count *= extent
        return True


def of_tensor(tensor: torch.Tensor, *, writes: bool) -> Access | None:
    """Return the bytes of a CPU view of device memory; None if it is empty."""
    count = tensor.numel()
    if count == 0:
        return None
    start, itemsize = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return Access(start, start + count * itemsize, itemsize, (count,), (1,), writes)
    size, stride = tuple(tensor.size()), tensor.stride()
    last = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return Access(start, start + (last + 1) * itemsize, itemsize, size, stride, writes)


def of_range(start: int, length: int, *, writes: bool) -> Access:
    """Return `length` bytes from `start`."""
    return Access(start, start + length, 1, (length,), (1,), writes)


def overlap(left: Access, right: Access) -> int:
    """Return how many bytes two accesses share.

    Interleaved views (`x[::2]` and `x[1::2]`, or two column blocks of a matrix) span the same addresses and share nothing.
    """
    first, last = max(left.start, right.start), min(left.end, right.end)
    if last <= first:
        return 0
    if left.is_dense and right.is_dense:
        return last - first
    shared = torch.isin(_bytes(left, first, last), _bytes(right, first, last), assume_unique=True)
    return int(shared.sum())


def _bytes(access: Access, first: int, last: int) -> torch.Tensor:
    """Return the addresses from `first` to `last` that an access touches."""
    found = torch.zeros(1, dtype=torch.int64)
    for extent, step in _steps(access):
        found = (found.unsqueeze(1) + torch.arange(extent) * step).flatten()
    found += access.start
    inside: torch.Tensor = found[(found >= first) & (found < last)].unique()
    return inside


def _steps(access: Access) -> Iterable[tuple[int, int]]:
    for extent, step in zip(access.size, access.stride, strict=True):
        if extent > 1 and step != 0:
            yield extent, step * access.itemsize
    if access.itemsize > 1:
        yield access.itemsize, 1
