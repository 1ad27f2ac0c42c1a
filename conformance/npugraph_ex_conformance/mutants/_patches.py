"""Replacements that several mutants use: each takes the right thing and gives the broken one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Patch = Callable[[Any], Any]


def answering(answer: Any) -> Patch:
    """A function that always answers the same."""

    def replacement(original: Any) -> Any:
        del original
        return lambda *_args, **_kwargs: answer

    return replacement


def doing_nothing(original: Any) -> Any:
    """A function that does nothing."""
    del original
    return lambda *_args, **_kwargs: None


def with_result(change: Callable[[Any], Any]) -> Patch:
    """The same function with its result changed."""

    def replacement(original: Callable[..., Any]) -> Any:
        return lambda *args, **kwargs: change(original(*args, **kwargs))

    return replacement


def like(right: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
    """``wrong`` with the name and the parameters of ``right``, which are looked at."""
    wrong.__qualname__ = right.__qualname__
    wrong.__wrapped__ = right  # type: ignore[attr-defined]
    return wrong
