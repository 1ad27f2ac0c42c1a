"""Numbers with their nouns, for messages and tables."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, singular: str) -> str:
    """The count with its noun: "1 kernel", "1,234 kernels"."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"
