"""The stream check on the corpus, without a device; the suite's `test_streams.py` asks the device too."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from npugraph_ex.graph.streams.labels import MAIN
from npugraph_ex.passes.stream_order import repair
from npugraph_ex.report.findings import Code
from npugraph_ex.stream_check.analysis import analyse
from npugraph_ex.testing.streams.builder import StreamBuilder
from npugraph_ex.testing.streams.programs import StreamProgram, counting_inputs
from npugraph_ex.testing.streams.strategies import stream_graphs
from npugraph_ex_conformance.stream_corpus.programs import stream_corpus
from npugraph_ex_conformance.stream_runs import judge

PROGRAMS = [pytest.param(program, id=program.name) for program in stream_corpus()]
aten = torch.ops.aten


def test_the_corpus_shows_every_kind_of_mistake() -> None:
    """Every code that the check itself can find in a graph is found in one of them."""
    shown = {code for program in stream_corpus() for code in (*program.codes, *program.notes)}
    of_events = {Code.WAIT_WITHOUT_RECORD, Code.WAIT_FOR_OUTSIDE, Code.RECORDED_TWICE}  # found where they are lowered
    elsewhere = {Code.COLLECTIVES_EXCEED_CORES, Code.MADE_DEPENDENT}  # test_deadlock_check.py, test_disjoint_parts.py
    assert shown == set(Code) - of_events - elsewhere


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_mistake_is_found_and_nothing_else(program: StreamProgram) -> None:
    """In the program as it is, mended, and with the missing edges inserted."""
    racy, mended = program.graph(mended=False).graph, program.graph(mended=True).graph
    found = analyse(racy)
    assert Counter(finding.code for finding in found) == Counter((*program.codes, *program.notes)), str(found)
    assert Counter(finding.code for finding in analyse(mended)) == Counter(program.notes), str(analyse(mended))
    repair(racy, found)
    racy.lint()
    assert not analyse(racy).errors, f"{racy}\n{analyse(racy)}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_findings_say_all_there_is_to_say(program: StreamProgram) -> None:
    """Each finding names two nodes of the graph, the missing edge, or why there is none, and the line that mends it."""
    graph = program.graph(mended=False).graph
    names = [node.name for node in graph.nodes]
    found = analyse(graph)
    faults = {
        place.stream for finding in found.errors for place in (finding.first, finding.second) if place is not None
    }
    for finding in found:
        assert finding.second is not None
        assert names.index(finding.first.node) < names.index(finding.second.node)
        assert finding.missing_edge.startswith("none: ") == (finding.level == "note")
        assert ("remove the wait" if finding.level == "note" else "add `") in finding.repair
        # The wait may be there for the fault's sake, and only at the wrong place.
        is_later = finding.level == "note" and finding.second.stream in faults
        assert finding.repair.startswith("first repair what is missing, ") == is_later


def test_a_wait_for_nothing_is_found() -> None:
    """A wait without a record is an error of its own."""
    b = StreamBuilder()
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        b.wait()
        y = b.call(aten.mul.Tensor, x, 3)
    b.join("s")
    (finding,) = analyse(b.finish(y).graph)
    assert finding.code is Code.WAIT_WITHOUT_RECORD
    assert finding.missing_edge
    assert "before node wait" in finding.repair


def test_unknown_sizes_are_taken_for_overlap() -> None:
    """Where the place of a cut is a symbol, the two sides may meet; where it is a number, they do not."""
    shapes = ShapeEnv()

    def graph(cut: int | torch.SymInt) -> torch.fx.Graph:
        b = StreamBuilder(shapes=shapes)
        buffer = b.call(aten.mul.Tensor, b.input(8), 2)
        b.fork("s")
        with b.on("s"):
            b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 0, 0, cut), 3)
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 0, cut, 8), 3)
        b.join("s")
        return b.finish(buffer).graph

    symbol = shapes.create_symintnode(shapes.create_symbol(4, ConstantSource("n")), hint=4)
    assert analyse(graph(4)).found == ()
    assert analyse(graph(symbol)).errors


def test_the_judge_sees_a_race_and_only_a_race() -> None:
    """The oracle of the corpus is no rubber stamp: random graphs are racy by its verdict and clean by it."""
    verdicts: set[bool] = set()

    @settings(max_examples=8, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(stream_graphs())
    def judge_graph(gm: fx.GraphModule) -> None:
        verdicts.add(judge(gm, counting_inputs(gm), schedules=("lazy", "random:1")).is_racy)

    judge_graph()
    assert verdicts == {True, False}


def test_a_reuse_is_said_once() -> None:
    """Also if the stream that frees the memory waited, and allocated, between two uses of the other stream."""
    b = StreamBuilder()
    x = b.input(8)
    value = b.call(aten.mul.Tensor, x, 2)
    b.fork("a")
    with b.on("a"):
        first = b.call(aten.add.Tensor, value, 1)
    b.order("a", MAIN)
    between = b.call(aten.add.Tensor, x, 1)
    with b.on("a"):
        second = b.call(aten.add.Tensor, value, 2)
    after = b.call(aten.add.Tensor, x, 3)
    b.join("a")
    found = analyse(b.finish(first, between, second, after).graph)
    assert [finding.code for finding in found.errors] == [Code.MEMORY_REUSED]
