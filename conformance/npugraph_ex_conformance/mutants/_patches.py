"""Replacements that several mutants use: each takes the right thing and gives the broken one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

Patch = Callable[[Any], Any]
FORMS = "npugraph_ex.lifting.forms."
"""Where the forms are; what follows names one, and a function of it."""


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


def with_arguments(change: Callable[..., tuple[Any, ...]]) -> Patch:
    """The same function with its positional arguments changed."""
    return lambda original: lambda *given, **named: original(*change(*given), **named)


def exchanged(build: Any) -> Any:
    """A build whose second and third operand change places."""
    return lambda emit, first, second, third: build(emit, first, third, second)


def without_alpha(added: Callable[..., fx.Node]) -> Patch:
    """What ``added`` finds among the arguments is read as if it were a plain sum."""

    def replacement(original: Any) -> Any:
        def read(*given: Any) -> Any:
            total = added(*given)
            kept, total.kwargs = total.kwargs, {}
            found = original(*given)
            total.kwargs = kept
            return found

        return read

    return replacement
