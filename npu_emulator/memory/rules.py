"""Which operators do not look at all the memory they are given: without these rules the check would cry wolf."""

from __future__ import annotations

__all__ = ["is_copy", "may_skip_reads", "overwrites_in_part"]

_OVERWRITE_IN_PART = ("index_put", "index_copy", "index_fill", "scatter", "masked_fill", "put_", "fill_diagonal")
"""In-place operators that store to some elements and leave the rest alone, whatever it holds: a cache is filled so."""
_SKIP_READS = ("index", "gather", "embedding", "attention", "take", "masked_select", "where", "grouped_matmul")
"""Operators whose other arguments say which elements they look at; they are told only of memory that holds nothing at all."""


def _operator(name: str) -> str:
    """Return `add_` of `aten.add_.Tensor`."""
    return name.split(".")[1] if "." in name else name


def is_copy(name: str) -> bool:
    """Tell whether an operator moves memory without looking at it."""
    return name == "aten.copy_.default"


def overwrites_in_part(name: str) -> bool:
    """Tell whether an in-place operator leaves some of what it writes to as it was."""
    return any(part in _operator(name) for part in _OVERWRITE_IN_PART)


def may_skip_reads(name: str) -> bool:
    """Tell whether an operator may leave parts of what it reads unread."""
    return any(part in _operator(name) for part in _SKIP_READS)
