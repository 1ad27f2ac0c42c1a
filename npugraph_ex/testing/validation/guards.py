"""The numbers that an ``extra_check`` mentions: sizes worth trying."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_DEEPEST = 6
_MOST_ITEMS = 64
_LARGEST = 1 << 16


def numbers_in(check: object) -> tuple[int, ...]:
    """The sizes that a guard mentions, in ascending order.

    Looks at constants of its code and of the functions that it calls by a global name, at what it closes over, and at
    the attributes of an object that is called. Nothing is called.
    """
    found = {number for number in _numbers(check, _DEEPEST) if 1 < number <= _LARGEST}
    return tuple(sorted(found))


def _numbers(value: object, depth: int) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif depth > 0:
        for inner in _inside(value):
            yield from _numbers(inner, depth - 1)


def _inside(value: object) -> Iterable[object]:
    """The parts of a value; nothing for a text, a class or a module."""
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return list(value)[:_MOST_ITEMS]
    if isinstance(value, CodeType):
        return value.co_consts
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        return (value.__code__, *_reached_from(value))
    if isinstance(value, (str, bytes, type, ModuleType)):
        return ()
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _reached_from(function: FunctionType) -> list[Any]:
    """The closure, the defaults and the globals of a function; of global functions, only those of its own module."""
    known = inspect.getclosurevars(function)
    beside = [
        value
        for value in known.globals.values()
        if not isinstance(value, FunctionType) or value.__module__ == function.__module__
    ]
    return [*known.nonlocals.values(), *beside, *(function.__defaults__ or ())]
