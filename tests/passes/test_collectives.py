"""Collectives pass through the pipeline as ordered side effects: none vanishes, moves, is fused across or reinplaced over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex import _torch_private, register_replacement
from npugraph_ex.config.options import Options
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph.collectives import awaited_by, group_of, is_collective, waits_of
from npugraph_ex.graph.memory.aliases import AliasFacts
from npugraph_ex.graph.streams.order import Order
from npugraph_ex.passes import pipeline
from npugraph_ex.passes.base import Pass, PassContext
from npugraph_ex.report.findings import Code
from npugraph_ex.report.passes import PassReport
from npugraph_ex.stream_check.analysis import analyse
from npugraph_ex.versions import point_to_point

_c10d = torch.ops._c10d_functional


def started(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    """A sum over a group that nobody has waited for."""
    return _c10d.all_reduce(x, "sum", group)


def summed(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    """A sum over a group."""
    return _c10d.wait_tensor(started(x, group))


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    """The graph of a function of one tensor; nothing in it runs."""
    return make_fx(function, tracing_mode="fake")(torch.ones(8, 8, device="npu"))


def optimised(function: Callable[..., Any] | fx.GraphModule, **how: Any) -> tuple[list[str], PassReport]:
    """What the graph calls after all passes, by name, and the report."""
    gm = function if isinstance(function, fx.GraphModule) else traced(function)
    passes = how.pop("passes", pipeline.PIPELINE)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    report = pipeline.run(gm, inputs, Options(**how), passes=passes)
    # A roll-back leaves a right graph, so it would hide a wrong pass.
    undone = [record.name for record in report.passes if record.outcome == "rolled back"]
    assert undone == [pass_.name for pass_ in passes if pass_.name == "spoil"]
    return [
        str(node.target.overloadpacket).partition(".")[2] for node in gm.graph.nodes if node.op == "call_function"
    ], report


def find_call(gm: fx.GraphModule, name: str) -> fx.Node:
    """The one node that calls an operator of this name."""
    (node,) = [node for node in gm.graph.nodes if str(node.target).split(".")[-2:-1] == [name]]
    return node


def test_what_a_collective_is() -> None:
    """It takes a group, by whatever name; an asynchronous one is over at the waits for it, lists included."""

    def both(x: torch.Tensor) -> Any:
        parts = _c10d.all_reduce_coalesced([x, x + 1], "sum", "tp")
        return [_c10d.wait_tensor(part) for part in parts]

    gm = traced(both)
    (reduce,) = [node for node in gm.graph.nodes if is_collective(node)]
    assert group_of(reduce) == "tp"
    assert [wait.name for wait in waits_of(reduce)] == ["wait_tensor", "wait_tensor_1"]
    assert [awaited_by(wait) for wait in waits_of(reduce)] == [reduce, reduce]
    fused = fx.Graph().call_function(torch.ops.npu.npu_mm_all_reduce_base.default, (1, 2, "world"))
    assert group_of(fused) == "world"
    norm = fx.Graph().call_function(torch.ops.npu.npu_group_norm_silu.default, (1, None, None, 2))
    assert not is_collective(norm)


def test_none_vanishes() -> None:
    """A collective whose result nobody uses stays: the other processes take part in it."""

    def unused(x: torch.Tensor) -> torch.Tensor:
        started(x)
        return x + 1

    assert optimised(unused)[0] == ["all_reduce", "add", "wait_tensor"]  # the group has a stream, which a capture joins

    @torch.library.custom_op("collectives_test::meet", mutates_args=())
    def meet(x: torch.Tensor, group: str) -> torch.Tensor:
        del group
        return x * 2

    meet.register_fake(lambda x, group: torch.empty_like(x))  # noqa: ARG005 - the operator's arguments

    def met(x: torch.Tensor) -> torch.Tensor:
        meet(x, "ep")
        return x + 1

    assert optimised(met)[0] == [
        "meet",
        "add",
    ]  # of an operator of the user's own, torch believes that it has no effect

    def nothing_used(x: torch.Tensor) -> torch.Tensor:
        meet(x, "ep")
        started(x)
        torch.ops.npu.npu_mm_all_reduce_base(x, x, "tp")
        return x + 1

    seen: list[str] = []

    def look(gm: fx.GraphModule, *_: Any) -> None:
        seen.extend(str(node.target).split(".")[1] for node in gm.graph.nodes if is_collective(node))
        raise RuntimeError("seen")

    # AOT would drop all three before any pass; another process, which uses a result, would wait for ever.
    compiled = torch.compile(nothing_used, backend="npugraph_ex", options={"post_grad_custom_pre_pass": look})
    with pytest.raises(Exception, match="seen"):
        compiled(torch.ones(4, 4, device="npu"))
    assert seen == ["meet", "all_reduce", "npu_mm_all_reduce_base"]


def test_two_compilations_keep_the_same_operators() -> None:
    """Torch has one set of operators with effects: it has ours until the last of two overlapping blocks ends."""

    def is_kept() -> bool:
        node = fx.Graph().call_function(_c10d.all_reduce.default)
        return node.is_impure()

    both = [ExitStack(), ExitStack()]
    for block in both:
        block.enter_context(_torch_private.never_dead([_c10d.all_reduce.default, _c10d.wait_tensor.default]))
    kept = [is_kept()]
    for block in both:
        block.close()
        kept.append(is_kept())
    assert kept == [True, True, False]
    assert fx.Graph().call_function(_c10d.wait_tensor.default).is_impure()  # by torch's own record


def test_what_one_still_reads_is_not_overwritten() -> None:
    """Between its start and its wait a collective reads its input; after the wait the input is free."""

    def early(x: torch.Tensor) -> Any:
        a = x * 2
        c = started(a)
        b = a + 1
        return _c10d.wait_tensor(c), b

    def late(x: torch.Tensor) -> Any:
        a = x * 2
        return summed(a), a + 1

    assert optimised(early)[0] == ["mul", "all_reduce", "add", "wait_tensor"]
    assert optimised(late)[0] == ["mul", "all_reduce", "wait_tensor", "add_"]


def test_a_collective_takes_no_memory_of_others() -> None:
    """`all_reduce_` exists, and is never put in place of what the program wrote."""
    assert optimised(lambda x: summed(x * 2))[0] == ["mul", "all_reduce", "wait_tensor"]
    assert optimised(lambda x: started(x * 2))[0] == ["mul", "all_reduce"]  # whoever is given it waits


def test_the_result_of_a_wait_is_the_memory_that_is_waited_for() -> None:
    """Its schema does not say so; whoever overwrites the one destroys the other."""

    def both(x: torch.Tensor) -> Any:
        c = started(x)
        w = _c10d.wait_tensor(c)
        v = w + 1
        return v, c * 2

    gm = traced(both)
    facts = AliasFacts(gm.graph)
    assert facts.share_storage(find_call(gm, "wait_tensor"), find_call(gm, "all_reduce"))
    assert optimised(gm)[0].count("add_") == 0


def test_a_wait_orders_streams() -> None:
    """What is started on one stream and waited for on another is ordered; without the wait it would be a race."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    c = graph.call_function(_c10d.all_reduce.default, (x, "sum", "tp"))
    c.meta["stream_label"] = "side"
    w = graph.call_function(_c10d.wait_tensor.default, (c,))
    early = graph.call_function(torch.ops.aten.add.Tensor, (w, 1))
    graph.output((early,))
    fake = traced(lambda value: value + 1).graph.find_nodes(op="placeholder")[0].meta["val"]
    for node in graph.nodes:
        if node.op != "output":
            node.meta["val"] = fake if node is x else fake.clone()
    order = Order(graph)
    assert order.proves(c, early)
    found = {finding.code for finding in analyse(graph)}
    assert found == {Code.NEVER_FORKED}  # the closure adds that edge
    w.target = torch.ops.aten.clone.default
    assert Code.READ_AFTER_WRITE in {finding.code for finding in analyse(graph)}


@pytest.mark.skipif(point_to_point.DIFFERENCE.older, reason=point_to_point.DIFFERENCE.what)
def test_receiving_writes_the_argument() -> None:
    """`irecv` fills its argument and returns it, which its schema does not say."""

    def received(x: torch.Tensor) -> Any:
        buffer = x * 0
        return _c10d.wait_tensor(_c10d.irecv(buffer, 1, 0, "pp")), buffer.clone()

    gm = traced(received)
    facts = AliasFacts(gm.graph)
    receive = find_call(gm, "irecv")
    assert facts.writers == [receive]
    assert facts.share_storage(receive, find_call(gm, "mul"))


def test_nothing_is_fused_across_one() -> None:
    """A pattern on both sides of a collective is a near-miss that names it; beside it the same pattern is fused."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.neg(x))

    def replace(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.neg(x), min=0)

    def across(x: torch.Tensor) -> Any:
        n = torch.neg(x)
        c = started(x)
        return torch.relu(n), _c10d.wait_tensor(c)

    def beside(x: torch.Tensor) -> Any:
        r = torch.relu(torch.neg(x))
        return r, summed(x)

    with register_replacement(search, replace, [torch.ones(2, device="npu")]):
        calls, report = optimised(across, inplace_pass=False)
        assert calls == ["neg", "all_reduce", "relu", "wait_tensor"]
        (miss,) = [miss for rule in report.rules for miss in rule.near_misses]
        assert "all_reduce" in miss.reason
        assert "lies between the matched operators" in miss.reason
        assert optimised(beside, inplace_pass=False)[0] == ["neg", "clamp", "all_reduce", "wait_tensor"]


def test_a_users_rule_may_replace_one() -> None:
    """Who matches a collective says that all processes do the same: an operator that computes and sends at once, say."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return summed(x) * 2

    def replace(x: torch.Tensor) -> torch.Tensor:
        return summed(x * 2)

    with register_replacement(search, replace, [torch.ones(2, device="npu")]):
        calls, report = optimised(lambda x: summed(x) * 2, inplace_pass=False)
    assert calls == ["mul", "all_reduce", "wait_tensor"]
    assert report.fusions() == 1


def _two(x: torch.Tensor) -> Any:
    return summed(x, "tp"), summed(x + 1, "ep")


def _reorder(gm: fx.GraphModule, context: PassContext) -> None:
    del context
    first, second = [node for node in gm.graph.nodes if is_collective(node)]
    (wait,) = waits_of(first)
    second.append(first)
    first.append(wait)


def _drop(gm: fx.GraphModule, context: PassContext) -> None:
    del context
    last = [node for node in gm.graph.nodes if is_collective(node)][-1]
    (wait,) = waits_of(last)
    wait.replace_all_uses_with(last.args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(last)


@pytest.mark.parametrize("spoil", [_reorder, _drop])
def test_a_pass_that_breaks_the_sequence_is_undone(spoil: Callable[..., None]) -> None:
    """The collectives of a graph, in order, are part of its contract: a pass of the library's that breaks it goes."""
    _, report = optimised(_two, passes=(Pass("spoil", spoil),))
    (record,) = report.passes
    assert record.outcome == "rolled back"
    assert "collectives are" in record.message
    assert "all_reduce.default in 'tp'" in record.message
    with pytest.raises(GraphVerificationError, match="other processes would wait for ever"):
        optimised(_two, passes=(Pass("spoil", spoil, recoverable=False),))


def test_a_users_pass_may_replace_them() -> None:
    """What a user's pass does to collectives is its word; what follows is held to the new sequence."""
    calls, _ = optimised(_two, post_grad_custom_pre_pass=lambda gm, inputs, config: _drop(gm, config))  # noqa: ARG005
    assert calls.count("all_reduce") == 1
