"""Conditions on the values that a match binds, for rules and users. Each returns None, or the reason against the match.

With symbolic sizes a condition holds for every value of the symbols, or it is *assumed*: it holds for the sizes of this
compilation, it becomes a guard of the compiled code if the match is replaced, and it appears in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor.pattern_matcher import Match
from torch.fx.experimental.symbolic_shapes import statically_known_true

from npugraph_ex._plurals import counted
from npugraph_ex.errors import ReplacementError

Condition = Callable[[Match], str | None]


class ConditionFailedError(ReplacementError):
    """A rule's condition or a user's ``extra_check`` raised or gave no answer; the rule is not tried again in this graph."""


_assumptions: ContextVar[list[torch.SymBool] | None] = ContextVar("assumptions", default=None)


@contextmanager
def collected_assumptions() -> Iterator[list[torch.SymBool]]:
    """The assumptions of ``holds`` within the block; a caller who uses the answer must add the guards."""
    assumed: list[torch.SymBool] = []
    token = _assumptions.set(assumed)
    try:
        yield assumed
    finally:
        _assumptions.reset(token)


def holds(condition: bool | torch.SymBool) -> bool:  # noqa: FBT001 - a question, not a switch
    """Whether ``condition`` is true for all values of its symbols, or (then assumed) for the sizes of this compilation."""
    if statically_known_true(condition):
        return True
    assumed = _assumptions.get()
    if assumed is None or not isinstance(condition, torch.SymBool) or not condition.node.has_hint():
        return False
    if not condition.node.hint:
        return False
    assumed.append(condition)
    return True


def same_sizes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have equal shapes, by ``holds``: equal sizes with different symbols are assumed."""
    return left.dim() == right.dim() and all(holds(a == b) for a, b in zip(left.shape, right.shape, strict=True))


def value_of(match: Match, name: str) -> torch.Tensor | None:
    """The fake tensor bound to the wildcard ``name``; None if this variant has no such tensor."""
    node = match.kwargs.get(name)
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def first_of(*conditions: Condition) -> Condition:
    """A condition that checks all ``conditions`` in order and returns the first reason against the match."""

    def condition(match: Match) -> str | None:
        return next((reason for one in conditions if (reason := one(match)) is not None), None)

    return condition


class MatchCheck:
    """An ``extra_check`` that says why it refuses a match. ``one & other`` refuses what one of the two refuses."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the search function's arguments that it looks at."""
        raise NotImplementedError

    def reason_against(self, match: Match) -> str | None:
        """None if the condition holds, otherwise what was found and what is required."""
        raise NotImplementedError

    def __call__(self, match: Match) -> bool:
        """Whether the condition holds."""
        return self.reason_against(match) is None

    def __and__(self, other: MatchCheck) -> MatchCheck:
        return _Both(self, other) if isinstance(other, MatchCheck) else NotImplemented


@dataclass(frozen=True)
class _Both(MatchCheck):
    """Two checks; the first reason counts."""

    first: MatchCheck
    second: MatchCheck

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.first.arguments + self.second.arguments

    def reason_against(self, match: Match) -> str | None:
        return self.first.reason_against(match) or self.second.reason_against(match)


@dataclass(frozen=True)
class ShapeRange(MatchCheck):
    """An ``extra_check``: the size of a dimension lies between two limits and is a multiple of a number.

    Attributes:
        argument: the name of a tensor argument of the search function.
        dim: the dimension, which must be given; negative from the end.
        at_least: the smallest size allowed, at least 0.
        at_most: the largest size allowed, at least 1; None for no limit.
        multiple_of: the size is a multiple of this number.

    Raises:
        ReplacementError: an attribute has another type or is too small, or no size can be within the limits.
    """

    argument: str
    dim: int = None  # type: ignore[assignment] # so that __post_init__ says what is missing
    at_least: int = 0
    at_most: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.argument, str):
            raise ReplacementError(f"ShapeRange: argument must be the name of an argument; it is {self.argument!r}.")
        for name in ("dim", "at_least", "at_most", "multiple_of"):
            value = getattr(self, name)
            if type(value) is not int and not (name == "at_most" and value is None):
                last = ", such as -1 for the last dimension" if name == "dim" else ""
                raise ReplacementError(f"ShapeRange: {name} must be a whole number{last}; it is {value!r}.")
        if self.multiple_of < 1:
            raise ReplacementError(f"ShapeRange: multiple_of must be at least 1; it is {self.multiple_of}.")
        if self.at_least < 0:
            raise ReplacementError(f"ShapeRange: at_least must be at least 0; it is {self.at_least}.")
        if self.at_most is not None and self.at_most < 1:
            raise ReplacementError(
                f"ShapeRange: at_most must be at least 1; it is {self.at_most}. None, the default, is no limit."
            )
        smallest = -(-self.at_least // self.multiple_of) * self.multiple_of
        if self.at_most is not None and smallest > self.at_most:
            raise ReplacementError(
                f"ShapeRange: no multiple of {self.multiple_of} lies between at_least={self.at_least} and "
                f"at_most={self.at_most}, so that the rule would never apply."
            )

    @property
    def arguments(self) -> tuple[str, ...]:
        """One name."""
        return (self.argument,)

    def reason_against(self, match: Match) -> str | None:
        """None if the condition holds, otherwise the found and the required size."""
        value = value_of(match, self.argument)
        if value is None or not -value.dim() <= self.dim < value.dim():
            return f"{self.argument} has no dimension {self.dim}"
        size = value.shape[self.dim]
        name = f"size {size} of dimension {self.dim} of {self.argument}"
        if not holds(size >= self.at_least):
            return f"{name} is below {self.at_least}"
        if self.at_most is not None and not holds(size <= self.at_most):
            return f"{name} is above {self.at_most}"
        if self.multiple_of != 1 and not holds(size % self.multiple_of == 0):
            return f"{name} is not a multiple of {self.multiple_of}"
        return None


class LikeExamples(MatchCheck):
    """An ``extra_check``: tensors have their examples' dtypes and numbers of dimensions, and their sizes agree as the examples' do.

    Counted from the last dimension: where two examples have one size, the tensors have one size, and a size of 1 stays 1. All
    other sizes are free.

    Args:
        examples: a tensor for each argument of the search function that is checked, by the argument's name.

    Raises:
        ReplacementError: an example is no tensor.
    """

    def __init__(self, **examples: torch.Tensor) -> None:
        for name, example in examples.items():
            if not isinstance(example, torch.Tensor):
                raise ReplacementError(f"LikeExamples: {name} must be a tensor; it is {example!r}.")
        self.examples = examples

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the examples."""
        return tuple(self.examples)

    def reason_against(self, match: Match) -> str | None:
        """None if the condition holds, otherwise the first difference."""
        values: dict[str, torch.Tensor] = {}
        for name, example in self.examples.items():
            value = value_of(match, name)
            if value is None or value.dtype != example.dtype or value.dim() != example.dim():
                kind = "no tensor" if value is None else _kind(value)
                return f"{name} is {kind}; its example is {_kind(example)}"
            values[name] = value
        for name, example in self.examples.items():
            for place, size in enumerate(example.shape, -example.dim()):
                found = values[name].shape[place]
                if size == 1 and not holds(found == 1):
                    return f"size {found} of dimension {place} of {name} is not 1"
                for other, its in self.examples.items():
                    if -place > its.dim() or its.shape[place] != size:
                        continue
                    another = values[other].shape[place]
                    if not holds(found == another):
                        return f"{name} and {other} have different sizes in dimension {place}, {found} and {another}"
        return None


def _kind(value: torch.Tensor) -> str:
    return f"{value.dtype} of {counted(value.dim(), 'dimension')}"
