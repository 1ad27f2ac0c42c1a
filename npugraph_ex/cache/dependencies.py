"""What the functions of a user reach by global names: helpers, classes and constants, which decide what they do as well.

A rule or a pass is known to the key by its own source and what it closes over (`fingerprint`). The helper that it calls stands
in a module. The user's modules are followed, and an installed package if a rule or a pass comes from it.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch

from npugraph_ex.cache.fingerprint import code_digest, fingerprint
from npugraph_ex.cache.source_files import files_of, is_followed, is_users

__all__ = ["reached"]

_Named = tuple[str, object]
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
)  # fmt: skip
_MAPPINGS = (dict, MappingProxyType)
_DEEPEST = 5
_LARGE = 1 << 20
"""Bytes of a tensor whose content does not count."""
_OF_ANY_CLASS = frozenset({"__annotations__", "__dict__", "__static_attributes__", "__weakref__"})
_WEIGHTS = frozenset({"_parameters", "_buffers"})


def reached(values: Iterable[object]) -> list[str]:
    """Spell, in no order that depends on the process, the code and the constants that ``values`` reach.

    Args:
        values: functions, methods, callable objects, and containers of such.

    Returns:
        A line for each function of the user's, each constant that one of them names, and each file that they stand in, sorted.
    """
    walk, first = _DependencyWalk(), list(values)
    pending = deque((f"[{number}]", value) for number, value in enumerate(first))
    while pending:
        pending += walk.visit(*pending.popleft())
    return sorted(walk.lines | {f"{name} in {digest}" for name, digest in files_of(walk.modules).items()})


class _DependencyWalk:
    """Visits each value once, breadth first, so that what is reached in two ways has the same name in each process."""

    def __init__(self) -> None:
        self.lines: set[str] = set()
        self.modules: set[str] = set()
        self._packages: set[str] = set()  # installed ones that functions given by the user come from
        self._seen: dict[int, object] = {}  # keeps them alive, or another could get the number of one that is gone

    def visit(self, name: str, value: object) -> list[_Named]:
        """Take a value down and return what it leads to, each with its name."""
        if _is_plain(value):
            if not name.endswith("__"):
                self.lines.add(f"{name} = {fingerprint(value)}")
            return []
        if id(value) in self._seen or isinstance(value, ModuleType) or value is os.environ:
            return []
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.lines.add(f"{name} = {_tensor(value)}")
            return []
        if isinstance(value, FunctionType):
            return self._function(name, value)
        if isinstance(value, type):
            return self._class(value)
        parts = _parts(value)
        return [(f"{name}{at}", part) for at, part in parts] if parts is not None else self._object(name, value)

    def _function(self, name: str, function: FunctionType) -> list[_Named]:
        module = function.__globals__.get("__name__")
        if name.startswith("[") and is_followed(module):  # given by the user, or what a given one closes over
            self._packages.add(str(module).partition(".")[0])
        cells = [
            (f"{name}({at})", cell.cell_contents)
            for at, cell in enumerate(function.__closure__ or ())
            if _is_assigned(cell)
        ]
        if not self._follows(module):  # it may stand around one of the user's
            return [(at, part) for at, part in cells if isinstance(part, (FunctionType, MethodType, functools.partial))]
        written = f"{function.__module__}.{function.__qualname__}"
        self.modules.add(str(module))
        self.lines.add(f"{written} {code_digest(function.__code__)}")
        around = [*cells, ("()", function.__defaults__), ("(*)", function.__kwdefaults__)]
        around.append((".__wrapped__", getattr(function, "__wrapped__", None)))
        own = [(f"{written}{at.removeprefix(name)}", part) for at, part in around if part is not None]
        return [*own, *_globals(function.__globals__, frozenset(_names(function.__code__)))]

    def _class(self, kind: type) -> list[_Named]:
        if not self._follows(kind.__module__):
            return []
        self.modules.add(kind.__module__)
        name = f"{kind.__module__}.{kind.__qualname__}"
        own = [(f"{name}.{at}", part) for at, part in sorted(vars(kind).items()) if at not in _OF_ANY_CLASS]
        return [*own, *((f"{name} of {base.__qualname__}", base) for base in kind.__bases__)]

    def _object(self, name: str, value: object) -> list[_Named]:
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            own = [(f"{name}.{at}", part) for at, part in sorted(vars(value).items()) if at not in _WEIGHTS]
            return [*own, (f"{name} is", kind)]
        if kind.__module__.partition(".")[0] == "torch":
            self.lines.add(f"{name} = {value if isinstance(value, torch._ops.OpOverload) else kind.__qualname__}")
            return []
        if self._follows(kind.__module__) and not _has_other_state(kind):
            slots = {at: getattr(value, at) for base in kind.__mro__ for at in _slots(base) if hasattr(value, at)}
            attributes = {**slots, **getattr(value, "__dict__", {})}
            return [*((f"{name}.{at}", part) for at, part in sorted(attributes.items())), (f"{name} is", kind)]
        return [*((f"{name}<{at}>", part) for at, part in _reduced(value)), (f"{name} is", kind)]

    def _follows(self, module: object) -> bool:
        return isinstance(module, str) and (is_users(module) or module.partition(".")[0] in self._packages)


_STATE = 2
"""In what a class is reduced to; behind it stand iterators over elements."""


def _has_other_state(kind: type) -> bool:
    """Whether an object is more than its attributes, as an array is."""
    usual = {object.__reduce__, object.__reduce_ex__}
    return not {kind.__reduce__, kind.__reduce_ex__} <= usual or kind in copyreg.dispatch_table


def _reduced(value: Any) -> list[tuple[int, object]]:
    """What an object is made from again, as for pickle; empty where it cannot be."""
    reduce: Callable[[Any], Any] = copyreg.dispatch_table.get(type(value), lambda one: one.__reduce_ex__(2))
    try:
        reduced = reduce(value)
    except Exception:  # noqa: BLE001 - it has a state that cannot be written down, and may raise anything
        return []
    parts = reduced if isinstance(reduced, tuple) else (reduced,)
    return [(at, [*part] if at > _STATE and part is not None else part) for at, part in enumerate(parts)]


def _parts(value: object) -> list[_Named] | None:
    """What a container, or what stands around functions, holds; None for every other value."""
    if isinstance(value, MethodType):
        return [("", value.__func__), (".__self__", value.__self__)]
    if isinstance(value, functools.partial):
        return [("", value.func), ("()", value.args), ("(*)", value.keywords)]
    if isinstance(value, (staticmethod, classmethod)):
        return [("", value.__func__)]
    if isinstance(value, property):
        return [(".get", value.fget), (".set", value.fset)]
    if callable(value) and isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):
        return [("", wrapped)]
    if isinstance(value, _MAPPINGS):
        items = [(_key(key), key, part) for key, part in _items(value)]
        keys = [(f"[{said}]", key) for said, key, _ in items if not _is_plain(key)]
        return [*keys, *((f"[{said}]", part) for said, _, part in items)]
    if isinstance(value, (set, frozenset)):
        return [("{}", part) for part in sorted(value, key=_key)]
    return [(f"[{at}]", part) for at, part in enumerate(value)] if isinstance(value, (list, tuple)) else None


def _items(value: Any) -> list[tuple[Any, Any]]:
    """The items of a mapping, also of a class whose own `items` would import what it is asked for."""
    return [*(dict.items(value) if isinstance(value, dict) else value.items())]


def _key(value: object) -> str:
    return fingerprint(value) if _is_plain(value) else str(value) if callable(value) else type(value).__qualname__


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _tensor(value: torch.Tensor) -> str:
    if value.numel() * value.element_size() <= _LARGE:
        return fingerprint(value)
    return f"{value.dtype} {tuple(map(str, value.shape))}"


def _globals(namespace: Mapping[str, Any], names: frozenset[str]) -> Iterator[_Named]:
    """The globals of those names, and of the user's modules among them the attributes of those names."""
    pending, seen = [namespace], set()
    while pending:
        here = pending.pop()
        seen.add(id(here))
        for name in sorted(names & here.keys()):
            value = here[name]
            if not isinstance(value, ModuleType):
                yield f"{here.get('__name__')}.{name}", value
            elif is_users(value.__name__) and id(vars(value)) not in seen:
                pending.append(vars(value))


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is a constant, or a container of nothing else, not too deep (it may contain itself)."""
    if not isinstance(value, (*_MAPPINGS, list, tuple, set, frozenset)):
        return isinstance(value, _PLAIN)
    parts = itertools.chain.from_iterable(_items(value)) if isinstance(value, _MAPPINGS) else value
    return depth < _DEEPEST and all(_is_plain(part, depth + 1) for part in parts)


def _is_assigned(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
