"""Code of a model that no guard asks for: hooks, and functions that stand in a class instead of its own.

Dynamo takes for granted that neither changes. Within a process that is the rule of torch; a saved compilation may meet a
process that was set up in another way.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from npugraph_ex import _torch_private

_TORCH = str(Path(torch.__file__).parent)
_DEEPEST = 3
"""How many functions within functions are followed."""


def replaced_code(values: Mapping[str, object]) -> dict[str, str]:
    """What stands in place of, or beside, the code that the classes of models have in their files.

    Args:
        values: by name, what a function is bound to and closes over; of each, the modules in it and their classes count.

    Returns:
        A digest of each hook's and each such function's code; empty for most models.
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        for place, part in _parts(name, value):
            hooks = _torch_private.hooks_of(part) if isinstance(part, nn.Module) else []
            if hooks:
                found[f"a hook of {place}"] = _digest(*hooks)
    for owner in classes_of(values):
        for name, member in vars(owner).items():
            function = _function(member)
            if function is not None and not _is_its_own(owner, name, function):
                found[f"{owner.__module__}.{owner.__qualname__}.{name}"] = _digest(function)
    return found


def classes_of(values: Mapping[str, object]) -> dict[type, None]:
    """The classes of those values, of the modules in them and of the objects that these hold, bases included."""
    classes: dict[type, None] = {}
    for name, value in values.items():
        for _, part in _parts(name, value):
            classes.update(dict.fromkeys(type(part).__mro__[:-1]))
            classes.update(dict.fromkeys(base for held in vars(part).values() for base in _own_classes(held)))
    return classes


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The value if it is an object, and the modules in it or in its attributes, each with its name."""
    if isinstance(value, nn.Module):
        for path, part in value.named_modules():
            yield f"{name}.{path}" if path else name, part
    elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType)):
        yield name, value
        for attribute, held in vars(value).items():
            if isinstance(held, nn.Module):
                yield from _parts(f"{name}.{attribute}", held)


def _own_classes(value: object) -> tuple[type, ...]:
    """The classes of an object that has attributes of its own; those of a module come by the module."""
    plain = hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, nn.Module))
    return type(value).__mro__[:-1] if plain else ()


def _function(member: object) -> FunctionType | None:
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return member if isinstance(member, FunctionType) else None


def _is_its_own(owner: type, name: str, function: FunctionType) -> bool:
    """Whether a function was written in its class, whose source is compared where it is traced; torch may replace its own."""
    written_by = function.__code__.co_filename
    if written_by.startswith(_TORCH if owner.__module__.startswith("torch.") else f"{_TORCH}/_dynamo/"):
        return True
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    code = function.__code__
    written = getattr(
        code, "co_qualname", function.__qualname__
    )  # since Python 3.11, also where a wrapper took the name over
    return code.co_filename == file and written == f"{owner.__qualname__}.{name}"


def _digest(*functions: object) -> str:
    return hashlib.sha256(repr([_spelled(function) for function in functions]).encode()).hexdigest()[:16]


def _spelled(value: Any, depth: int = 0) -> object:
    """A function by its bytecode, its defaults and what it closes over; another object by its type."""
    function = getattr(value, "__func__", value)
    if isinstance(function, FunctionType) and depth < _DEEPEST:
        around = [_spelled(part, depth + 1) for part in (*_closed_over(function), *(function.__defaults__ or ()))]
        return _bytecode(function.__code__), around
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _closed_over(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not yet assigned
            yield cell.cell_contents


def _bytecode(code: CodeType) -> object:
    constants = [_bytecode(one) if isinstance(one, CodeType) else _constant(one) for one in code.co_consts]
    return code.co_code.hex(), constants, code.co_names


def _constant(value: object) -> object:
    """A constant; a set in an order that is the same in each process."""
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
