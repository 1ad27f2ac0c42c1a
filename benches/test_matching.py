"""What the checked matcher costs beside torch's own, on the same graphs and the same rules, and how it grows.

The gates are ratios of two times of one process, so that they hold on any machine.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
from matching_graphs import layers
from measured_tables import Table
from torch import fx
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.rules import prepared_rules
from npugraph_ex.report.builder import ReportBuilder

AT_MOST = 1.3
ROUNDS = 3


def duplicate(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that shares the fake tensors."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def torchs_matcher() -> PatternMatcherPass:
    """The default rules that can be used here, as ours has them, registered with torch's matcher; conditions included."""
    matcher = PatternMatcherPass()
    usable = [prepared.rule for prepared in prepared_rules() if not prepared.inactive]
    with FakeTensorMode():
        for rule in usable:
            register_replacement(
                rule.search, rule.replace, list(rule.example_inputs()), fwd_only, matcher,
                extra_check=lambda match, rule=rule: rule.condition(match) is None,
                scalar_workaround=dict(rule.scalars) or None, get_decomp_fn=dict, skip_duplicates=True,
            )  # fmt: skip
    return matcher


def ours(gm: fx.GraphModule) -> int:
    """Match and replace with the checked matcher; how often it did."""
    report = ReportBuilder()
    apply_rules(gm.graph, prepared_rules(), report)
    return report.build().fusions()


def fastest(function: Callable[[fx.GraphModule], Any], gm: fx.GraphModule, rounds: int = ROUNDS) -> tuple[float, Any]:
    """The shortest of several processor times, and what the function answered; each round has a graph of its own."""
    times, answer = [], None
    for _ in range(rounds):
        graph = duplicate(gm)
        gc.collect()
        start = time.thread_time()
        answer = function(graph)
        times.append(time.thread_time() - start)
    return min(times), answer


@pytest.mark.parametrize("fusing", [True, False], ids=["fusing", "nothing matches"])
@pytest.mark.parametrize("nodes", [1000, 4000])
def test_costs_little_more_than_torchs_matcher(nodes: int, fusing: bool, table: Table) -> None:
    """At most 1.3 times torch's own matcher on the same graph and rules, all checks included."""
    gm, matcher = layers(nodes, fusing=fusing), torchs_matcher()
    theirs, matches = fastest(matcher.apply, gm)
    own, fusions = fastest(ours, gm)
    if own > AT_MOST * theirs:  # a busy machine makes times longer, never shorter
        theirs, own = min(theirs, fastest(matcher.apply, gm)[0]), min(own, fastest(ours, gm)[0])
    figures = {"torch": theirs * 1e3, "npugraph_ex": own * 1e3, "of torch's": own / theirs}
    graph = "half of the norms fuse" if fusing else "near misses only"
    table("matching all default rules, ms", graph=graph, nodes=nodes, matches=matches, fusions=fusions, **figures)
    assert bool(fusions) == fusing
    assert matches == fusions
    assert own <= AT_MOST * theirs


def test_grows_linearly(table: Table) -> None:
    """Eight times the nodes, 16,000 in all, cost at most twelve times the time."""
    small, large = layers(2000), layers(16000)
    few, _ = fastest(ours, small)
    many, fusions = fastest(ours, large, 1)
    if many > 12 * few:
        few, many = min(few, fastest(ours, small)[0]), min(many, fastest(ours, large)[0])
    figures = {"2,000 nodes": few * 1e3, "16,000 nodes": many * 1e3, "times": many / few}
    table("matching grows with the graph, ms", fusions=fusions, **figures)
    assert many <= 12 * few
