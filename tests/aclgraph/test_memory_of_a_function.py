"""Compiled graphs of one function share memory: what Dynamo compiles once for each size keeps what one compilation keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch
from device_helpers import NPU, Kept, agree, compiled
from torch.fx.experimental.proxy_tensor import make_fx

import npu_emulator
from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import compiled_graph
from npugraph_ex.aclgraph.compiled_graph import CompiledGraph
from npugraph_ex.aclgraph.frame_memory import FrameMemory
from npugraph_ex.config import CompilerConfig
from npugraph_ex.errors import NestedCaptureError
from npugraph_ex.frontend.entry.backend import get_compiler

WIDTH = 8
Function = Callable[..., Any]


def _rolled(x: torch.Tensor) -> torch.Tensor:
    return (x.roll(1) + 1).cumsum(0).roll(2)


def _several(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a = x.flip(0).roll(3)
    b = (a * 2).roll(1)
    return b.neg().roll(1), a, b[:1]


def _writing(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(1)
    y = x.roll(1)
    return y.roll(1) - 3, y


FUNCTIONS: tuple[Function, ...] = (_rolled, _several, _writing)


@pytest.fixture(name="graphs")
def _new_graphs() -> Callable[[], list[CompiledGraph]]:
    """The compiled graphs that the test has made and that still live."""
    torch.compiler.reset()
    known = compiled_graph._living()
    return lambda: [graph for graph in compiled_graph._living() if graph not in known]


def _memories(graphs: list[CompiledGraph]) -> set[FrameMemory]:
    return {graph.memory for graph in graphs}


def _ints(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-99, 99, (size, WIDTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_sizes_of_one_function_share_and_others_do_not(graphs: Callable[[], list[CompiledGraph]]) -> None:
    """Each `torch.compile` has memory of its own, and so has each function that it compiles, and each device."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = _rolled(x)
        torch._dynamo.graph_break()
        return _rolled(y)

    torch.compiler.reset()
    one = torch.compile(_rolled, backend="npugraph_ex", dynamic=False)
    two = torch.compile(broken, backend="npugraph_ex", dynamic=False)
    for size in (3, 5, 9):
        one(_ints(size).npu())
        two(_ints(size).npu())
    assert len(graphs()) == 9
    assert len(_memories(graphs())) == 3
    with torch.npu.device(1):
        one(_ints(7).to("npu:1"))
    assert len(_memories(graphs())) == 4


@pytest.mark.slow
def test_a_graph_of_all_sizes_joins_that_of_the_first(graphs: Callable[[], list[CompiledGraph]]) -> None:
    """Dynamo compiles for the first size alone, and then for all others. The bytes of both count once."""
    graph = compiled(_rolled, dynamic=None)
    for size in (3, 5, 9):
        x = _ints(size)
        assert torch.equal(graph(x.npu()).cpu(), _rolled(x))
    assert len(graphs()) == 2
    assert len(_memories(graphs())) == 1
    first, second = sorted(one.number for one in graphs())
    bytes_ = compiled_graph.pool_bytes()
    assert bytes_[first] > 0 == bytes_[second]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["use_graph_pool", "reuse_graph_pool_in_same_fx", "clone_output"])
def test_an_option_says_where_captures_lie(option: str, graphs: Callable[[], list[CompiledGraph]]) -> None:
    """A caller's pool is that of all graphs; a pool for each capture stays one for each; another graph overwrites no result."""
    value = torch.npu.graph_pool_handle() if option == "use_graph_pool" else False
    graph, kept = compiled(_rolled, **{option: value}), Kept()
    for size in (3, 5, 9):
        x = _ints(size)
        kept.append((graph(x.npu()), _rolled(x)))
    agree(kept)
    pools = {handle for one in graphs() for handle in one.memory.pool.handles}
    assert len(_memories(graphs())) == 3
    assert pools == {value} if option == "use_graph_pool" else len(pools) >= 3


def test_other_backends_that_split_a_graph_share_nothing(graphs: Callable[[], list[CompiledGraph]]) -> None:
    """The parts of one graph run one after another, and the results of all live together."""

    def splitting(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Function:
        from npugraph_ex import get_npu_backend

        copy = torch.fx.GraphModule(gm, torch.fx.Graph())
        copy.graph.output(copy.graph.graph_copy(gm.graph, {}))
        return get_npu_backend()(copy, inputs)

    torch.compiler.reset()
    graph = torch.compile(_rolled, backend=splitting, dynamic=False)
    for size in (3, 5):
        graph(_ints(size).npu())
    assert len(_memories(graphs())) == len(graphs()) == 2


class Frame:
    """Compiles functions as Dynamo does what one frame compiles to, so that a test can drop each graph by itself."""

    def __init__(self) -> None:
        self.frame = _torch_private.Frame(_rolled.__code__, self)

    def compile(self, function: Function, size: int) -> Function:
        """The function for one size."""
        gm = make_fx(function, tracing_mode="fake")(torch.zeros(size, WIDTH, dtype=torch.int64, device=NPU))
        compiler = get_compiler(CompilerConfig())
        compiler.frame = self.frame
        return compiler(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])


@pytest.mark.slow
def test_the_last_captures_go_before_another_graph_has_some() -> None:
    """torch_npu frees a pool with its last graph; the pool of a function outlives it, until its last compiled graph goes."""
    frame = Frame()
    one, other = frame.compile(_rolled, 5), frame.compile(_rolled, 7)
    memory = weakref.ref(other.runner.memory)
    for _ in range(3):
        one(_ints(5).npu())
        del one
        gc.collect()
        one = frame.compile(_rolled, 5)
    x = _ints(7)
    result = other(x.npu())
    assert len(other.runner.memory.pool.handles) == 1
    del one, other
    gc.collect()
    assert torch.equal(result[0].cpu(), _rolled(x))
    assert memory() is None


def test_a_capture_that_could_not_begin_is_not_the_first() -> None:
    """The results of a function's first capture lie where later captures write nothing; this one is made as the second."""
    frame = Frame()
    one, other = frame.compile(_rolled, 5), frame.compile(_several, 5)
    x = _ints(5).npu()
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(NestedCaptureError):
        one(x)
    kept: Kept = []
    for _ in range(3):
        kept += zip(other(x), _several(x.cpu()), strict=True)
        kept += zip(one(x), [_rolled(x.cpu())], strict=True)
        agree(kept)
        del kept[:-1]


def test_a_refused_graph_leaves_the_others_their_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs operator by operator; the captures of other sizes stay, with their results."""
    frame = Frame()
    one, other = frame.compile(_rolled, 5), frame.compile(_several, 7)
    x, y = _ints(5).npu(), _ints(7).npu()
    kept = list(zip(other(y), _several(y.cpu()), strict=True))
    one.runner._give_up("a test says so", "")
    with npu_emulator.null_kernels():  # no replay of a capture that is gone, no new one
        assert other.runner.keys() == 1
    for _ in range(3):
        kept += zip(one(x), [_rolled(x.cpu())], strict=True)
        kept += zip(other(y), _several(y.cpu()), strict=True)
        agree(kept)
        kept = kept[-2:]
    assert (one.runner.keys(), other.runner.keys()) == (0, 1)


@pytest.mark.slow
def test_gradients_of_several_sizes() -> None:
    """What a backward needs of one size is not overwritten by the forward of another, whichever backward comes first."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.sin(x @ w).roll(1) * torch.cos(x)).exp()

    graph, kept = compiled(function), []
    sizes = Random(5)
    for _ in range(6):
        calls = []
        for size in sizes.choices((3, 5, 8), k=4):
            x, w = torch.randn(size, WIDTH), torch.randn(WIDTH, WIDTH)
            here = [value.clone().npu().requires_grad_() for value in (x, w)]
            there = [value.clone().npu().requires_grad_() for value in (x, w)]
            calls.append((here, graph(*here), there, function(*there)))
        sizes.shuffle(calls)
        for here, have, there, want in calls:
            have.sum().backward()
            want.sum().backward()
            kept += [(a.grad, b.grad) for a, b in zip(here, there, strict=True)] + [(have.detach(), want.detach())]
    for have, want in kept:
        torch.testing.assert_close(have.cpu(), want.cpu())


@pytest.mark.slow
def test_dynamo_forgets_while_results_live(graphs: Callable[[], list[CompiledGraph]]) -> None:
    """After `torch.compiler.reset` the memory goes with its graphs; results that are held stay what they are."""
    kept: Kept = []
    graph = compiled(_rolled)
    for size in (3, 5, 9, 5, 3):
        x = _ints(size)
        kept.append((graph(x.npu()), _rolled(x)))
    memory = weakref.ref(graphs()[0].memory)
    torch.compiler.reset()
    gc.collect()
    assert memory() is None
    for size in (3, 5, 9, 5, 3):
        x = _ints(size, 1)
        kept.append((graph(x.npu()), _rolled(x)))
    agree(kept)


@pytest.mark.slow
def test_two_threads_call_two_sizes() -> None:
    """Calls of one function exclude each other, of whatever size: each thread gets its own values."""
    frame = Frame()
    functions = {size: frame.compile(_several, size) for size in (5, 7)}
    inputs = {size: _ints(size).npu() for size in (5, 7)}
    for size in (5, 7) * 12:  # so that no thread captures, which would forbid the other to wait for the device
        kept = [functions[size](inputs[size]) for _ in range(4)]
        kept.clear()

    def calls(size: int) -> list[int]:
        want, stream, wrong = _several(_ints(size)), torch.npu.Stream(), []
        with torch.npu.stream(stream):
            for number in range(60):
                got = functions[size](inputs[size])
                stream.synchronize()
                if not all(torch.equal(one.cpu(), other) for one, other in zip(got, want, strict=True)):
                    wrong.append(number)
        return wrong

    torch.npu.synchronize()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(calls, (5, 7))) == [[], []]


class Interleaved:
    """Calls of several sizes and functions of one frame, in an order drawn at random: streams, threads, results, graphs."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.frame = Frame()
        self.compiled: dict[tuple[Function, int], Function] = {}
        self.kept: Kept = []
        self.streams = [torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()]
        self.threads = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]

    def run(self, steps: int) -> None:
        """Take so many steps, and compare all results that are held after some of them and at the end."""
        for _ in range(steps):
            self.random.choices(
                (self._call, self._drop_results, self._drop_graph, self._reset, self._compare), (20, 6, 3, 1, 4)
            )[0]()
        self._compare()
        for thread in self.threads:
            thread.shutdown()

    def _call(self) -> None:
        key = self.random.choice(FUNCTIONS), self.random.choice((3, 5, 8, 40))
        if key not in self.compiled:
            self.compiled[key] = self.frame.compile(*key)
        x, stream = _ints(key[1], self.random.randrange(1000)), self.random.choice(self.streams)

        def call() -> list[torch.Tensor]:
            with torch.npu.stream(stream):
                return list(self.compiled[key](x.npu()))

        where = self.random.choice((None, *self.threads))
        results = call() if where is None else where.submit(call).result()
        wanted = key[0](x)
        self.kept += zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True)

    def _drop_results(self) -> None:
        self.kept = [one for one in self.kept if self.random.random() < 0.2]

    def _drop_graph(self) -> None:
        if self.compiled:
            del self.compiled[self.random.choice(list(self.compiled))]

    def _reset(self) -> None:
        self.random.choice((self.compiled.clear, compiled_graph.invalidate, gc.collect))()

    def _compare(self) -> None:
        torch.npu.synchronize()
        agree(self.kept)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_interleaved(seed: int) -> None:
    """Every result stays what eager mode gives, without a race between streams and without use of freed memory."""
    with npu_emulator.schedule(f"random:{seed}"), npu_emulator.check_memory() as faults:
        with npu_emulator.detect_races() as races:
            Interleaved(seed).run(60)
        torch.npu.synchronize()
    assert not races, races[0]
    assert faults == []
