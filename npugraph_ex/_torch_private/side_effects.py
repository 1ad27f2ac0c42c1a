"""What a function that Dynamo compiles changes besides the contents of tensors, once the call is over."""

# ruff: noqa: SLF001 - reaching behind underscores is this package's whole purpose

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_ABSENT = object()
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset)
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class LastingChange:
    """What a function changes besides the contents of tensors.

    Attributes:
        name: by Dynamo's names, a global by its module's.
        is_new: whether an attribute that was not there, or was None, is set.
        counter_of: the class, and the installed package, whose object keeps a number there; empty for all else.
    """

    name: str
    is_new: bool = False
    counter_of: str = ""


@contextmanager
def without_side_effects(*, compilations: int) -> Iterator[None]:
    """Dynamo's settings for compiled code that does nothing but run its graph and arrange the results.

    Within the block Dynamo refuses functions with other effects, unless the backend calls `allow_side_effects`. It refuses guards
    on hooks of modules, and takes floats as constants.

    Args:
        compilations: how often it may compile one function.
    """
    with torch._dynamo.config.patch(
        side_effect_replay_policy="error",
        skip_nnmodule_hook_guards=False,
        specialize_float=True,
        recompile_limit=compilations,
        accumulated_recompile_limit=compilations,
    ):
        yield


def allow_side_effects() -> None:
    """Let Dynamo go on with the functions that this call compiles, whatever they change; for a backend that asked."""
    torch._dynamo.config.side_effect_replay_policy = "silent"


def lasting_changes() -> list[LastingChange]:
    """What the function that is being compiled changes; for a backend.

    An attribute that has at the end what it had at the beginning is left out: the object that the code read there, or a constant
    equal to the one that is there now.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    output = InstructionTranslator.current_tx().output
    effects, found = output.side_effects, list[LastingChange]()
    for variable in effects._get_modified_vars():
        if not isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
            continue
        if _is_stack_as_before(variable, len(output.torch_function_mode_stack)):
            continue
        name = re.sub(r"^G\['(\w+)'\]", lambda alias: _module(alias, output.import_sources), _name(variable.source))
        stored = effects.store_attr_mutations.get(variable, {})
        if not stored or isinstance(getattr(variable, "value", None), _CONTAINERS):
            found.append(LastingChange(name))
        found += [
            LastingChange(f"{name}.{attribute}", *_kind(getattr(variable, "value", None), attribute))
            for attribute, new in stored.items()
            if not _restored(variable, attribute, new)
        ]
    return found


def _is_stack_as_before(variable: Any, modes: int) -> bool:
    """Whether this is the stack of torch function modes, from which the function has taken all modes that it put there."""
    from torch._dynamo.source import TorchFunctionModeStackSource
    from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable

    return isinstance(variable, TorchFunctionModeStackVariable) and [
        mode.source for mode in variable.symbolic_stack
    ] == [TorchFunctionModeStackSource(position) for position in range(modes)]


def _value(holder: object, attribute: str) -> object:
    return getattr(holder, "__dict__", {}).get(attribute, _ABSENT)


def _kind(holder: object, attribute: str) -> tuple[bool, str]:
    """Whether the attribute is new, and the class that keeps a number in it if an installed package has that class."""
    old, home = _value(holder, attribute), type(holder).__module__
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    counts = type(old) in {int, float} and not _INSTALLED.isdisjoint(Path(file).parts)
    counter_of = f"{type(holder).__qualname__} of the installed package {home.partition('.')[0]}" if counts else ""
    return old is _ABSENT or old is None, counter_of


def _name(source: Any) -> str:
    try:
        name = getattr(source, "name", "")
        return str(name() if callable(name) else name)
    except NotImplementedError:
        return ""


def _module(alias: re.Match[str], imported: dict[str, str]) -> str:
    return f"G['{imported.get(alias[1], alias[1])}']"


def _restored(variable: Any, attribute: str, new: Any) -> bool:
    """Whether what is stored at the end is what was there at the beginning."""
    from torch._dynamo.source import AttrSource

    if new.source is not None and new.source == AttrSource(variable.source, attribute):
        return True
    holder = getattr(variable, "value", None)
    if hasattr(inspect.getattr_static(type(holder), attribute, None), "__set__") or not new.is_python_constant():
        return False
    old, value = _value(holder, attribute), new.as_python_constant()
    return old is value or (type(old) is type(value) and isinstance(value, _CONSTANTS) and repr(old) == repr(value))
