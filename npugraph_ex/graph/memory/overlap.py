"""Whether two tensors of one storage may have an element in common, for every value of their symbolic sizes.

It knows more than `regions`: two slices of columns, such as query and key of one projection, lie in common rows and have no
common element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true as _always

from npugraph_ex import _torch_private


def share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the two lie in one storage, even in different bytes."""
    return _torch_private.storage_key(first) == _torch_private.storage_key(second)


def may_share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the two may have a byte in common; True if that depends on symbolic sizes. Adds no guard."""
    if not share_storage(first, second) or _is_empty(first) or _is_empty(second):
        return False
    return not (_apart(_bytes(first), _bytes(second)) or any(_apart(*columns) for columns in _columns(first, second)))


def _is_empty(tensor: torch.Tensor) -> bool:
    return any(_always(size == 0) for size in tensor.size())


def _apart(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two intervals, each with its end behind the last byte, have no byte in common."""
    return _always(one[1] <= other[0]) or _always(other[1] <= one[0])


def _bytes(tensor: torch.Tensor, row: int = 0) -> tuple[Any, Any]:
    """The first byte and the end; of a ``row``, if one is given, where steps by whole rows do not count."""
    width = tensor.element_size()
    start = tensor.storage_offset() * width
    length: Any = width
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if not (row and _always(stride * width % row == 0)):
            length = length + (size - 1) * stride * width
    start = start % row if row else start
    return start, start + length


def _columns(first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """The bytes of each row that the two lie in, for each length of rows of which neither crosses an end."""
    rows = [
        {stride * tensor.element_size() for stride in tensor.stride() if type(stride) is int}
        for tensor in (first, second)
    ]
    for row in sorted(rows[0] & rows[1] - {0}):
        found = _bytes(first, row), _bytes(second, row)
        if all(_always(end <= row) for _, end in found):
            yield found
