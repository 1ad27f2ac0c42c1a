"""What a compilation took for granted and no guard of its own checks: sources, globals, functions held by modules.

Torch writes down guards on values; it leaves out those on identities and on globals, which mean nothing elsewhere as they
are. Here they are written down by content, and compared when a saved compilation is looked at.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import itertools
import json
import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from npugraph_ex._torch_private.precompile import Guard, Precompiled, serialisable
from npugraph_ex.cache.fingerprint import fingerprint
from npugraph_ex.inference.replaced_code import replaced_code
from npugraph_ex.report.names import program_name
from npugraph_ex.saving.values import Unsaveable

_BY_VALUE = frozenset(
    {"BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "FUNCTION_MATCH", "ID_MATCH"}
)
_OF_A_CLASS = re.compile(r"\btype\(")
"""In the expression of a guard: attributes of a class, which Dynamo reads from ``type(self)``."""
_BY_LENGTH = frozenset({"SEQUENCE_LENGTH", "DICT_KEYS", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"})


@dataclass
class Assumptions:
    """Collected while a function is compiled.

    Attributes:
        values: fingerprints by the expression that guards use for the value.
        compared: what torch's own guards compare of arguments, as text that is the same in each process. Of a tensor without
            its sizes: the graph has those that matter.
    """

    values: dict[str, str] = field(default_factory=dict)
    compared: list[str] = field(default_factory=list)

    def keep_guards(self, guards: Sequence[Guard]) -> list[bool]:
        """Say which guards torch may write down, and remember what the others say."""
        kept = [serialisable(guard) for guard in guards]
        self.compared += sorted(filter(None, (_compared(guard) for guard in itertools.compress(guards, kept))))
        for guard, itself in zip(guards, kept, strict=True):
            # A guard on what a class holds is saved without its value: in another process it would compare that process's own.
            if (itself and not _OF_A_CLASS.search(guard.name)) or not guard.has_value or guard.name in self.values:
                continue
            if guard.guard_type in _BY_VALUE:
                self.values[guard.name] = fingerprint(guard.value)
            elif guard.guard_type in _BY_LENGTH:
                self.values[guard.name] = f"length {len(guard.value)}"
        return kept

    def header(self, made: Precompiled, fixed: Mapping[str, object]) -> dict[str, str]:
        """The assumptions as the header of a file has them.

        Args:
            made: the compilation.
            fixed: what is the same in every call, by name: ``self``, and what the function closes over.

        Raises:
            Unsaveable: an assumption on an argument of the call, which a look at the file could not check.
        """
        imports = made.imports()
        values = {name: known for name, known in self.values.items() if not _is_of_torch(name, imports)}
        for name in values:
            root = _root(name)
            if root != "G" and root not in fixed:
                raise Unsaveable(f"what {program_name(name)} is decides, and {root} may be another one at each call")
        sources = {
            f"{module}:{first}-{last}": _digest_of_lines(module, first, last) for module, first, last in made.sources()
        }
        known = {"values": values, "sources": sources, "imports": imports, "replaced": replaced_code(fixed)}
        return {name: json.dumps(what, sort_keys=True) for name, what in known.items()}


def _compared(guard: Guard) -> str:
    """What a guard on an argument or on a part of one compares; empty where it is something else, or no plain value."""
    value = None if guard.is_global or not guard.has_value else guard.value
    if isinstance(value, torch.Tensor):
        flags = value.requires_grad, value.is_inference(), value.is_conj(), value.is_neg()
        return f"{guard.name}: {type(value).__qualname__} {value.dtype} {value.device.type} {flags}"
    if guard.guard_type in _BY_VALUE and isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return f"{guard.name}: {value!r}"
    return ""


def _is_of_torch(expression: str, imports: Mapping[str, str]) -> bool:
    """Whether a guard speaks of what comes with Python or torch, whose versions the key covers."""
    found = re.match(r"G\['(\w+)'\]", expression)
    name = found[1] if found else ""
    return name.startswith("__builtins_dict") or imports.get(name, "").split(".")[0] == "torch"


def _root(expression: str) -> str:
    """The variable that an expression of a guard starts from, beneath calls such as ``type(...)``."""
    names = [part.id for part in ast.walk(ast.parse(expression, mode="eval")) if isinstance(part, ast.Name)]
    return next((name for name in names if not hasattr(builtins, name)), "")


def outdated(header: Mapping[str, str], f_globals: Mapping[str, Any], f_locals: Mapping[str, Any]) -> str | None:
    """The first assumption of a file that no longer holds, in words; None if all do."""
    for where, digest in json.loads(header["sources"]).items():
        module, _, lines = where.rpartition(":")
        first, _, last = lines.partition("-")
        try:
            now = _digest_of_lines(module, int(first), int(last))
        except (ImportError, OSError, TypeError) as error:
            return f"the source of {where} cannot be read: {error}"
        if now != digest:
            return f"the source of {where} has changed"
    replaced, replaced_now = json.loads(header["replaced"]), replaced_code(f_locals)
    for name in {**replaced, **replaced_now}:
        if replaced.get(name) != replaced_now.get(name):
            return f"{name} has changed"
    known_globals = {**f_globals, **_modules(json.loads(header["imports"]))}
    for name, known in json.loads(header["values"]).items():
        try:
            value = eval(name, {"G": known_globals}, dict(f_locals))  # noqa: S307 - from a file that only this user can write
        except Exception as error:  # noqa: BLE001 - whatever it raises, the value is not there
            return f"{program_name(name)} is not there: {error}"
        now = f"length {len(value)}" if known.startswith("length ") else fingerprint(value)
        if now != known:
            return f"{_class_attribute(name, known_globals, f_locals) or program_name(name)} has changed"
    return None


def _class_attribute(name: str, known_globals: Mapping[str, Any], f_locals: Mapping[str, Any]) -> str:
    """Dynamo's ``dict(type(self).__mro__[1].__dict__)['K']`` as ``Base.K``; empty for what is no attribute of a class."""
    found = re.match(r"(?:dict\()?(type\(.*\)(?:\.__mro__\[\d+\])?)\.__dict__\)?\['(\w+)'\](.*)", name)
    if found is None:
        return ""
    owner = eval(found[1], {"G": known_globals}, dict(f_locals))  # noqa: S307 - as above
    return f"{owner.__qualname__}.{found[2]}{found[3]}"


def _modules(imports: Mapping[str, str]) -> dict[str, object]:
    """The modules by the names that Dynamo gave them, those of torch left out."""
    return {
        name: importlib.import_module(module) for name, module in imports.items() if module.split(".")[0] != "torch"
    }


def _digest_of_lines(module: str, first: int, last: int) -> str:
    file = inspect.getsourcefile(importlib.import_module(module))
    lines = linecache.getlines(file) if file is not None else []
    if not lines:
        raise OSError(f"module {module} has no source")
    return hashlib.sha256("".join(lines[first - 1 : last - 1]).encode()).hexdigest()
