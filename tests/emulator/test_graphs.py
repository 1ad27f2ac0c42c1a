"""Capture and replay: the state machine, its errors, and the values."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

import npu_emulator
from npu_emulator import schedule


def captured(function: object, *inputs: torch.Tensor, **options: object) -> tuple[torch.npu.NPUGraph, torch.Tensor]:
    """Capture `function(*inputs)`."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        output = function(*inputs)
    return graph, output


def test_capture_computes_nothing_and_replay_reads_inputs_anew() -> None:
    """A captured kernel runs at each replay, on what its inputs hold by then."""
    x = torch.zeros(3, device="npu")
    graph, y = captured(lambda x: x * 2 + 1, x)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.cpu().tolist() == [value * 2 + 1] * 3


@pytest.mark.parametrize("policy", ["fifo", "lazy", "random:4", "random:5", "pct:1:3"])
def test_a_fork_that_joins_replays_right(policy: str) -> None:
    """Side streams drawn into a capture keep their order in every replay under every schedule."""
    x = torch.ones(3, device="npu")
    side = torch.npu.Stream()

    def forked(x: torch.Tensor) -> torch.Tensor:
        a = x + 1
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            b = a * 10
        c = a * 100
        torch.npu.current_stream().wait_stream(side)
        return b + c

    with schedule(policy):
        graph, y = captured(forked, x)
        for value in (1.0, 2.0):
            x.fill_(value)
            graph.replay()
            assert y.cpu().tolist() == [(value + 1) * 110] * 3


def test_a_fork_that_does_not_join_is_107025() -> None:
    """Ending a capture while a side stream has unjoined work names the stream and says how to join."""
    origin, side = torch.npu.Stream(), torch.npu.Stream()  # one after the other out of torch_npu's pool: they differ
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()

    def unjoined() -> None:
        with torch.npu.graph(graph, stream=origin):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                x.add_(1)

    with pytest.raises(RuntimeError, match=r"107025[\s\S]*never joined"):
        unjoined()
    assert (x + 1).cpu().tolist() == [2, 2, 2]


def test_an_allocation_after_the_join_is_no_work() -> None:
    """Memory that a side stream allocates after the event that the origin waits for needs no further join, on any schedule."""
    x, graph, side = torch.arange(8, device="npu"), torch.npu.NPUGraph(), torch.npu.Stream()
    with schedule("lazy"), torch.npu.graph(graph):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
            done = side.record_event()
            torch.empty(8, device="npu")
        torch.npu.current_stream().wait_event(done)
    graph.replay()
    assert y.tolist() == list(range(1, 9))


@pytest.mark.parametrize("operation", ["item", "cpu", "nonzero", "synchronize"])
def test_host_reads_in_a_capture_are_107030(operation: str) -> None:
    """A read of device memory by the host, or a synchronisation, cannot be captured; the device stays usable."""
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()
    action = {"item": x.sum().item, "cpu": x.cpu, "nonzero": x.nonzero, "synchronize": torch.npu.synchronize}[operation]
    with pytest.raises(RuntimeError, match=r"(?s)107030.*out of the captured region"), torch.npu.graph(graph):
        action()
    assert x.sum().item() == 3


@pytest.mark.parametrize("spelling", ["copy_", "tensor", "to", "pageable"])
def test_blocking_copies_from_the_host_in_a_capture_are_107030(spelling: str) -> None:
    """A copy from the host that blocks is refused with the operation and the line; the device stays usable."""
    x, host = torch.ones(3, device="npu"), torch.arange(3.0)
    action = {
        "copy_": lambda: x.copy_(host),
        "tensor": lambda: torch.tensor([1.0, 2.0], device="npu"),
        "to": lambda: host.to("npu"),
        "pageable": lambda: x.copy_(host, non_blocking=True),
    }[spelling]
    refused = r"(?s)aten\.copy_\.default from the host.*107030.*move it out of the captured region.*test_graphs\.py"
    with pytest.raises(RuntimeError, match=refused), torch.npu.graph(torch.npu.NPUGraph()):
        action()
    assert x.sum().item() == 3


def test_a_copy_from_pinned_memory_that_does_not_block_is_captured() -> None:
    """`non_blocking=True` from pinned memory is a task of the graph: each replay reads the buffer anew."""
    buffer = torch.tensor([1.0, 2.0]).pin_memory()
    graph, y = captured(lambda: buffer.to("npu", non_blocking=True) * 10)
    for values in ([1.0, 2.0], [3.0, 4.0]):
        buffer.copy_(torch.tensor(values))
        graph.replay()
        assert y.cpu().tolist() == [value * 10 for value in values]


def test_random_numbers_differ_from_replay_to_replay() -> None:
    """A captured random operator draws new numbers each time, reproducibly from the seed."""
    graph, y = captured(lambda: torch.rand(64, device="npu"))

    def draws() -> list[torch.Tensor]:
        torch.npu.manual_seed(3)
        found = []
        for _ in range(2):
            graph.replay()
            found.append(y.cpu())
        return found

    first, second = draws(), draws()
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_graphs_share_a_pool() -> None:
    """Two graphs in one pool that are replayed in order give the right values."""
    pool = torch.npu.graph_pool_handle()
    x = torch.ones(1024, device="npu")
    first, a = captured(lambda x: x + 1, x, pool=pool)
    second, b = captured(lambda a: a * 3, a, pool=pool)
    x.fill_(4)
    first.replay()
    second.replay()
    assert b.cpu().tolist() == [15.0] * 1024


def test_a_queued_replay_outlives_its_graph() -> None:
    """Destroying a graph after its replay was queued does not take the work back."""
    with schedule("lazy"):
        x = torch.ones(3, device="npu")
        graph, _ = captured(lambda x: x.add_(1), x)
        graph.replay()
        del graph
        gc.collect()
        assert x.cpu().tolist() == [2, 2, 2]


def test_replay_on_another_stream_is_ordered_by_events() -> None:
    """A replay belongs to the stream that is current when it is called."""
    x = torch.ones(3, device="npu")
    graph, y = captured(lambda x: x * 2, x)
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        graph.replay()
        z = y + 1
    torch.npu.current_stream().wait_stream(side)
    assert z.cpu().tolist() == [3, 3, 3]


def test_debug_dump_lists_the_tasks(tmp_path: Path) -> None:
    """`debug_dump` writes the captured tasks as a trace that torch_npu can read again."""
    graph = torch.npu.NPUGraph()
    graph.enable_debug_mode()
    x = torch.ones(3, device="npu")
    with torch.npu.graph(graph):
        x.add_(1).mul_(2)
    path = tmp_path / "graph.json"
    graph.debug_dump(str(path))
    events = [event for event in json.loads(path.read_text()) if event.get("args", {}).get("kind") == "kernel"]
    assert [event["name"] for event in events] == ["aten.add_.Tensor", "aten.mul_.Tensor"]


def test_a_kernel_that_raises_surfaces_at_the_synchronisation() -> None:
    """The error names the operator and its Python line, and the device stays usable."""
    index = torch.zeros(1, dtype=torch.int64, device="npu")
    data = torch.arange(3.0, device="npu")
    graph, _ = captured(lambda: data.gather(0, index))
    index.fill_(99)
    graph.replay()
    with pytest.raises(RuntimeError, match=r"aten\.gather.*test_graphs\.py"):
        torch.npu.synchronize()
    index.fill_(2)
    graph.replay()
    torch.npu.synchronize()
    assert (data + 1).cpu().tolist() == [1, 2, 3]


def test_null_kernels_run_nothing_but_count() -> None:
    """Under the switch a replay launches and counts its kernels and leaves memory alone."""
    x = torch.zeros(3, device="npu")
    graph, _ = captured(lambda x: x.add_(1), x)
    before = npu_emulator.kernel_counts().get("aten.add_.Tensor", 0)
    with npu_emulator.null_kernels():
        graph.replay()
        torch.npu.synchronize()
    assert npu_emulator.kernel_counts()["aten.add_.Tensor"] == before + 1
    assert x.cpu().tolist() == [0, 0, 0]
    graph.replay()
    assert x.cpu().tolist() == [1, 1, 1]


def test_the_default_stream_cannot_be_captured() -> None:
    """Beginning a capture on the default stream is refused with a sentence."""
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match=r"default stream"):
        graph.capture_begin()
    assert not torch.npu.is_current_stream_capturing()


def test_make_graphed_callables_trains() -> None:
    """PyTorch's own capture of forward and backward gives the eager gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).npu()
    data = torch.randn(2, 4, device="npu")
    model(data).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    graphed = torch.npu.make_graphed_callables(model, (torch.randn(2, 4, device="npu"),))
    model.zero_grad()
    graphed(data).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.cpu(), gradient.cpu())


@pytest.mark.parametrize("policy", ["fifo", "lazy", "random:1"])
def test_a_task_group_takes_new_arguments_between_replays(policy: str) -> None:
    """An update replaces the group's kernel from its place in stream order on, as attention with new lengths needs."""
    x, out = torch.arange(4.0, device="npu"), torch.zeros(4, device="npu")
    graph, update_stream = torch.npu.NPUGraph(), torch.npu.Stream()
    event = torch.npu.ExternalEvent()
    with schedule(policy):
        with torch.npu.graph(graph):
            stream = torch.npu.current_stream()
            event.wait(stream)
            event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            torch.add(x, 1, out=out)
            handle = torch.npu.graph_task_group_end(stream)
            result = out * 10
        for step in (1, 5):
            with torch.npu.stream(update_stream):
                torch.npu.graph_task_update_begin(update_stream, handle)
                torch.add(x, step, out=out)
                torch.npu.graph_task_update_end(update_stream)
                event.record(update_stream)
            graph.replay()
            assert result.cpu().tolist() == [10.0 * (value + step) for value in range(4)]


def test_an_update_that_launches_something_else_is_refused() -> None:
    """An update has to launch as many tasks as the group holds."""
    x = torch.zeros(4, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        x.add_(1)
        handle = torch.npu.graph_task_group_end(stream)
    stream = torch.npu.current_stream()
    torch.npu.graph_task_update_begin(stream, handle)
    with pytest.raises(RuntimeError, match="holds 1 tasks and the update launched 0"):
        torch.npu.graph_task_update_end(stream)
    graph.replay()
    assert x.cpu().tolist() == [1, 1, 1, 1]


def test_a_pool_goes_back_to_a_checkpoint() -> None:
    """After a pool's state is restored the next capture gets the memory that the forgotten one had, and the first is whole."""
    import torch_npu

    x = torch.ones(1024, device="npu")
    first, a = captured(lambda x: x + 1, x)
    state = torch_npu._C._npu_getCheckpointState(0, first.pool())
    second, b = captured(lambda a: a * 2, a, pool=first.pool())
    address = b.data_ptr()
    assert address != a.data_ptr()
    torch_npu._C._npu_setCheckpointPoolState(0, state, [b.untyped_storage()._cdata], [])
    third, c = captured(lambda a: a * 3, a, pool=first.pool())
    assert c.data_ptr() == address
    x.fill_(4)
    first.replay()
    third.replay()
    assert c.cpu().tolist() == [15.0] * 1024
    del second
