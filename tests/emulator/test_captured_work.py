"""What a graph carries beside kernels, and who may capture: pinned copies, host functions, backward threads, other threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from npu_emulator import schedule

ORDERS = ["fifo", "lazy", "random:3", "random:8", "pct:1:2"]


@pytest.mark.parametrize("order", ORDERS)
def test_pinned_copies_both_ways_are_tasks_of_the_graph(order: str) -> None:
    """Each replay reads the one pinned buffer anew and writes the other, in its place among the kernels."""
    source, target = torch.tensor([1.0, 2.0]).pin_memory(), torch.zeros(2).pin_memory()
    graph = torch.npu.NPUGraph()
    with schedule(order):
        with torch.npu.graph(graph):
            y = source.to("npu", non_blocking=True) * 10
            target.copy_(y, non_blocking=True)
            y.zero_()
        assert target.tolist() == [0, 0]
        for values in ([1.0, 2.0], [5.0, 6.0]):
            source.copy_(torch.tensor(values))
            graph.replay()
            torch.npu.synchronize()
            assert target.tolist() == [10 * value for value in values]


@pytest.mark.parametrize("order", ORDERS)
def test_host_functions_on_a_side_stream_of_a_capture(order: str) -> None:
    """Each replay calls it once, behind the side stream's work and in front of what waits for that stream."""
    seen: list[list[float]] = []
    graph, side, stream = torch.npu.NPUGraph(), torch.npu.Stream(), torch.npu.Stream()
    host, x = torch.zeros(2).pin_memory(), torch.ones(2, device="npu")
    torch.npu.synchronize()
    torch.npu._subscribe_report(side)
    with schedule(order):
        with torch.npu.stream(stream):
            graph.capture_begin()
            side.wait_stream(stream)
            with torch.npu.stream(side):
                x.add_(1)
                host.copy_(x, non_blocking=True)
                torch.npu._launch_host_func(side, lambda scale: seen.append((host * scale).tolist()), 10)
            stream.wait_stream(side)
            x.mul_(2)
            graph.capture_end()
            assert not seen
            graph.replay()
            graph.replay()
        stream.synchronize()
    torch.npu._unsubscribe_report(side)
    assert seen == [[20, 20], [50, 50]]


class _Refused(torch.autograd.Function):
    """Twice its input; its gradient asks the host for something."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        """Note how to ask."""
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Ask on a thread of autograd's."""
        assert threading.current_thread() is not threading.main_thread()
        if ctx.how == "read":
            gradient.sum().item()
        else:
            torch.npu.synchronize()
        return gradient * 2, None


@pytest.mark.parametrize("how", ["read", "synchronise"])
def test_a_backward_thread_is_refused_what_its_capture_forbids(how: str) -> None:
    """Autograd runs the backward of a capture on a thread of its own: the code and the line come from there."""
    x = torch.ones(2, device="npu", requires_grad=True)
    line = _Refused.backward.__code__.co_firstlineno + (5 if how == "read" else 7)
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(RuntimeError) as refused:
        _Refused.apply(x, how).sum().backward()
    assert "107030" in str(refused.value)
    assert f"{__file__}:{line}" in str(refused.value)
    assert (x.detach() + 1).cpu().tolist() == [2, 2]


@pytest.mark.parametrize("order", ORDERS[:3])
def test_gradients_captured_on_a_backward_thread(order: str) -> None:
    """The kernels that autograd's thread launches are the graph's: each replay gives the gradients of new inputs."""
    weight, x = torch.ones(3, 3, device="npu", requires_grad=True), torch.ones(2, 3, device="npu")
    graph = torch.npu.NPUGraph()
    with schedule(order):
        with torch.npu.graph(graph):
            (gradient,) = torch.autograd.grad((x @ weight).pow(2).sum(), weight)
        for value in (1.0, 2.0):
            x.fill_(value)
            graph.replay()
            assert gradient.cpu().tolist() == [[2 * 2 * 3 * value * value] * 3] * 3


def test_threads_capture_and_replay_at_once() -> None:
    """Four threads, each with a graph of its own in mode thread_local: nobody waits for ever, no value is another's."""
    results: dict[int, float] = {}

    def work(number: int) -> None:
        stream, graph = torch.npu.Stream(), torch.npu.NPUGraph()
        with torch.npu.stream(stream):
            x = torch.full((8,), float(number), device="npu")
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            y = x
            for _ in range(20):
                y = y + 1
            graph.capture_end()
            graph.replay()
            results[number] = y.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=900)
    assert results == {number: 8.0 * (number + 20) for number in range(4)}
