"""Words for messages and tables: numbers with their nouns."""

from __future__ import annotations


def noun(count: int, singular: str, plural: str = "") -> str:
    """The noun for a count: "kernel" for one, "kernels" for any other number; `plural` where an s is not enough."""
    return singular if count == 1 else plural or f"{singular}s"


def counted(count: int, singular: str, plural: str = "") -> str:
    """The count with its noun: "1 kernel", "1,234 kernels"."""
    return f"{count:,} {noun(count, singular, plural)}"
