"""The usages that PyTorch and torch_npu document for streams, events, memory and graphs, each as a program with its values.

They follow the documented interfaces (torch.cuda's notes on stream semantics, on graphs and on memory, with `npu` for `cuda`;
torch_npu's pages on NPUGraph, ExternalEvent and tensor printing in graphs) and check against the same program on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch_npu

from npu_emulator import schedule


@pytest.fixture(params=["fifo", "lazy", "random:11"], autouse=True)
def _scheduled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each program under three orders of device work."""
    with schedule(request.param):
        yield


def model_and_optimizer(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a small network with the same weights on any device, and plain gradient descent with momentum."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return three batches of data and targets on the host."""
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(3)]


def test_whole_network_capture() -> None:
    """Warm-up on a side stream, one graph of forward, backward and step, replays on data copied into its inputs."""
    model, optimizer = model_and_optimizer("cpu")
    for data, target in [batches()[0]] * 3 + batches():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()
    expected = [parameter.detach() for parameter in model.parameters()]

    model, optimizer = model_and_optimizer("npu")
    static_data, static_target = (tensor.npu() for tensor in batches()[0])
    warm_up = torch.npu.Stream()
    warm_up.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(warm_up):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(model(static_data), static_target).backward()
            optimizer.step()
    torch.npu.current_stream().wait_stream(warm_up)
    graph = torch.npu.NPUGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.npu.graph(graph):
        static_loss = torch.nn.functional.mse_loss(model(static_data), static_target)
        static_loss.backward()
        optimizer.step()
    for data, target in batches():
        static_data.copy_(data)
        static_target.copy_(target)
        graph.replay()
    torch.testing.assert_close([parameter.detach().cpu() for parameter in model.parameters()], expected)


def test_partial_capture_of_two_sections() -> None:
    """Two sections graphed together, with a data-dependent branch between them, train as eager ones do."""
    results = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        first, second = torch.nn.Linear(5, 4).to(device), torch.nn.Linear(4, 3).to(device)
        x, h = torch.randn(2, 5).to(device), torch.randn(2, 4).to(device).requires_grad_()
        if device == "npu":
            first, second = torch.npu.make_graphed_callables((first, second), ((x.clone(),), (h,)))
        for _ in range(2):
            hidden = first(x)
            (second(hidden) if hidden.sum().item() > -100 else hidden).square().sum().backward()
        results.append([parameter.grad.cpu() for parameter in (*first.parameters(), *second.parameters())])
    torch.testing.assert_close(results[1], results[0])


def test_branches_of_a_capture_on_other_streams() -> None:
    """A side stream forked from the captured one by an event, and joined by another, is part of the graph."""
    x, side, graph = torch.arange(4.0, device="npu"), torch.npu.Stream(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        assert torch.npu.is_current_stream_capturing()
        forked, joined = torch.npu.Event(), torch.npu.Event()
        doubled = x * 2
        forked.record()
        with torch.npu.stream(side):
            side.wait_event(forked)
            squared = doubled.square()
            joined.record()
        negated = doubled.neg()
        torch.npu.current_stream().wait_event(joined)
        result = squared + negated
    assert not torch.npu.is_current_stream_capturing()
    x.fill_(3)
    graph.replay()
    assert result.cpu().tolist() == [30.0] * 4


def test_two_graphs_that_always_run_in_turn_share_a_pool() -> None:
    """The second capture is given the first one's pool; replays in capture order are right; `reset` ends a graph."""
    x = torch.ones(8, device="npu")
    first, second = torch.npu.NPUGraph(), torch.npu.NPUGraph()
    with torch.npu.graph(first):
        a = (x + 1) * 2
    with torch.npu.graph(second, pool=first.pool()):
        b = a - 1
    for value in (1.0, 4.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert b.cpu().tolist() == [2 * value + 1] * 8
    second.reset()
    first.replay()
    torch.npu.synchronize()


def test_a_prefetcher_copies_the_next_batch_beside_the_step() -> None:
    """Pinned batches copied on a stream of their own, handed over by `wait_stream` and `record_stream`."""
    loading, sums = torch.npu.Stream(), []
    pinned = [data.pin_memory() for data, _ in batches()]

    def fetch(host: torch.Tensor) -> torch.Tensor:
        with torch.npu.stream(loading):
            return host.to("npu", non_blocking=True)

    upcoming = fetch(pinned[0])
    for following in [*pinned[1:], None]:
        torch.npu.current_stream().wait_stream(loading)
        batch = upcoming
        batch.record_stream(torch.npu.current_stream())
        if following is not None:
            upcoming = fetch(following)
        sums.append((batch * 2).sum())
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack([data.sum() * 2 for data, _ in batches()]))


def test_timing_with_events() -> None:
    """Two timing events around work give a time once the second is complete, and an error before it is."""
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    (torch.ones(64, 64, device="npu") @ torch.ones(64, 64, device="npu")).sum()
    end.record()
    torch.npu.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0


def test_backward_runs_on_the_streams_of_the_forward() -> None:
    """A forward on a side stream is differentiated on that stream; the caller waits for it as the notes say."""
    x = torch.arange(4.0, device="npu").requires_grad_()
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        loss = (x * 3).square().sum()
        loss.backward()
    torch.npu.current_stream().wait_stream(side)
    assert x.grad.cpu().tolist() == [0.0, 18.0, 36.0, 54.0]


def test_mixed_precision_step_with_a_scaler() -> None:
    """Autocast and a gradient scaler, as the notes on mixed precision use them, move the weights as float32 does, roughly."""
    weights = []
    for half in (False, True):
        model, optimizer = model_and_optimizer("npu")
        scaler = torch.amp.GradScaler("npu", enabled=half, init_scale=128.0)
        for data, target in batches():
            optimizer.zero_grad()
            with torch.autocast("npu", dtype=torch.float16, enabled=half):
                loss = torch.nn.functional.mse_loss(model(data.npu()), target.npu())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=2e-2, atol=2e-2)


def test_tensors_printed_and_saved_by_a_graph(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch_npu's printing and saving of tensors inside a graph shows each replay's values."""
    x, graph = torch.ones(3, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 3
        torch_npu.print_npugraph_tensor(y, tensor_name="tripled")
        torch_npu.save_npugraph_tensor(y, save_path=str(tmp_path / "tripled.pt"), overwrite=True)
    for value in (1, 2):
        x.fill_(value)
        graph.replay()
        torch.npu.synchronize()
    printed = capfd.readouterr().out
    assert "tripled=tensor([3., 3., 3.])" in printed
    assert "tripled=tensor([6., 6., 6.])" in printed
    (saved,) = tmp_path.iterdir()
    assert torch.load(saved).tolist() == [6, 6, 6]


@pytest.mark.parametrize("captured", [False, True])
def test_host_functions_run_in_stream_order(captured: bool) -> None:
    """A host function runs behind the work launched before it and in front of the work after it, at each replay too."""
    stream, seen = torch.npu.Stream(), []
    host = torch.zeros(2).pin_memory()
    x = torch.ones(2, device="npu")
    torch.npu.synchronize()
    torch.npu._subscribe_report(stream)

    def work() -> torch.Tensor:
        x.mul_(2)
        host.copy_(x, non_blocking=True)
        torch.npu._launch_host_func(stream, lambda factor: seen.append((host * factor).tolist()), 10)
        return x.add_(1)

    with torch.npu.stream(stream):
        if captured:
            graph = torch.npu.NPUGraph()
            graph.capture_begin()
            work()
            graph.capture_end()
            graph.replay()
            graph.replay()
        else:
            work()
            work()
    stream.synchronize()
    torch.npu._unsubscribe_report(stream)
    assert seen == [[20, 20], [60, 60]]
    assert x.cpu().tolist() == [7, 7]


def test_memory_statistics_and_limits() -> None:
    """Reserved memory covers allocated memory, the summary names both, and a snapshot lists a live block."""
    x = torch.empty(1 << 18, device="npu")
    assert torch.npu.memory_reserved() >= torch.npu.memory_allocated() >= 1 << 20
    assert "Allocated memory" in torch.npu.memory_summary()
    blocks = [block for segment in torch.npu.memory_snapshot() for block in segment["blocks"]]
    assert any(block["state"] == "active_allocated" and block["size"] >= 1 << 20 for block in blocks)
    del x
