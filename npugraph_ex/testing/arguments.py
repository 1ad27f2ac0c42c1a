"""Checks arguments at the call against the annotations of the function or the class.

beartype was tried in its place. It looks at one random element of a list, so the same wrong call fails at one time and passes at
another; and it takes a bool for a number and a text for a sequence.

It is no type checker. It knows classes, unions, callables, and the contents of tuples, sequences and mappings; everything else
passes. A bool is not a number, a text is not a sequence, and a list is as good as a tuple.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
T = TypeVar("T")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function raise TypeError for an argument of another type than its annotation."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    several = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL]
    said = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        fitting = _fitting(function)
        given = [*zip(names, args, strict=False), *kwargs.items()]
        given += [(name, value) for name in several for value in args[len(names) :]]
        for name, value in given:
            if name in fitting and not fitting[name](value):
                raise _wrong(f"{said}({name}=...)", get_type_hints(function)[name], value)
        return function(*args, **kwargs)

    return call


def check_fields(instance: object) -> None:
    """Raise TypeError for a field of a dataclass of another type than its annotation."""
    kind: Any = type(instance)
    for name, fits in _fitting(kind).items():
        value = getattr(instance, name)
        if not fits(value):
            raise _wrong(f"{kind.__name__}.{name}", get_type_hints(kind)[name], value)


def check_least(name: str, value: float, least: int) -> None:
    """Raise ValueError unless a number is ``least`` or more; NaN is not."""
    if not value >= least:
        raise ValueError(f"{name} must be >= {least}; it is {value}.")


def check_folder(name: str, folder: Path) -> None:
    """Raise ValueError for a folder that cannot be written, now and not when there is something to write."""
    there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), folder)
    try:
        TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        raise ValueError(
            f"{name} must be a folder that can be written; it is {str(folder)!r} ({error.strerror})."
        ) from error


def _wrong(name: str, hint: Any, value: object) -> TypeError:
    text = repr(value)
    return TypeError(
        f"{name} must be of type {_words(hint)}; it is {text if len(text) < 100 else type(value).__name__}."
    )


@cache
def _fitting(target: Any) -> dict[str, Callable[[Any], bool]]:
    """A test for each annotated name, made at the first call, because annotations may name later definitions."""
    return {name: _test(hint) for name, hint in get_type_hints(target).items()}


@cache
def _test(hint: Any) -> Callable[[Any], bool]:
    """A test for values of this type. It is made once, because programs are drawn by the thousand."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        tests = [_test(one) for one in inner]
        return lambda value: any(fits(value) for fits in tests)
    if kind is Callable:
        return callable
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return lambda _: True
    if kind in (int, float):
        return lambda value: isinstance(value, (int, kind)) and not isinstance(value, bool)
    accepted = (tuple, list) if kind is tuple else kind
    if not inner:
        return lambda value: isinstance(value, accepted)
    holds = _test_of_contents(kind, inner)
    return lambda value: isinstance(value, accepted) and holds(value)


def _test_of_contents(kind: type, inner: Sequence[Any]) -> Callable[[Any], bool]:
    """A test for the contents of a container."""
    tests = [_test(one) for one in inner if one is not Ellipsis]
    if issubclass(kind, Mapping):
        of_key, of_item = tests
        return lambda value: all(of_key(key) and of_item(item) for key, item in value.items())
    if kind is tuple and inner[-1] is not Ellipsis:
        return lambda value: (
            len(value) == len(tests) and all(fits(item) for fits, item in zip(tests, value, strict=True))
        )
    if issubclass(kind, Sequence):
        return lambda value: not isinstance(value, (str, bytes)) and all(map(tests[0], value))
    return lambda _: True


def _words(hint: Any) -> str:
    """A type in words: "int", "sequence of Input", "str or None"."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    inner = [one for one in parts if one is not Ellipsis]
    if kind in (Union, UnionType):
        return " or ".join(map(_words, inner))
    if kind is NoneType:
        return "None"
    if kind is Callable:
        return "function"
    if not inner or not issubclass(kind, (Sequence, Mapping)):
        return "number" if kind is float else str(kind.__name__)
    joint = " to " if issubclass(kind, Mapping) else ", "
    return f"{kind.__name__.lower()} of {joint.join(map(_words, inner))}"
