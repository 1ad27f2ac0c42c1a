"""The deadlock check: collectives that may run at once and do not fit onto the device together, found in the graph alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
import torch_npu  # noqa: F401 - registers npu::
from torch import fx

from npugraph_ex.config.options import Options
from npugraph_ex.errors import CollectiveDeadlockWarning
from npugraph_ex.graph.streams.events import insert_record, insert_wait
from npugraph_ex.passes import deadlock_check
from npugraph_ex.passes.base import PassContext
from npugraph_ex.passes.deadlock_check import analyse
from npugraph_ex.report.findings import Code

_CORES = 48
_FUSED = torch.ops.npu.npu_mm_all_reduce_base.default
_REDUCE = torch.ops._c10d_functional.all_reduce.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ADD = torch.ops.aten.add.Tensor


class Program:
    """A graph that is written node by node, each on its stream and under its limit."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.end = self.graph.output(self.x)

    def call(self, target: Any, *args: Any, on: str = "", cores: int | None = None) -> fx.Node:
        """Add an operator before the end."""
        with self.graph.inserting_before(self.end):
            node = self.graph.call_function(target, args)
        if on:
            node.meta["stream_label"] = on
        if cores is not None:
            node.meta["core_limit"] = (-1, cores)
        return node

    def fused(self, group: str, **where: Any) -> fx.Node:
        """A product whose result is summed over a group."""
        return self.call(_FUSED, self.x, self.x, group, **where)

    def reduce(self, group: str, **where: Any) -> fx.Node:
        """A sum over a group, which runs until it is waited for."""
        return self.call(_REDUCE, self.x, "sum", group, **where)

    def event(self, first: fx.Node, second: fx.Node) -> None:
        """Order two nodes of two streams."""
        record = insert_record(self.graph, first, first.meta.get("stream_label", ""))
        insert_wait(self.graph, second, second.meta.get("stream_label", ""), [record])

    def found(self) -> list[set[str]]:
        """The nodes of each finding."""
        found = analyse(self.graph, _CORES)
        assert {finding.code for finding in found} <= {Code.COLLECTIVES_EXCEED_CORES}
        return [{finding.first.node, finding.second.node} for finding in found if finding.second]


def test_two_at_once_that_do_not_fit() -> None:
    """Two unlimited collectives on two streams: one finding, with both nodes, the sum, and limits that would fit."""
    program = Program()
    first, second = program.fused("tp"), program.fused("ep", on="side")
    (finding,) = analyse(program.graph, _CORES)
    assert (finding.first.node, finding.second and finding.second.node) == (first.name, second.name)
    assert (finding.first.stream, finding.second and finding.second.stream) == (None, "side")
    assert finding.level == "warning"
    assert (
        f"{first.name} (48) and {second.name} (48) may run at once and need 96 vector cores; the device has 48"
        in str(finding)
    )
    assert "limit_core_num(-1, 24)" in finding.repair
    assert finding.missing_edge == f"{first.name} before {second.name}"


@pytest.mark.parametrize(
    ("first", "second", "fits"), [(24, 24, True), (24, 25, False), (47, 1, True), (16, None, False)]
)
def test_limits_decide(first: int, second: int | None, fits: bool) -> None:
    """What their scopes allow is what counts; a sum that is exactly the device fits."""
    program = Program()
    program.fused("tp", cores=first)
    program.fused("ep", on="side", cores=second)
    assert (program.found() == []) == fits


def test_what_is_ordered_fits() -> None:
    """One stream, or an event between two: never at once. An event the other way round, or too late, orders nothing."""
    alone = Program()
    alone.fused("tp")
    alone.fused("ep")
    assert alone.found() == []
    ordered = Program()
    ordered.event(ordered.fused("tp"), ordered.fused("ep", on="side"))
    assert ordered.found() == []
    late = Program()
    first, second = late.fused("tp"), late.fused("ep", on="side")
    late.event(second, late.call(_ADD, late.x, 1))
    assert late.found() == [{first.name, second.name}]


def test_kernels_that_do_not_communicate_do_not_count() -> None:
    """They end by themselves, however many cores they hold; a group normalisation has no group of processes."""
    program = Program()
    program.fused("tp")
    program.call(_ADD, program.x, 1, on="side")
    program.call(torch.ops.npu.npu_group_norm_silu.default, program.x, None, None, 2, on="other")
    assert program.found() == []


def test_three_that_fit_in_pairs_only() -> None:
    """Any two of three fit and all three do not."""
    program = Program()
    names = [program.fused("tp", on=stream, cores=20).name for stream in ("", "one", "two")]
    (finding,) = analyse(program.graph, _CORES)
    assert all(f"{name} (20)" in finding.message for name in names)
    assert "need 60" in finding.message
    two = Program()
    for stream in ("", "one"):
        two.fused("tp", on=stream, cores=20)
    assert two.found() == []
    ordered = Program()
    first, second = (ordered.fused("tp", on=stream, cores=20) for stream in ("one", "two"))
    ordered.event(first, second)
    ordered.fused("tp", cores=20)
    assert ordered.found() == []  # at most two of them at once


def test_an_asynchronous_one_runs_until_it_is_waited_for() -> None:
    """Two groups, one stream: at once between the first's start and its wait. One group: one after the other."""
    both = Program()
    first, second = both.reduce("tp"), both.reduce("ep")
    both.call(_WAIT, first)
    both.call(_WAIT, second)
    assert both.found() == [{first.name, second.name}]
    waited = Program()
    waited.call(_WAIT, waited.reduce("tp"))
    waited.call(_WAIT, waited.reduce("ep"))
    assert waited.found() == []
    same = Program()
    same.reduce("tp")
    same.reduce("tp")
    assert same.found() == []


def test_hccl_may_need_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HCCL is told to work without vector cores, torch.distributed's collectives take none; fused ones still do."""
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AI_CPU")
    program = Program()
    program.reduce("tp")
    program.reduce("ep")
    assert program.found() == []
    program.fused("tp")
    program.fused("ep", on="side")
    assert len(program.found()) == 1


def test_it_warns_and_never_raises() -> None:
    """The pass adds its finding to the report and warns; `stream_check="raise"` is about something else."""
    program = Program()
    program.fused("tp")
    program.fused("ep", on="side")
    gm = fx.GraphModule({}, program.graph)
    before = [node.format_node() for node in gm.graph.nodes]
    options = Options.from_mapping({"deadlock_check": True, "stream_check": "raise"})
    context = PassContext(options, [], vector_cores=_CORES)
    with pytest.warns(CollectiveDeadlockWarning, match="wait for each other"):
        deadlock_check.run(gm, context)
    assert [finding.code for finding in context.report.findings] == [Code.COLLECTIVES_EXCEED_CORES]
    assert context.report.findings.errors == ()
    assert [node.format_node() for node in gm.graph.nodes] == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deadlock_check.run(gm, PassContext(options, []))  # no device, no number of cores


def many(streams: int, each: int) -> Callable[[], Any]:
    """Collectives on several streams that fit together, none ordered with another."""
    program = Program()
    for _ in range(each):
        for stream in range(streams):
            program.fused("tp", on=f"s{stream}", cores=_CORES // streams)
    return program.found


def test_hundreds_are_judged_at_once() -> None:
    """What fits together by its limits needs no search over all combinations: 4 streams with 60 each."""
    assert many(4, 60)() == []
