"""What a compilation took for granted and no guard of its own checks: sources, globals, functions held by modules.

Torch writes down guards on values; it leaves out those on identities and on globals, which mean nothing elsewhere as they
are. Here they are written down by content, and compared when a saved compilation is looked at.
"""

from __future__ import annotations

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
from torch import fx

from npugraph_ex._torch_private.precompile import Guard, Precompiled, serialisable
from npugraph_ex.cache.source_files import digest_of, files_of, home_of, users_modules
from npugraph_ex.inference.absences import absences, appeared
from npugraph_ex.inference.conditions import OF_VALUES, Conditions, expression_of, root
from npugraph_ex.inference.replaced_code import classes_of, replaced_code
from npugraph_ex.report.names import program_name
from npugraph_ex.saving.values import Unsaveable

_NAMESPACES = frozenset(
    {"aten", "prims", "npu", "npugraph_ex", "c10d", "c10d_functional", "_c10d_functional", "higher_order"}
)
"""Of the operators that come with torch, torch_npu and this library."""
_ARRAY = re.compile(r"___from_numpy\((.*)\)")
"""In the expression of a guard: an array of NumPy, as Dynamo makes a tensor of it."""
_OF_A_CLASS = re.compile(r"\btype\(")
"""In the expression of a guard: attributes of a class, which Dynamo reads from ``type(self)``."""


@dataclass
class Assumptions:
    """Collected while a function is compiled.

    Attributes:
        values: fingerprints by the expression that guards use for the value.
        compared: what torch's own guards compare of arguments, as text that is the same in each process. Of a tensor without
            its sizes: the graph has those that matter.
        modules: those whose files decide what the values and the operators are.
    """

    values: dict[str, str] = field(default_factory=dict)
    compared: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)

    def keep_guards(self, guards: Sequence[Guard]) -> list[bool]:
        """Say which guards torch may write down, and remember what the others say.

        Raises:
            Unsaveable: the function reads an array of NumPy.
        """
        kept = [serialisable(guard) for guard in guards]
        self.compared += sorted(filter(None, (_compared(guard) for guard in itertools.compress(guards, kept))))
        for guard, itself in zip(guards, kept, strict=True):
            array = _ARRAY.fullmatch(guard.name)
            if array:  # no expression of this library asks for it, and torch would keep the array itself
                raise Unsaveable(
                    f"it reads the NumPy array {program_name(array[1])}; make it a tensor before the call, such as a buffer"
                )
            if guard.has_value:
                kind = guard.value if isinstance(guard.value, type) else type(guard.value)
                self.modules.update({home_of(guard.value), *map(home_of, kind.__mro__)})
            # A guard on what a class holds is saved without its value: in another process it would compare that process's own.
            if itself and not _OF_A_CLASS.search(guard.name):
                continue
            found = expression_of(guard)
            if found is not None:
                self.values.setdefault(*found)
        return kept

    def follow_operators(self, gm: fx.GraphModule) -> None:
        """Take the program's own modules for what its own operators are made of, which may be traced into.

        Torch does not say which functions an operator was given, so all of them count.
        """
        graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
        called = {node.target for graph in graphs for node in graph.nodes}
        kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
        if any(isinstance(one, kinds) and str(one).partition(".")[0] not in _NAMESPACES for one in called):
            self.modules.update(users_modules())

    def conditions(self, made: Precompiled, f_globals: Mapping[str, Any]) -> Conditions:
        """What is asked at each call in this process."""
        return Conditions(self._of_the_program(made), f_globals, made.imports())

    def _of_the_program(self, made: Precompiled) -> dict[str, str]:
        imports = made.imports()
        return {name: known for name, known in self.values.items() if not _is_of_torch(name, imports)}

    def header(self, made: Precompiled, fixed: Mapping[str, object]) -> dict[str, str]:
        """The assumptions as the header of a file has them.

        Args:
            made: the compilation.
            fixed: what is the same in every call, by name: ``self``, and what the function closes over.

        Raises:
            Unsaveable: an assumption on an argument of the call, which a look at the file could not check.
        """
        imports, values = made.imports(), self._of_the_program(made)
        for name in values:
            variable = root(name)
            if variable != "G" and variable not in fixed:
                raise Unsaveable(
                    f"what {program_name(name)} is decides, and {variable} may be another one at each call"
                )
        sources = {
            f"{module}:{first}-{last}": _digest_of_lines(module, first, last) for module, first, last in made.sources()
        }
        functions: dict[str, list[tuple[int, int]]] = {}
        for module, first, last in made.sources():
            if module.split(".")[0] not in {"torch", "torch_npu"}:  # the key covers their versions
                functions.setdefault(module, []).append((first, last))
        absent = {
            module: absences(importlib.import_module(module), "".join(_lines(module)), lines)
            for module, lines in functions.items()
        }
        modules = {*self.modules, *(module for module, *_ in made.sources()), *map(home_of, classes_of(fixed))}
        files = files_of(modules)
        known = {
            "values": values, "sources": sources, "imports": imports, "replaced": replaced_code(fixed), "files": files,
            "absent": absent,
        }  # fmt: skip
        return {name: json.dumps(what, sort_keys=True) for name, what in known.items()}


def _compared(guard: Guard) -> str:
    """What a guard on an argument or on a part of one compares; empty where it is something else, or no plain value."""
    value = None if guard.is_global or not guard.has_value else guard.value
    if isinstance(value, torch.Tensor):
        flags = value.requires_grad, value.is_inference(), value.is_conj(), value.is_neg()
        return f"{guard.name}: {type(value).__qualname__} {value.dtype} {value.device.type} {flags}"
    if guard.guard_type in OF_VALUES and isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return f"{guard.name}: {value!r}"
    return ""


def _is_of_torch(expression: str, imports: Mapping[str, str]) -> bool:
    """Whether a guard speaks of what comes with Python or torch, whose versions the key covers."""
    found = re.search(r"G\['(\w+)'\]", expression)
    name = found[1] if found else ""
    return name.startswith("__builtins_dict") or imports.get(name, "").split(".")[0] == "torch"


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
    for module, expressions in json.loads(header["absent"]).items():
        there = appeared(importlib.import_module(module), expressions)
        if there is not None:
            return f"{there}, which was absent, is there in {module}"
    replaced, replaced_now = json.loads(header["replaced"]), replaced_code(f_locals)
    for name in {**replaced, **replaced_now}:
        if replaced.get(name) != replaced_now.get(name):
            return f"{name} has changed"
    broken = conditions_in(header, f_globals).broken(f_locals)
    if broken is not None:
        return broken
    files = json.loads(header["files"]).items()
    return next(
        (f"the file of the module {name} has changed" for name, known in files if digest_of(name) != known), None
    )


def conditions_in(header: Mapping[str, str], f_globals: Mapping[str, Any]) -> Conditions:
    """What the header of a file has to be asked in this process."""
    return Conditions(json.loads(header["values"]), f_globals, json.loads(header["imports"]))


def _digest_of_lines(module: str, first: int, last: int) -> str:
    return hashlib.sha256("".join(_lines(module)[first - 1 : last - 1]).encode()).hexdigest()


def _lines(module: str) -> list[str]:
    file = inspect.getsourcefile(importlib.import_module(module))
    lines = linecache.getlines(file) if file is not None else []
    if not lines:
        raise OSError(f"module {module} has no source")
    return lines
