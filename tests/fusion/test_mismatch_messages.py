"""The reasons of near-misses are sentences of ours, whatever torch's matcher says to itself."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from matchers import half, ours, pair, traced
from torch._inductor import pattern_matcher
from torch._inductor.pattern_matcher import CallFunction, KeywordArg

from npugraph_ex.fusion import mismatch_messages
from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.preparing import prepare
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.report.builder import ReportBuilder

aten = torch.ops.aten


def both(x: Any, y: Any) -> Any:
    total = torch.add(x, y)
    return torch.relu(total), torch.neg(total)


def both_otherwise(x: Any, y: Any) -> Any:
    total = torch.sub(x, torch.neg(y))
    return torch.relu(total), torch.neg(total)


def square(x: Any) -> Any:
    return torch.mul(torch.neg(x), torch.neg(x))


def one(x: Any, y: Any) -> Any:
    return torch.relu(torch.add(x, y))


def swapped(x: Any, y: Any) -> Any:
    return torch.mul(torch.neg(x), y)


def gated(x: Any, y: Any) -> Any:
    return torch.mul(y, torch.add(torch.neg(x), y))


@pytest.mark.parametrize(
    ("model", "search", "replace", "pattern", "reason"),
    [
        (
            lambda x, y: torch.relu(torch.add(x, y)), both, both_otherwise, None,
            "nothing calls aten.neg.default on what matched, as result 1 of the pattern does",
        ),
        (
            lambda x, y: torch.mul(torch.neg(x), torch.neg(y)), square, lambda x: torch.mul(x, x), None,
            "one value of the pattern would stand for two different values of the graph",
        ),
        (
            lambda x, y: (torch.relu(torch.add(x, y)), torch.add(x, y).relu()),
            one, one, CallFunction(aten.relu.default, CallFunction(aten.sub.Tensor, KeywordArg("x"), KeywordArg("y"))), "",
        ),
        (
            lambda x, y: torch.mul(torch.add(y, torch.neg(x)), y), gated, one, None,
            "the operands of mul and add stand in the other order; a second rule with that order would match",
        ),
        (lambda x, y: torch.mul(y, torch.sub(y, torch.neg(x))), gated, one, None, ""),
    ],
    ids=["missing result", "two values for one operand", "another operator", "other order", "other operator and order"],
)  # fmt: skip
def test_reasons_are_sentences(model: Any, search: Any, replace: Any, pattern: Any, reason: str) -> None:
    """The names of the user's arguments and operators, no note of the matcher."""
    examples = (lambda: [half(4, 16)]) if search is square else pair
    report = ours(traced(model, *pair()), search, replace, examples, pattern=pattern)
    assert report.fusions() == 0
    assert [miss.reason for miss in report.near_misses()] == [reason] * bool(reason)
    saved = [miss.would_save.kernels for miss in report.near_misses()]
    assert saved == [{square: 2, gated: 1, both: -1}.get(search, 0)] * bool(reason)


def test_each_rule_has_its_own_near_miss_at_a_node() -> None:
    """What another rule says of the node does not hide that this one's operands stand in the other order."""

    def further(x: Any, y: Any) -> Any:
        return torch.mul(torch.add(y, 1), torch.neg(x))

    gm, report = traced(lambda x, y: torch.mul(y, torch.neg(x)), *pair()), ReportBuilder()
    rules = [prepare(FusionRule(rule.__name__, rule, one, pair)) for rule in (further, swapped)]
    apply_rules(gm.graph, rules, report)
    reasons = {record.name: [miss.reason for miss in record.near_misses] for record in report.build().rules}
    assert reasons["swapped"] == [
        "the operands of mul stand in the other order; a second rule with that order would match"
    ]
    assert len(reasons["further"]) == 1


def test_what_a_rule_made_is_no_near_miss_of_it() -> None:
    """Its replacement is the pattern with the operands exchanged. The same in the model is one."""
    again = lambda x, y: torch.mul(y, torch.neg(x))  # noqa: E731
    report = ours(traced(lambda x, y: (torch.mul(torch.neg(x), y), again(x, y)), *pair()), swapped, again, pair)
    assert (report.fusions(), len(report.near_misses())) == (1, 1)


def test_every_text_of_torch_has_words() -> None:
    """What torch's matcher can answer is known; a new text in a new torch is to be worded."""
    source = inspect.getsource(pattern_matcher)
    texts = set(re.findall(r"FailedMatch\(\s*\"([^\"]+)\"", source))
    nested = {"list[{}]: {}"}
    assert texts - nested <= mismatch_messages._WORDS.keys() | {"no anchor found"}


@pytest.mark.parametrize("text", sorted(mismatch_messages._WORDS))
def test_words_take_what_torch_gives(text: str) -> None:
    """Each text is filled in with the arguments that torch gives it."""
    given = [torch.add, 3][: text.count("{}") + text.count("{!r}")]
    failed = mismatch_messages.Mismatch(pattern_matcher.FailedMatch(text, *given, pattern=4), [], {})
    assert str(failed)
    assert "{" not in str(failed)
    assert str(failed) != text
