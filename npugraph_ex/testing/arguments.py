"""Says at the call what is wrong with an argument: compares it with the annotations of the function or the class.

No type checker: it knows classes, unions, what tuples, sequences and mappings hold, and that a function is called. All
else passes. A bool is no number, a text no sequence, a list as good as a tuple.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
T = TypeVar("T")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which raises TypeError for an argument that is not of the type that its annotation says."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    several = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL]
    said = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        hints = _hints(function)
        given = [*zip(names, args, strict=False), *kwargs.items()]
        given += [(name, value) for name in several for value in args[len(names) :]]
        for name, value in given:
            if not _fits(value, hints.get(name)):
                raise _wrong(f"{said}({name}=...)", hints[name], value)
        return function(*args, **kwargs)

    return call


def check_fields(instance: object) -> None:
    """Raise TypeError where a field of a dataclass is not of the type that its annotation says."""
    kind: Any = type(instance)
    for name, hint in _hints(kind).items():
        value = getattr(instance, name)
        if not _fits(value, hint):
            raise _wrong(f"{kind.__name__}.{name}", hint, value)


def check_least(name: str, value: float, least: int) -> None:
    """Raise ValueError unless a number is ``least`` or more; NaN is not."""
    if not value >= least:
        raise ValueError(f"{name} must be >= {least}; it is {value}.")


def _wrong(name: str, hint: Any, value: object) -> TypeError:
    text = repr(value)
    return TypeError(
        f"{name} must be of type {_words(hint)}; it is {text if len(text) < 100 else type(value).__name__}."
    )


@cache
def _hints(target: Any) -> dict[str, Any]:
    """Annotations by name. They are read at the first call: what they name may be defined below."""
    return get_type_hints(target)


@cache  # programs are made by the thousand
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint) or hint, get_args(hint)


def _fits(value: object, hint: Any) -> bool:
    kind, inner = _parts(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Callable:
        return callable(value)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not isinstance(value, (tuple, list) if kind is tuple else kind):
        return False
    return not inner or _holds(value, kind, inner)


def _holds(value: Any, kind: type, inner: Sequence[Any]) -> bool:
    """Whether what is in a container fits."""
    if issubclass(kind, Mapping):
        return all(_fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items())
    if kind is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if issubclass(kind, Sequence):
        return not isinstance(value, (str, bytes)) and all(_fits(item, inner[0]) for item in value)
    return True


def _words(hint: Any) -> str:
    """A type as it is said: "int", "sequence of Input", "str or None"."""
    kind, parts = _parts(hint)
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
