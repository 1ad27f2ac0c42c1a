"""Explains norms without a match or near-miss: which operators follow them, and which operators the rules need.

Matching begins at a pattern's last operator. So a norm with another operator after it has no near-miss, but its author needs
to know why it was not fused.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import fx
from torch._inductor.pattern_matcher import PatternExpr
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.fusion.checks import describe
from npugraph_ex.fusion.pattern import OutputOf, SchemaCall, outputs_of
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.graph.source import source_line
from npugraph_ex.operators import record_of
from npugraph_ex.report.passes import NearMiss


def explanations(graph: fx.Graph, rules: Iterable[PreparedRule], known: Collection[str]) -> Iterator[NearMiss]:
    """One explanation for each norm of ``graph`` that is not ``known``, in graph order.

    Args:
        graph: the graph after fusion.
        rules: the rules that were tried.
        known: the names of nodes that the report has already: in near-misses, and what rules made.
    """
    wanted: dict[str, dict[str, set[str]]] | None = None
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.name in known:
            continue
        record = record_of(node.target)
        if record is not None and record.explain_unfused:
            wanted = _wanted(rules) if wanted is None else wanted
            beginning = wanted.get(record.name, {})
            yield NearMiss(", ".join(sorted(beginning)), node.name, _reason(node, beginning), source_line(node))


def _wanted(rules: Iterable[PreparedRule]) -> dict[str, dict[str, set[str]]]:
    """For each operator that takes only wildcards: rule name -> the operators that must follow it."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for rule in rules:
        seen: set[int] = set()
        for output in outputs_of(rule.pattern) if rule.pattern is not None else ():
            _follow(output, "", rule.rule.name, found, seen)
    return found


def _follow(part: Any, user: str, rule: str, found: dict[str, dict[str, set[str]]], seen: set[int]) -> None:
    """Record that ``user`` follows ``part``, and that ``part`` follows its own arguments."""
    if isinstance(part, (tuple, list)):
        for item in part:
            _follow(item, user, rule, found, seen)
    elif isinstance(part, OutputOf):
        _follow(part.source, user, rule, found, seen)
    elif isinstance(part, SchemaCall):
        name = _torch_private.schema(part.overload).name
        if user:
            found[name][rule].add(user)
        if id(part) not in seen:
            seen.add(id(part))
            for argument in part.args:
                if isinstance(argument, (PatternExpr, tuple, list)):
                    _follow(argument, name.split("::")[1], rule, found, seen)


def _reason(node: fx.Node, beginning: dict[str, set[str]]) -> str:
    results = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0] or [node]
    users = [user for result in results for user in result.users if user.target is not operator.getitem]
    named = {_operator(user) for user in users}
    if not beginning:  # without the nodes' own names, so that equal layers have one reason
        return f"it goes to {', '.join(sorted(named)) or 'nobody'}; no rule begins with {node.target}"
    following = sorted(set().union(*beginning.values()))
    shown = ", ".join("a result of the graph" if user.op == "output" else user.name for user in users) or "nobody"
    met, others = ([one for one in following if (one in named) is there] for there in (True, False))
    wanted = f"; the rules that begin so want {', '.join(others)}" if others else ""
    behind = f", but behind {' and '.join(met)} no rule goes on as the graph does" if met else ""
    return f"{describe(results[0])} goes to {shown}{behind}{wanted}"


def _operator(node: fx.Node) -> str:
    """The name of the operator that a node calls, without its namespace."""
    if isinstance(node.target, OpOverload):
        return _torch_private.schema(node.target).name.split("::")[1]
    return "a result of the graph" if node.op == "output" else node.name
