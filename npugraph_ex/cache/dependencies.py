"""What the functions of a user reach by global names: helpers, classes and constants, which decide what they do as well.

A rule or a pass is known to the key by its own source and what it closes over (`fingerprint`). The helper that it calls stands
in a module. The user's modules alone are followed: an installed package changes with its version.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from npugraph_ex.cache.fingerprint import code_digest, fingerprint

__all__ = ["reached"]

_NOT_THE_USERS = frozenset(
    {"torch", "torch_npu", "npugraph_ex", "npugraph_ex_conformance", "npu_emulator", *sys.stdlib_module_names}
)
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
)  # fmt: skip

_DEEPEST = 5


def reached(values: Iterable[object]) -> list[str]:
    """Spell, in no order that depends on the process, the code and the constants that ``values`` reach.

    Args:
        values: functions, methods, callable objects, and containers of such.

    Returns:
        A line for each function of the user's and each plain global that one of them names, sorted.
    """
    walk = _DependencyWalk()
    pending = list(values)
    while pending:
        pending += walk.visit(pending.pop())
    return sorted(walk.lines)


class _DependencyWalk:
    """Visits each value once."""

    def __init__(self) -> None:
        self.lines: set[str] = set()
        self._seen: dict[int, object] = {}  # keeps them alive, or another could get the number of one that is gone

    def visit(self, value: object) -> list[object]:
        """Take a value down and return what it leads to."""
        if isinstance(value, (*_PLAIN, torch.Tensor)) or id(value) in self._seen:
            return []
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            return self._function(value) if _is_users(value.__globals__.get("__name__")) else []
        parts = _parts(value)
        if parts is not None:
            return parts
        kind = value if isinstance(value, type) else type(value)
        if not _is_users(kind.__module__):
            return []
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        named = [(f"{kind.__module__}.{kind.__qualname__}.{name}", part) for name, part in attributes.items()]
        return [*self._named(named), *kind.__mro__]

    def _function(self, function: FunctionType) -> list[object]:
        name = f"{function.__module__}.{function.__qualname__}"
        self.lines.add(f"{name} {code_digest(function.__code__)}")
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_assigned(cell)]
        own = [(f"{name}({position})", cell) for position, cell in enumerate(cells)]
        defaults = {"()": function.__defaults__, "(*)": function.__kwdefaults__}
        own += [(f"{name}{kind}", values) for kind, values in defaults.items() if values]
        return self._named([*own, *_globals(function.__globals__, frozenset(_names(function.__code__)))])

    def _named(self, values: Iterable[tuple[str, object]]) -> list[object]:
        """Take the constants among named values down; return the others."""
        others = []
        for name, value in values:
            if not _is_plain(value):
                others.append(value)
            elif not name.endswith("__"):
                self.lines.add(f"{name} = {fingerprint(value)}")
        return others


def _parts(value: object) -> list[object] | None:
    """What a container, or what stands around functions, holds; None for every other value."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else None


def _globals(namespace: Mapping[str, Any], names: frozenset[str]) -> Iterator[tuple[str, object]]:
    """The globals of those names, and of the user's modules among them the attributes of those names."""
    pending, seen = [namespace], set()
    while pending:
        here = pending.pop()
        seen.add(id(here))
        for name in names & here.keys():
            value = here[name]
            if not isinstance(value, ModuleType):
                yield f"{here.get('__name__')}.{name}", value
            elif _is_users(value.__name__) and id(vars(value)) not in seen:
                pending.append(vars(value))


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is a constant, or a container of nothing else, not too deep (it may contain itself)."""
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return isinstance(value, _PLAIN)
    parts = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
    return depth < _DEEPEST and all(_is_plain(part, depth + 1) for part in parts)


def _is_assigned(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_users(module: str | None) -> bool:
    """Whether a module is neither of Python's, of torch's, of this library's, nor installed as a package."""
    if module is None or module.partition(".")[0] in _NOT_THE_USERS:
        return module == "__main__"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not file.startswith(tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib")))
