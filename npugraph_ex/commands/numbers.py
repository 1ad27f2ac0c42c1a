"""Numbers on a command line: what is none, or out of range, is refused with what is allowed."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from ``least`` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"takes a whole number, at least {least}; it is {text!r}")
        return number

    return read


def whole(text: str) -> int:
    """A type for argparse: any whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a whole number; it is {text!r}") from None


def seconds(text: str) -> float:
    """A type for argparse: a time in seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0; it is {text!r}")
    return number
