"""Compiled code called from several devices, streams and modes, and with inputs that lie in larger memory."""

from __future__ import annotations

import gc

import pytest
import torch
from device_helpers import NPU, check, compiled, random

import npu_emulator
from npugraph_ex.errors import NestedCaptureError
from npugraph_ex.report.captures import capture_records, captures_so_far


def test_two_devices_in_turn() -> None:
    """Each device has its own graphs; results lie on the device of their inputs, whichever device is current."""
    if torch.npu.device_count() < 2:
        pytest.skip("one device")
    graph = compiled(lambda x, y: (x @ y).relu() + x)
    kept = []
    for step in range(8):
        device = f"npu:{step % 2}"
        x, y = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
        with torch.npu.device(step // 4):
            kept.append((graph(x, y), (x @ y).relu() + x, device))
    for have, want, device in kept:
        assert str(have.device) == device
        torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0)


def test_a_weight_on_another_device_runs_uncaptured() -> None:
    """A graph over two devices cannot be one captured graph; it gives eager's values all the same."""
    if torch.npu.device_count() < 2:
        pytest.skip("one device")
    graph, mark = compiled(lambda x, y: x * 2 + y.to("npu:0")), captures_so_far()
    for _ in range(3):
        x, y = torch.randn(4, device="npu:0"), torch.randn(4, device="npu:1")
        torch.testing.assert_close(graph(x, y).cpu(), (x.cpu() * 2 + y.cpu()))
    assert not capture_records(after=mark)


@pytest.mark.parametrize("order", ["fifo", "lazy", "random:1", "random:2"])
def test_calls_on_two_streams_follow_one_another(order: str) -> None:
    """The graph's buffers and pool serve one call at a time, on whatever streams the calls are queued."""
    graph = compiled(lambda x: (x * 2).exp().cumsum(0) + x, clone_output=True)
    streams = [torch.npu.Stream() for _ in range(2)]
    graph(random(16))
    inputs = [random(16) for _ in range(6)]
    torch.npu.synchronize()
    with npu_emulator.schedule(order):
        results = []
        for number, x in enumerate(inputs):
            with torch.npu.stream(streams[number % 2]):
                results.append(graph(x))
        torch.npu.synchronize()
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result.cpu(), ((x * 2).exp().cumsum(0) + x).cpu(), rtol=0, atol=0)


def test_inference_mode_and_plain_calls_in_turn() -> None:
    """Results of calls inside and outside of inference_mode stay as they are, mutated inputs included."""

    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return (state * 2).relu()

    graph = compiled(function)
    state, expected, kept = random(5), None, []
    expected = state.clone()
    for step in range(6):
        with torch.inference_mode(mode=bool(step % 2)), torch.no_grad():
            x = random(5)
            kept.append((graph(x, state), function(x, expected)))
    for have, want in kept:
        torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0)
    torch.testing.assert_close(state.cpu(), expected.cpu(), rtol=0, atol=0)


def test_results_outlive_a_reset() -> None:
    """After `torch.compiler.reset()` and a collection, results of the graphs that are gone still hold their values."""
    kept = []
    for _ in range(4):
        graph = compiled(lambda x: (x * 3).tanh())  # resets Dynamo
        x = random(64)
        kept.append((graph(x), (x * 3).tanh()))
        del graph
        gc.collect()
        torch.randn(4096, device="npu")
    for have, want in kept:
        torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0)


def test_weights_replaced_after_capture() -> None:
    """vllm-ascend#13902: weights moved, loaded anew and re-allocated after capture are the ones that count."""
    model = torch.nn.Linear(4, 4, device="npu")
    graph, kept = compiled(model), []
    replacements = (
        lambda: None,
        lambda: setattr(model.weight, "data", random(4, 4)),
        lambda: model.load_state_dict({"weight": random(4, 4), "bias": random(4)}),
        lambda: model.weight.data.resize_(0).resize_(4, 4).copy_(random(4, 4)),
        lambda: setattr(model, "bias", torch.nn.Parameter(random(4))),
    )
    with torch.no_grad():
        for replace in replacements:
            replace()
            for _ in range(2):
                x = random(2, 4)
                kept.append((graph(x), model(x)))
    for have, want in kept:
        torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_read_beyond_their_own_elements(dynamic: bool) -> None:
    """`as_strided` reaches memory around a view: the graph reads the caller's, because a copy of the view has none."""
    graph, mark = compiled(lambda x: x.as_strided((8,), (1,), 0) * 2, dynamic=dynamic), captures_so_far()
    kept = []
    for _ in range(4):
        base = random(8)
        kept.append((graph(base[3:6]), base * 2))
    for have, want in kept:
        torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0)
    assert capture_records(after=mark)


def test_poison_reaches_complex_results() -> None:
    """`poison_results` has a filling for every dtype that can hold a wrong value."""
    graph = compiled(lambda x: (x * 2, x.real > 0), clone_output=False, poison_results=True)
    first, flags = graph(random(4, dtype=torch.complex64))
    graph(random(4, dtype=torch.complex64))
    assert first.cpu().isnan().all()
    assert flags.dtype == torch.bool


@pytest.mark.parametrize("value", [3, 2.5, True])
def test_numbers_as_inputs(value: float) -> None:
    """Plain Python numbers among the inputs are compared, not frozen."""
    check(lambda x, n: x * n, [(random(3), value), (random(3), value), (random(3), value)])


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_a_capture_of_the_programs_own_cannot_hold_a_replay(calls_before: int) -> None:
    """Called inside `torch.npu.graph`, a function says so before it has drawn streams into that capture, and works afterwards."""
    graph, x = compiled(lambda x: x @ x + 1), torch.ones(4, 4, device=NPU)
    kept = [graph(x) for _ in range(calls_before)]
    with pytest.raises(NestedCaptureError, match="'force_eager': True"), torch.npu.graph(torch.npu.NPUGraph()):
        graph(x)
    x.fill_(2)
    assert graph(x).eq(17).all().item()
    assert all(result.eq(5).all().item() for result in kept)


@pytest.mark.parametrize("calls_before", [0, 1])
def test_force_eager_lets_a_function_be_part_of_another_capture(calls_before: int) -> None:
    """The operators of the function are captured with the rest, and each replay runs them on the values of that moment."""
    function, x = compiled(lambda x: x @ x + 1, force_eager=True), torch.ones(4, 4, device=NPU)
    for _ in range(calls_before):
        function(x)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = function(x * 2)
    for value in (1, 2, 3):
        x.fill_(value)
        graph.replay()
        assert y.eq((2 * value) ** 2 * 4 + 1).all().item()
