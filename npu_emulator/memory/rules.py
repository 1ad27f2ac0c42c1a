"""Operators that do not read all of their arguments; without these rules the check would report false faults."""

from __future__ import annotations

from functools import cache

__all__ = ["is_copy", "may_skip_reads", "overwrites_in_part"]

_OVERWRITE_IN_PART = ("index_put", "index_copy", "index_fill", "scatter", "masked_fill", "put_", "fill_diagonal")
"""In-place operators that write some elements and keep the rest, whatever its contents, for example to fill a cache."""
_SKIP_READS = ("index", "gather", "embedding", "attention", "take", "masked_select", "where", "grouped_matmul")
"""Operators whose other arguments select the elements to read; the check reports them only if no byte was written."""


def _operator(name: str) -> str:
    """Return `add_` of `aten.add_.Tensor`."""
    return name.split(".")[1] if "." in name else name


def is_copy(name: str) -> bool:
    """Tell whether an operator only copies memory."""
    return name == "aten.copy_.default"


@cache
def overwrites_in_part(name: str) -> bool:
    """Tell whether an in-place operator keeps some elements of its output."""
    return any(part in _operator(name) for part in _OVERWRITE_IN_PART)


@cache
def may_skip_reads(name: str) -> bool:
    """Tell whether an operator may skip parts of its inputs."""
    return any(part in _operator(name) for part in _SKIP_READS)
