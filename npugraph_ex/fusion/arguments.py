"""The effective value of each schema argument of a node.

Two calls of one operator do the same exactly when these values are equal. An omitted argument equals its written default, a
positional one equals the same keyword, a dtype equals its code, and ``None`` equals its meaning.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.fusion.canonical_arguments import CANONICALISERS, Canonicaliser, from_record
from npugraph_ex.operators import CODE_OF_DTYPE, OPERATORS, Operator, record_of


class _Slot:
    """One schema argument, prepared for fast reads from many nodes."""

    __slots__ = ("default", "is_code", "name", "positional", "synonyms")

    def __init__(self, record: Operator | None, argument: torch.Argument) -> None:
        self.name: str = argument.name
        self.positional = not argument.kwarg_only
        self.is_code = "int" in str(argument.type)
        self.synonyms = record.synonyms.get(argument.name, {}) if record is not None else {}
        self.default = self.normal(argument.default_value) if argument.has_default_value() else None

    def normal(self, value: Any) -> Any:
        """The form of ``value`` for comparisons."""
        if isinstance(value, (list, tuple)):
            return tuple(value)
        if self.is_code and isinstance(value, torch.dtype):
            value = CODE_OF_DTYPE.get(value, value)
        return self.synonyms.get(value, value) if self.synonyms and isinstance(value, int) else value


@cache
def _slots(overload: OpOverload) -> tuple[_Slot, ...]:
    record = record_of(overload)
    return tuple(_Slot(record, argument) for argument in _torch_private.schema(overload).arguments)


@cache
def _canonicaliser(overload: OpOverload) -> Canonicaliser | None:
    record = record_of(overload)
    if record is not None and record.canonical is not None:
        return from_record(record.canonical, argument_names(overload))
    return CANONICALISERS.get(str(overload))


def _forget(name: str, record: Operator) -> None:  # noqa: ARG001 - a listener takes both
    """Forget prepared values that are out of date because a record was added."""
    _slots.cache_clear()
    _canonicaliser.cache_clear()


OPERATORS.listen(_forget)


def argument_names(overload: OpOverload) -> tuple[str, ...]:
    """The schema's argument names, in order."""
    return tuple(slot.name for slot in _slots(overload))


def effective_arguments(node: fx.Node) -> tuple[Any, ...]:
    """One value for every schema argument of the overload that ``node`` calls, in schema order."""
    args, kwargs = node.args, node.kwargs
    values = []
    for position, slot in enumerate(_slots(node.target)):
        if slot.positional and position < len(args):
            values.append(slot.normal(args[position]))
        elif slot.name in kwargs:
            values.append(slot.normal(kwargs[slot.name]))
        else:
            values.append(slot.default)
    canonicalise = _canonicaliser(node.target)
    if canonicalise is not None:
        canonicalise(node, values)
    return tuple(values)
