"""Passes on graphs of several streams: they keep order, and use it where it is proven. Values under adversarial schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_programs import check, compiled, vector
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import npu_emulator
from npugraph_ex import compile_fx, ops, scope
from npugraph_ex.passes import pipeline

aten, ours = torch.ops.aten, torch.ops.npugraph_ex


pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the graphs that are compiled, after all passes, in order."""
    names: list[str] = []
    run = pipeline.run

    def noting(gm: fx.GraphModule, *args: Any, **options: Any) -> Any:
        report = run(gm, *args, **options)
        assert all(record.outcome != "rolled back" for record in report.passes), report.table()
        names.extend(node.target._opname for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        return report

    monkeypatch.setattr(pipeline, "run", noting)
    return names


def events(count: int) -> list[Any]:
    """Events with tags of their own."""
    return [ops.npu_create_tagged_event(f"event {number}") for number in range(count)]


def test_reinplace_across_streams_where_order_is_proven(operators: list[str]) -> None:
    """A side stream computes in the memory of a value that the main stream made, and the main one in the side's."""
    ready, done = events(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ops.npu_tagged_event_record(ready)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(ready)
            z = y * 2
            ops.npu_tagged_event_record(done)
        ops.npu_tagged_event_wait(done)
        return z - 3

    check(compiled(function), lambda x: (x + 1) * 2 - 3, (vector(1, 2),), (vector(5, -6),))
    assert "mul_" in operators
    assert "sub_" in operators


@pytest.mark.parametrize("ordered", [False, True])
def test_no_reinplace_over_what_another_stream_may_still_read(operators: list[str], ordered: bool) -> None:
    """The side stream reads `y` unordered with the last user on the main stream: that gets memory of its own."""
    ready, done = events(2)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        ops.npu_tagged_event_record(ready)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(ready)
            z = y * 2
            ops.npu_tagged_event_record(done)
        if ordered:
            ops.npu_tagged_event_wait(done)
        return z, y - 3

    check(compiled(function), lambda x: ((x + 1) * 2, x - 2), (vector(1, 2),), (vector(5, -6),))
    assert ("sub_" in operators) == ordered


@pytest.mark.parametrize("ordered", [False, True])
def test_an_input_is_written_early_only_where_order_is_proven(operators: list[str], ordered: bool) -> None:
    """One stream reads an input, another overwrites it: in place if the read is over by then, at the end otherwise."""
    (read,) = events(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("reader"):
            y = x * 2
            ops.npu_tagged_event_record(read)
        with scope.npu_stream_switch("writer"):
            if ordered:
                ops.npu_tagged_event_wait(read)
            x.add_(1)
        return y

    def eager(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        x.add_(1)
        return y

    check(compiled(function), eager, (vector(1, 2),), (vector(5, -6),))
    assert ("add_" in operators) == ordered
    assert ("copy_" in operators) != ordered


def test_a_scatter_becomes_a_copy_only_where_order_is_proven(operators: list[str]) -> None:
    """Writing a part of a value that another stream reads keeps the functional form."""
    (ready,) = events(1)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        ops.npu_tagged_event_record(ready)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(ready)
            z = y * 2
        y[0] = 7
        return z, y * 3

    def eager(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        z = y * 2
        y[0] = 7
        return z, y * 3

    check(compiled(function), eager, (vector(1, 2),), (vector(5, -6),))
    assert "select_scatter" in operators


def test_members_of_a_concatenation_are_written_in_place_on_its_stream(operators: list[str]) -> None:
    """Members on the stream of the `cat` are computed where they will lie; one of another stream is copied there."""
    ready, done = events(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        other = x - 5
        ops.npu_tagged_event_record(ready)
        with scope.npu_stream_switch("side"):
            one, two = x.sin(), x.cos()
            ops.npu_tagged_event_wait(ready)
            whole = torch.cat([one, other, two])
            ops.npu_tagged_event_record(done)
        ops.npu_tagged_event_wait(done)
        return whole * 2

    check(compiled(function), lambda x: torch.cat([x.sin(), x - 5, x.cos()]) * 2, (vector(1, 2),), (vector(5, -6),))
    assert "cat" not in operators
    assert operators.count("copy_") == 1


def test_a_concatenation_of_another_stream_stays(operators: list[str]) -> None:
    """Members of streams that are not the `cat`'s stay where they are."""
    (done,) = events(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            one, two = x.sin(), x.cos()
            ops.npu_tagged_event_record(done)
        ops.npu_tagged_event_wait(done)
        return torch.cat([one, two])

    check(compiled(function), lambda x: torch.cat([x.sin(), x.cos()]), (vector(1, 2),))
    assert "cat" in operators


def test_a_copy_that_is_removed_and_dead_work_keep_the_order(operators: list[str]) -> None:
    """Without the clone and the dead operator between them, record and wait still order what they did."""
    ready, done = events(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.exp()
        ops.npu_tagged_event_record(ready)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(ready)
            z = y.clone()
            z.sin()
            ops.npu_tagged_event_record(done)
        with scope.npu_stream_switch("other"):
            ops.npu_tagged_event_wait(done)
            return z * 2

    check(compiled(function), lambda x: (x + 1) * 2, (vector(1, 2),), (vector(5, -6),))
    assert not {"clone", "sin", "exp"} & set(operators)


class _Drawn:
    """A random graph on three streams in which each use of another stream's value waits for it, and nothing else does."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.graph = fx.Graph()
        self.values: list[fx.Node] = []
        self.known: dict[str, set[fx.Node]] = {"": set(), "a": set(), "b": set()}
        with FakeTensorMode() as mode:
            self.fake = torch.empty(4, device="npu")
        self.mode = mode
        inputs = [self.graph.placeholder(f"input_{number}") for number in range(3)]
        for node in inputs:
            with mode:
                node.meta["val"] = torch.empty(4, device="npu")
        self.values += inputs
        for _ in range(self.draw.randint(6, 14)):
            self._add(self.draw.choice(list(self.known)))
        written = self.draw.sample(inputs, self.draw.randint(0, 2))
        results = [self._on("", value) for value in self.draw.sample(self.values[3:], 2)]
        for target in written:
            source = self._on("", self.draw.choice(self.values[3:]))
            self._call("", aten.copy_.default, target, source)
        self.graph.output(results)
        self.module = fx.GraphModule({}, self.graph)

    def _add(self, stream: str) -> None:
        """One operator of one or two operands on a stream."""
        operator, arity = self.draw.choice(
            [
                (aten.add.Tensor, 2),
                (aten.mul.Tensor, 2),
                (aten.relu.default, 1),
                (aten.neg.default, 1),
                (aten.clone.default, 1),
            ]
        )
        operands = [self._on(stream, self.draw.choice(self.values[-6:])) for _ in range(arity)]
        self.values.append(self._call(stream, operator, *operands))
        self.known[stream].add(self.values[-1])

    def _on(self, stream: str, value: fx.Node) -> fx.Node:
        """The value, once its stream was waited for."""
        home = value.meta.get("stream_label", "")
        if value.op == "placeholder" or home == stream or value in self.known[stream]:
            return value
        record = self._call(home, ours.record.default)
        self._call(stream, ours.wait.default, [record])
        self.known[stream] |= self.known[home]
        return value

    def _call(self, stream: str, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        if stream:
            node.meta["stream_label"] = stream
        if target not in (ours.record.default, ours.wait.default):
            with self.mode:
                node.meta["val"] = torch.empty(4, device="npu")
        return node


class _InOrder(fx.Interpreter):
    """Runs a graph on CPU tensors, events left out."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator."""
        return (
            None if target in (ours.record.default, ours.wait.default) else super().call_function(target, args, kwargs)
        )


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs_are_right_and_free_of_races(seed: int) -> None:
    """After all passes, results and written inputs are those of the graph in order, and replays race nowhere."""
    drawn = _Drawn(seed)
    inputs = [torch.arange(4.0) * scale - 1 for scale in (1, 2, 3)]
    expected = [tensor.clone() for tensor in inputs]
    expected = [*_InOrder(fx.GraphModule({}, drawn.graph)).run(*expected), *expected]
    fast: Callable[..., Any] = compile_fx(drawn.module, options={"stream_check": "raise"})
    with npu_emulator.detect_races() as races:
        for schedule in ("fifo", "lazy", f"random:{seed}"):
            mine = [tensor.npu() for tensor in inputs]
            with npu_emulator.schedule(schedule):
                for have, want in zip([*fast(*mine), *mine], expected, strict=True):
                    assert torch.equal(have.cpu(), want), f"{schedule}\n{drawn.module.graph}"
    assert not races, f"{races[0]}\n{drawn.module.graph}"
