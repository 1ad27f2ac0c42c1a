"""Turns the reasons of torch's matcher into sentences for the report.

``SchemaCall`` in ``pattern`` writes most reasons itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch._inductor.pattern_matcher import CallFunction, FailedMatch, PatternExpr


class Mismatch(FailedMatch):
    """A failed match. It builds the sentence for the report only when the report is read.

    Args:
        cause: the answer of torch's matcher.
        outputs: the pattern's results; matching begins at the first.
        bound: the node that each part of the pattern had matched, or None.
    """

    def __init__(
        self, cause: FailedMatch, outputs: Sequence[PatternExpr | None], bound: Mapping[PatternExpr, fx.Node | None]
    ) -> None:
        super().__init__(cause.format_string, *cause.args, **cause.kwargs)
        self._outputs = outputs
        self._bound = bound

    def __str__(self) -> str:
        """One sentence, without a full stop, as all reasons of a report are."""
        words = _WORDS.get(self.format_string)
        if words is not None:
            return words.format(*self.args)
        return self._missing() if self.format_string == "no anchor found" else super().__str__()

    def _missing(self) -> str:
        absent = (
            (number, part)
            for number, part in enumerate(self._outputs)
            if isinstance(part, CallFunction) and self._bound.get(part) is None
        )
        number, part = next(absent)
        called: Any = part.fns[0]
        return f"nothing calls {called} on what matched, as result {number} of the pattern does"


_WORDS = {
    "kwarg mismatch: {}": "{0} would stand for two different values",
    "repeated pattern differs": "one value of the pattern would stand for two different values of the graph",
    "function_mismatch: node={}, pattern={}": "{0} calls another operator than the pattern",
    "function_mismatch": "another operator is called than in the pattern",
    "multiple_users {}": "a value has another number of users than the pattern says",
    "multiple_users": "a value has another number of users than the pattern says",
    "args_structure {} {}": "a call has arguments of another form than in the pattern",
    "constant_args: {} {!r}!={pattern!r}": "{0} has {1!r} where the pattern has another constant",
    "exclusive arg appears twice": "one value is two operands where the pattern has two values",
    "get_attr_mismatch: node={}, pattern={}": "{0} is no constant tensor, as the pattern has one",
    "get_attr_value: {} != {}": "a constant tensor has another value than in the pattern",
    "get_attr without owning module: {}": "the constant tensor {0} stands in a graph without a module",
    "get_attr target is not str: {}": "the constant tensor {0} has no name",
    "non_list": "a single value is where the pattern has a list",
    "list: no_match": "no member of a list is what the pattern has",
}
"""Format strings of torch (2.13; 2.14 adds those of `get_attr`) and ours; both take the same arguments."""
