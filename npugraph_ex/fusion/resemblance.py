"""Tells how much of a pattern is where it does not match: a near-miss has an operand of it whole, or more than half of its calls.

The matcher stops at the first operand that differs, so it does not know what the others are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._inductor.pattern_matcher import Ignored, KeywordArg, PatternExpr

from npugraph_ex.fusion.arguments import effective_arguments
from npugraph_ex.fusion.pattern import OutputOf, SchemaCall, outputs_of, same_constant


def resembling_calls(
    pattern: PatternExpr, anchor: fx.Node, matched: Mapping[PatternExpr, fx.Node | None]
) -> list[fx.Node]:
    """The calls that resemble ``pattern``, in order; none if there are too few for a near-miss.

    Args:
        pattern: it does not match at ``anchor``.
        anchor: where its first output would be.
        matched: the node of each part that matched before the matcher stopped.
    """
    found = _Resemblance()
    for part, node in matched.items():
        if isinstance(part, SchemaCall) and node is not None:
            found.calls[part] = node
            found.whole = True
    found.compare(outputs_of(pattern)[0], anchor)
    calls = sorted(set(found.calls.values()))
    return calls if len(calls) > 1 and (found.whole or len(found.calls) > len(found.absent)) else []


@dataclass
class _Resemblance:
    """The comparison of a pattern with the nodes at one place; wildcards stand for anything.

    Attributes:
        calls: the parts of the pattern that call what is called there, also with other operands.
        absent: the parts instead of which something else is called, and all behind them.
        whole: whether all operands of one of the calls are the pattern's.
    """

    calls: dict[SchemaCall, fx.Node] = field(default_factory=dict)
    absent: set[SchemaCall] = field(default_factory=set)
    whole: bool = False
    _compared: dict[tuple[SchemaCall, fx.Node], bool] = field(default_factory=dict)

    def compare(self, part: Any, value: Any) -> bool:
        """Whether ``value`` is what ``part`` describes, with all operands."""
        if isinstance(part, tuple):
            if not isinstance(value, (list, tuple)) or len(part) != len(value):
                return False
            # A list, not a generator: the operands after one that differs are compared, too.
            answers = [self.compare(one, item) for one, item in zip(part, value, strict=True)]
            return all(answers)
        if isinstance(part, OutputOf):
            return self._compare_output(part, value)
        if isinstance(part, SchemaCall):
            return self._compare_call(part, value)
        return isinstance(part, (KeywordArg, Ignored)) or same_constant(part, value)

    def _compare_output(self, part: OutputOf, value: Any) -> bool:
        if not isinstance(value, fx.Node) or value.target is not operator.getitem:
            self._miss(part.source)
            return False
        source, index = value.args
        return self.compare(part.source, source) and bool(index == part.index)

    def _compare_call(self, part: SchemaCall, value: Any) -> bool:
        if not isinstance(value, fx.Node) or value.target != part.overload:
            self._miss(part)
            return False
        if (part, value) not in self._compared:
            self.calls[part] = value
            same = self.compare(part.args, effective_arguments(value))
            self.whole |= same
            self._compared[part, value] = same
        return self._compared[part, value]

    def _miss(self, part: Any) -> None:
        """Count the calls of a part that is not there."""
        if isinstance(part, tuple):
            for item in part:
                self._miss(item)
        elif isinstance(part, OutputOf):
            self._miss(part.source)
        elif isinstance(part, SchemaCall) and part not in self.absent:
            self.absent.add(part)
            self._miss(part.args)
