"""Sizes that may be symbols, as numbers."""

from __future__ import annotations

from typing import Any


def known(number: Any) -> int:
    """A size; of a symbol the one that was compiled for."""
    return number if isinstance(number, int) else int(number.node.hint or 1)
