"""A program that differs from a pattern in one call has a near-miss that names this call, wherever it is in the pattern."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matchers import ours, pair, traced

aten = torch.ops.aten
UNARY = (aten.exp.default, aten.sigmoid.default, aten.tanh.default, aten.neg.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)


@dataclass(frozen=True)
class Call:
    """A call of an operator; an operand is a call, or the name of an argument."""

    operator: torch._ops.OpOverload
    operands: tuple[Any, ...]

    def value(self, x: Any, y: Any) -> Any:
        """The result for these arguments."""
        values = [{"x": x, "y": y}[one] if isinstance(one, str) else one.value(x, y) for one in self.operands]
        return self.operator(*values)

    def function(self) -> Callable[..., Any]:
        """The same as a function, of which torch traces the signature."""
        return lambda x, y: self.value(x, y)  # noqa: PLW0108 - a method takes itself, too

    def calls(self) -> int:
        """How many calls there are, this one included."""
        return 1 + sum(one.calls() for one in self.operands if isinstance(one, Call))

    def with_other(self, path: tuple[int, ...], operator: torch._ops.OpOverload) -> Call:
        """The same, but for the operator of the call at ``path``, the positions of the operands that lead to it."""
        if not path:
            return replace(self, operator=operator)
        operands = list(self.operands)
        operands[path[0]] = operands[path[0]].with_other(path[1:], operator)
        return replace(self, operands=tuple(operands))

    def inner(self) -> list[tuple[tuple[int, ...], Call]]:
        """All calls behind this one, with the way to them."""
        below = [(place, one) for place, one in enumerate(self.operands) if isinstance(one, Call)]
        return [((place, *path), call) for place, one in below for path, call in [((), one), *one.inner()]]


def _calls(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    one = st.builds(lambda operator, x: Call(operator, (x,)), st.sampled_from(UNARY), children)
    return one | st.builds(lambda operator, *xs: Call(operator, xs), st.sampled_from(BINARY), children, children)


def replacement(x: Any, y: Any) -> Any:
    """It is never applied."""
    return torch.atan2(x, y)


EXPRESSIONS = st.recursive(st.sampled_from("xy"), _calls, max_leaves=6).filter(
    lambda one: isinstance(one, Call) and one.calls() > 2 and all(repr(x) in repr(one) for x in "xy")
)


@pytest.mark.slow
@given(pattern=EXPRESSIONS, data=st.data())
def test_a_call_of_another_operator_is_named(pattern: Call, data: st.DataObject) -> None:
    """The pattern has no two equal calls, so that the changed one is the only one that differs."""
    written = repr(pattern)
    assume(all(written.count(repr(call)) == 1 for _, call in pattern.inner()))
    path, call = data.draw(st.sampled_from(pattern.inner()))
    assume(2 * call.calls() < pattern.calls())
    others = [one for one in (UNARY if len(call.operands) == 1 else BINARY) if one != call.operator]
    program = pattern.with_other(path, data.draw(st.sampled_from(others)))
    gm = traced(program.function(), *pair())
    report = ours(gm, pattern.function(), replacement, pair)
    assert report.fusions() == 0
    reasons = [miss.reason for miss in report.near_misses()]
    assert any(one.endswith(f"is not a call of {call.operator}") for one in reasons), reasons
