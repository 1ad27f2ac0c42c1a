"""One random graph of several streams: the stream check says racy exactly where the device does, and its repair holds.

Events, forks and joins may be missing. A check that finds too little and one that finds too much are both wrong. So is one that
finds the same twice, or calls a wait superfluous that is none.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from npugraph_ex.passes.stream_order import repair
from npugraph_ex.report.findings import Code, Finding
from npugraph_ex.stream_check.analysis import analyse
from npugraph_ex.testing.oracle.tracing import copy_of
from npugraph_ex.testing.streams.programs import counting_inputs
from npugraph_ex.testing.streams.strategies import sample_stream_graph
from npugraph_ex_conformance.stream_runs import Reuse, StreamVerdict, judge

SCHEDULES = ("lazy", "random:1", "random:2", "pct:1:3")


def stream_graph_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is. Every second one uses memory again."""
    try:
        return check_stream_graph(sample_stream_graph(seed, keep=seed % 2 == 0))
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


def check_stream_graph(gm: fx.GraphModule) -> str:
    """Compare check and device, before and after the repair, which is inserted; empty when they agree."""
    inputs, found = counting_inputs(gm), analyse(gm.graph)
    verdict = judge(gm, inputs, schedules=SCHEDULES)
    before = f"{gm.graph}\n{found}\n{verdict}"
    if {finding.code for finding in found.errors} == {Code.MEMORY_REUSED}:
        for finding in found.errors:  # the check takes any free block for possible: so each must be
            if not _in_that_block(gm, finding).is_racy:
                return f"no block makes this a race: {finding}\n{before}"
    elif verdict.is_racy != bool(found.errors):
        return f"the check finds {'an error' if found.errors else 'nothing'}, the device the contrary:\n{before}"
    if len(set(found)) < len(list(found)):
        return f"the check says the same twice:\n{before}"
    idle = {finding.second.node for finding in found.of(Code.WAIT_ORDERS_NOTHING) if finding.second is not None}
    if idle and not verdict.is_racy and judge(_without(gm, idle), inputs, schedules=SCHEDULES).is_racy:
        return f"without {', '.join(sorted(idle))}, which order nothing, it is racy:\n{before}"
    repair(gm.graph, found)
    gm.graph.lint()
    if analyse(gm.graph).errors:
        return f"not repaired: {gm.graph}\n{before}"
    after = judge(gm, inputs, schedules=SCHEDULES)
    return f"repaired in vain: {gm.graph}\n{after}\n{before}" if after.is_racy else ""


def _without(gm: fx.GraphModule, waits: Collection[str]) -> fx.GraphModule:
    """The graph without some waits."""
    shorter = copy_of(gm)
    for node in [node for node in shorter.graph.nodes if node.name in waits]:
        shorter.graph.erase_node(node)
    shorter.recompile()
    return shorter


def _in_that_block(gm: fx.GraphModule, finding: Finding) -> StreamVerdict:
    """What the device says if the allocator hands out the very block that a finding is about."""
    assert finding.second is not None
    return judge(gm, counting_inputs(gm), schedules=SCHEDULES, reuse=Reuse(finding.second.node, finding.keep_alive))
