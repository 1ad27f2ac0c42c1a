"""Queries and keys of sparse attention, sequence by sequence: packed, side by side, or keys in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from npugraph_ex.operators._paged_cache import read_sequence
from npugraph_ex.operators._precision import unsupported

__all__ = ["Layouts", "rows_of"]


class Layouts(NamedTuple):
    """How a call lays out queries and keys, and how long its sequences are; ends of them in layout TND."""

    operator: str
    query: str
    key: str
    query_lengths: torch.Tensor | None
    key_lengths: torch.Tensor | None
    block_table: torch.Tensor | None
    named: str = "layout_key"
    """The argument that says how keys lie."""

    def check(self) -> None:
        """Raise for other layouts."""
        if self.query not in {"BSND", "TND"}:
            raise unsupported(self.operator, "layout_query", self.query, "'BSND' and 'TND'")
        if self.key not in {"BSND", "TND", "PA_BSND"}:
            raise unsupported(self.operator, self.named, self.key, "'BSND', 'TND' and 'PA_BSND'")


def _spans(operand: torch.Tensor, lengths: torch.Tensor | None, layout: str) -> list[tuple[int, int]]:
    """For each sequence, where it begins in the rows of all, and how many rows it has."""
    if layout == "TND":
        ends = [operand.shape[0]] if lengths is None else lengths.tolist()
        return [(begin, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
    batch, size = operand.shape[:2]
    each = [size] * batch if lengths is None else lengths.tolist()
    return [(b * size, length) for b, length in enumerate(each)]


def rows_of(how: Layouts, query: torch.Tensor, *keys: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """For each sequence, its rows in ``query`` with leading dimensions joined, and its rows [S, ...] of each of ``keys``."""
    for b, (begin, length) in enumerate(_spans(query, how.query_lengths, how.query)):
        yield slice(begin, begin + length), [_key(how, key, b) for key in keys]


def _key(how: Layouts, key: torch.Tensor, b: int) -> torch.Tensor:
    if how.key == "PA_BSND":
        if how.block_table is None or how.key_lengths is None:
            raise ValueError(
                f"{how.operator}: layout PA_BSND needs block_table and the lengths of the keys; one is None."
            )
        return read_sequence(key, how.block_table[b], int(how.key_lengths[b]))
    begin, length = _spans(key, how.key_lengths, how.key)[b]
    rows = key if how.key == "TND" else key.flatten(0, 1)
    return rows[begin : begin + length]
