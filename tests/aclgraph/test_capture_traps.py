"""The known traps of capture: each as programs compared with eager mode over at least three calls, all results alive.

Ids are the public threads in which a shipped system fell into the trap. Further traps of the list: the host in
`test_host_traps`, results overwritten in `test_traps`, replaced weights in `test_where_it_is_called`, update lists and
workspaces in `test_host_arguments`.
"""

from __future__ import annotations

import gc
import random as random_numbers
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from device_helpers import NPU, Kept, agree, compiled, random

from npugraph_ex import invalidate
from npugraph_ex.aclgraph import capturer, outputs, side_streams
from npugraph_ex.errors import NpuGraphExError
from npugraph_ex.report.captures import capture_records, captures_so_far


def take_freed_memory() -> None:
    """Let others have what was freed."""
    for size in (8, 64, 256):
        torch.full((size,), -1.0, device=NPU)


@pytest.mark.parametrize("options", [{}, {"clone_output": True}, {"stable_inputs_in_place": False}])
def test_no_stale_address(options: dict[str, bool]) -> None:
    """vllm#53915: inputs, weights and written inputs that die between calls, their memory taken by others, are read no more."""

    def function(x: torch.Tensor, weight: torch.nn.Parameter, state: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return x * weight + state

    graph, kept = compiled(function, **options), Kept()
    weight, state = torch.nn.Parameter(random(64), requires_grad=False), random(64)
    for step in range(12):
        if step % 4 == 3:
            weight = torch.nn.Parameter(random(64), requires_grad=False)
        if step % 3 == 2:
            state = random(64)
        x, twin = random(64), state.clone()
        kept.append((graph(x, weight, state), function(x, weight, twin)))
        kept.append((state.clone(), twin))
        del x
        take_freed_memory()
    agree(kept)


@pytest.mark.parametrize("options", [{}, {"stable_inputs_in_place": True}])
def test_an_input_without_memory_is_an_error_as_in_eager_mode(options: dict[str, bool]) -> None:
    """Its storage was resized to nothing since the last call; no copy reads a null address, and later calls are right."""
    graph = compiled(lambda x: x * 2, **options)
    x = torch.ones(1024, device=NPU)
    with torch.inference_mode():
        assert graph(x)[0].item() == graph(x)[0].item() == 2
        x.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"has no memory.*507011"):
            graph(x)[0].item()
        assert graph(torch.ones(1024, device=NPU))[0].item() == 2


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_an_adopted_input_with_other_memory_is_an_error(size: int) -> None:
    """The graph reads what the tensor had at the capture."""
    graph = compiled(lambda x: x * 2, clone_input=False)
    x = torch.ones(1024, device=NPU)
    with torch.inference_mode():
        assert graph(x)[0].item() == graph(x)[0].item() == 2
        x.untyped_storage().resize_(size)
        with pytest.raises(NpuGraphExError, match="resized or replaced"):
            graph(x)
        invalidate()
        assert graph(torch.ones(1024, device=NPU))[0].item() == 2


def test_an_input_read_in_place_dies() -> None:
    """vllm#53915: an input that had earned to be read where it lies moves, dies, and others take its memory."""
    graph, kept, taken = compiled(lambda x: x * 2 + 1), Kept(), []
    for _ in range(3):
        x = random(64)
        for _ in range(10):
            x.add_(1)
            kept.append((graph(x), x * 2 + 1))
        del x
        taken.append(torch.full((64,), -1.0, device=NPU))
    agree(kept)


def products(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A chain of operators none of which can work in place: two pieces of memory take turns."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = x.roll(1)
        return x

    return function


@pytest.mark.parametrize("lying", [False, True], ids=["in banks", "copied"])
@pytest.mark.parametrize("count", [3, 4])
def test_results_lie_where_no_other_graph_writes(count: int, lying: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#148439, #158551: what one graph freed at its capture is not another's result, which its replay would overwrite.

    If nobody knows which operators allocate the results, these lie among what other captures write, and are copied.
    """
    if lying:
        monkeypatch.setattr(capturer, "makers_of_results", lambda _: frozenset())
    function, kept = products(count), Kept()
    graph, first = compiled(function, dynamic=True), random(64)
    graph(first)
    for size in (60, 50, 40, 60):  # all results held
        x = random(size)
        kept.append((graph(x), function(x)))
        torch.testing.assert_close(graph(first).cpu(), function(first).cpu(), rtol=0, atol=0)
    agree(kept)


@pytest.mark.slow
@pytest.mark.parametrize("held", [0, 1, 2, 3])
@pytest.mark.parametrize("streams", [1, 2])
def test_results_of_all_sizes_share_memory(held: int, streams: int) -> None:
    """Sizes take turns, with the results of so many calls held, on one stream or two: each held result keeps its value."""
    draw = random_numbers.Random(held)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x.roll(1).cumsum(0)
        return total.roll(2), (total * 2).sum(1), total[:1]

    graph, kept = compiled(function, dynamic=True), []
    turns = [torch.npu.current_stream(), *(torch.npu.Stream() for _ in range(streams - 1))]
    for call in range(60):
        x = random(draw.choice((2, 3, 30, 64, 65)), 4)
        turn = turns[call % streams]
        turn.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(turn):
            kept.append((graph(x), [want.clone() for want in function(x)]))
        torch.npu.current_stream().wait_stream(turn)
        for have, want in kept:
            for one, other in zip(have, want, strict=True):
                assert torch.equal(one, other), f"call {call}"
        while len(kept) > held:
            kept.pop(draw.randrange(len(kept)))


def test_another_graph_of_the_pool_runs_before_results_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions in one pool and two threads on one stream: the other's replay comes between a replay and its copies."""
    pool, kept, copy_results = torch.npu.graph_pool_handle(), Kept(), outputs.Outputs.copy_results
    function, x, stream = products(3), random(64), torch.npu.Stream()
    monkeypatch.setattr(side_streams, "draw", lambda *_: stream)  # memory of one stream is not given to another
    graphs = [compiled(function, clone_output=True, use_graph_pool=pool) for _ in range(2)]
    for graph in graphs:
        graph(x)

    def copied_later(self: outputs.Outputs, inputs: Any) -> list[Any]:
        monkeypatch.setattr(outputs.Outputs, "copy_results", copy_results)
        graphs[1](x + 1)
        return copy_results(self, inputs)

    monkeypatch.setattr(outputs.Outputs, "copy_results", copied_later)
    kept.append((graphs[0](x), function(x)))
    agree(kept)


@pytest.mark.slow
def test_a_result_outlives_the_graph_and_its_pool() -> None:
    """Memory that is lent to a result stays until the result is gone, and no longer."""
    gc.collect()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    graph, kept = compiled(lambda x: x.roll(1).roll(1), dynamic=True), Kept()
    for size in (1 << 20, 1 << 19, 1 << 18):
        x = random(size)
        kept.append((graph(x), x.roll(2)))
    del graph, x
    torch.compiler.reset()
    gc.collect()
    torch.npu.empty_cache()
    taken = [torch.full((1 << 20,), -1.0, device=NPU) for _ in range(4)]
    agree(kept)
    kept.clear()
    del taken
    gc.collect()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() <= before


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.dropout(x, 0.5, training=True),
        lambda x: x + torch.rand_like(x) * torch.randn(x.shape, device=NPU),
        lambda x: torch.bernoulli(x.abs().clamp(0, 1)) + x.clone().normal_(),
        lambda x: torch.randint(0, 9, (64,), device=NPU) + torch.rand_like(x),
    ],
    ids=["dropout", "rand and randn", "in place", "integers"],
)
@pytest.mark.parametrize("options", [{}, {"force_eager": True}], ids=["captured", "uncaptured"])
def test_random_numbers_are_those_of_eager_mode(function: Callable[..., Any], options: dict[str, bool]) -> None:
    """Numbers frozen at capture: from one seed, calls draw what eager calls draw, no two alike; the seed again repeats them."""
    graph, x = compiled(function, **options), random(64)
    graph(x)
    sequences = []
    for draw in (graph, graph, function):
        torch.manual_seed(5)
        sequences.append([draw(x) for _ in range(4)])
    first, again, eager = ([draw.cpu() for draw in sequence] for sequence in sequences)
    assert all(not torch.equal(one, other) for number, one in enumerate(first) for other in first[:number])
    for one, other, want in zip(first, again, eager, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, want)


@pytest.mark.slow
def test_a_recapture_is_no_new_graph(caplog: pytest.LogCaptureFixture) -> None:
    """Results kept, addresses that move and `force_recapture` capture again; only graph keys count against the limit."""
    graph, kept = compiled(lambda x: x * 2, dynamic=True, capture_limit=2), Kept()
    for size in (3, 5) * 6:  # two keys, three captures each, because all results are held
        x = random(size)
        kept.append((graph(x), x * 2))
    agree(kept)
    mark = captures_so_far()
    forced = compiled(lambda x: x * 3, dynamic=True, capture_limit=2, force_recapture=True)
    for size in (3, 5) * 3:
        x = random(size)
        kept.append((forced(x), x * 3))
    agree(kept)
    assert len(capture_records(after=mark)) == 6
    assert "capture_limit" not in caplog.text


class Counting(torch.nn.Module):
    """Writes a buffer and an input once a call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.nn.Buffer(torch.zeros(1, device=NPU))

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Count the call and add the input up."""
        self.calls.add_(1)
        total.add_(x)
        return x * self.calls + total


ONCE: list[dict[str, Any]] = [
    {},
    {"force_eager": True},
    {"clone_input": False},
    {"clone_output": True},
    {"clone_output": False, "poison_results": True},
    {"force_recapture": True},
    {"capture_limit": 1},
    {"frozen_parameter": True},
    {"reuse_graph_pool_in_same_fx": False},
    {"check_numerics": True},
    {"stable_inputs_in_place": False},
    {"inplace_pass": False, "input_inplace_pass": False, "remove_noop_ops": False, "remove_cat_ops": False},
    {"dump_tensor_data": True},
    {"dump_tensor_data": True, "data_dump_stage": "original"},
]


@pytest.mark.parametrize("options", ONCE, ids=lambda options: " ".join(options) or "defaults")
def test_the_forward_runs_once_a_call(options: dict[str, Any], tmp_path: Path) -> None:
    """Static-kernel compilation ran an in-place forward twice: no option does, at the first call or any other.

    Twelve calls are enough for every reason to capture: results held, a state that moves, inputs that stay.
    """
    if "dump_tensor_data" in options:
        options = {**options, "data_dump_dir": str(tmp_path)}
    model, twin = Counting(), Counting()
    graph, kept = compiled(model, **options), Kept()
    x, total, other = random(4), random(4), torch.zeros(4, device=NPU)
    other.copy_(total)
    for call in range(12):
        if call == 10 and not options.get("frozen_parameter"):
            total = total.clone()
        result, expected = graph(x, total), twin(x, other)
        kept.append((result.clone() if options.get("clone_output") is False else result, expected))
        assert model.calls.item() == call + 1
        assert torch.equal(total.cpu(), other.cpu())
    agree(kept)


@pytest.mark.slow
def test_threads_in_the_default_mode() -> None:
    """Threads that capture and replay one graph, reading nothing until all are through: each gets its own results."""
    graph = compiled(lambda x: (x * 2 + 1).cumsum(0), dynamic=True)
    graph(random(3))
    inputs = [[random(2 + (worker + step) % 4) for step in range(8)] for worker in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda given: [graph(x) for x in given], inputs))
    agree(
        [
            (have, (x * 2 + 1).cumsum(0))
            for given, got in zip(inputs, results, strict=True)
            for x, have in zip(given, got, strict=True)
        ]
    )
