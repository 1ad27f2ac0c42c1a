"""Caches of keys or values in blocks (pages): reading a sequence by its row of a block table, reading and writing by slots.

A cache is [blocks, size, ...]: ``size`` tokens a block, then heads and elements, joined or not. In layout NZ the elements of
a token are split: [blocks, parts, size, elements / parts]. Slot ``s`` is the token ``s % size`` of block ``s // size``; a
negative slot is none.
"""

from __future__ import annotations

import torch

__all__ = ["as_split", "by_token", "is_split", "read_sequence", "read_slots", "write_slots"]


def is_split(cache: torch.Tensor, heads: int, elements: int) -> bool:
    """Whether the shape of a cache of tokens [heads, elements] is that of layout NZ."""
    plain = tuple(cache.shape[2:]) in {(heads, elements), (heads * elements,)}
    return not plain and cache.dim() == 4 and cache.shape[1] * cache.shape[3] == heads * elements


def by_token(cache: torch.Tensor, *, split: bool) -> torch.Tensor:
    """A view of the cache as [blocks, size, ...], whatever its layout."""
    return cache.transpose(1, 2) if split else cache


def as_split(cache: torch.Tensor, elements: int, *, whole: int) -> torch.Tensor:
    """The memory of a cache declared as [blocks, size, ...] in the layout NZ that it really has: [blocks, parts, size, elements].

    ``whole``: how many elements a token has.
    """
    return cache.view(cache.shape[0], whole // elements, cache[0].numel() // max(whole, 1), elements)


def write_slots(cache: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, *, split: bool = False) -> None:
    """Write ``tokens`` [T, ...] to ``slots`` [T] of ``cache``; tokens behind the last slot, and negative slots, are left out."""
    view = by_token(cache, split=split)
    places = slots.reshape(-1).long()
    given = tokens[: places.numel()].to(cache.dtype).reshape(places.numel(), *view.shape[2:])
    kept = places >= 0
    view[places[kept] // view.shape[1], places[kept] % view.shape[1]] = given[kept]


def read_slots(cache: torch.Tensor, slots: torch.Tensor, *, split: bool = False) -> torch.Tensor:
    """The tokens at ``slots`` [T], as [T, ...]."""
    view = by_token(cache, split=split)
    return view[slots // view.shape[1], slots % view.shape[1]]


def read_sequence(
    cache: torch.Tensor, blocks: torch.Tensor, length: int, *, start: int = 0, split: bool = False
) -> torch.Tensor:
    """The ``length`` tokens from ``start`` on of the sequence whose ``blocks`` are a row of a block table: [length, ...]."""
    positions = torch.arange(start, start + length)
    size = cache.shape[2 if split else 1]
    return read_slots(cache, blocks.long()[positions // size] * size + positions % size, split=split)
