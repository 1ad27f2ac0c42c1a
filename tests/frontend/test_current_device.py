"""Compiled code that makes tensors on the current device, called while one or the other of two devices is current."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import compiled
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex import compile_fx
from npugraph_ex.report.captures import capture_records, captures_so_far
from npugraph_ex.versions import default_device

Function = Callable[[torch.Tensor], Any]
DEVICES = (0, 1, 0, 1, 1, 0)


@torch.compiler.nested_compile_region
def _region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, torch.arange(3, device="npu")


FUNCTIONS: dict[str, Function] = {
    "a factory": lambda _: torch.arange(4, device="npu") * 2,
    "beside an input": lambda x: (x * 2, torch.arange(3, device="npu")),
    "beside another device": lambda _: (torch.arange(4, device="npu") * 2, torch.ones(2, device="npu:0")),
    "a device object": lambda _: torch.full((3,), 2.0, device=torch.device("npu")) + 1,
    "concatenated": lambda _: torch.cat([torch.zeros(2, device="npu"), torch.ones(2, device="npu").exp()]),
    "new_zeros": lambda x: x.new_zeros(3, device="npu") + 1,
    "a constant": lambda _: torch.tensor([1, 2], device="npu") * 3,
    "to": lambda x: x.to("npu") * 2,
    "npu": lambda x: x.npu() * 2,
    "from the host": lambda _: torch.arange(3).npu() + 1,
    "in a region": lambda x: (*_region(x), *_region(x + 1)),
    "the number itself": lambda x: x + torch.npu.current_device(),
    "like an input": lambda x: torch.zeros_like(x) + x,
}


@pytest.fixture(autouse=True)
def _two_devices() -> Any:
    if torch.npu.device_count() < 2:
        pytest.skip("one device")
    yield
    torch.npu.set_device(0)


def _seen(result: Any) -> list[tuple[str, list[float]]]:
    return [(str(tensor.device), tensor.tolist()) for tensor in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_call_follows_the_current_device(name: str) -> None:
    """Results lie where eager mode lays them, whichever device was current when the function was compiled."""
    function = FUNCTIONS[name]
    graph, x = compiled(function), torch.ones(2, device="npu:0")
    for device in DEVICES:
        torch.npu.set_device(device)
        assert _seen(graph(x)) == _seen(function(x)), f"device {device}"
    with torch.npu.device(1):
        assert _seen(graph(x)) == _seen(function(x))


@pytest.mark.parametrize(
    "options", [{"force_eager": True}, {"inplace_pass": False, "remove_cat_ops": False}, {"frozen_parameter": True}]
)
def test_with_options(options: dict[str, Any]) -> None:
    """Without a capture too, and with other passes."""
    function = FUNCTIONS["concatenated"]
    graph, x = compiled(function, **options), torch.ones(2, device="npu:0")
    for device in DEVICES:
        torch.npu.set_device(device)
        assert _seen(graph(x)) == _seen(function(x))


def test_each_device_is_captured_once() -> None:
    """A guard has the function compiled for each device; the graphs are replayed in turn."""
    graph, x, mark = compiled(FUNCTIONS["a factory"]), torch.ones(2, device="npu:0"), captures_so_far()
    for device in DEVICES:
        torch.npu.set_device(device)
        graph(x)
    assert len(capture_records(after=mark)) == 2


def test_inputs_of_a_device_that_is_not_current() -> None:
    """A graph over its inputs alone runs on their device, captured, whichever is current."""
    graph, mark = compiled(lambda x: x.sin() + 1), captures_so_far()
    x = torch.ones(2, device="npu:0")
    for device in DEVICES:
        torch.npu.set_device(device)
        assert _seen(graph(x)) == _seen(x.sin() + 1)
    assert len(capture_records(after=mark)) == 1


def test_random_numbers_come_from_the_current_devices_generator() -> None:
    """From one seed each device's generator gives eager mode's numbers, and moves as far."""
    graph, x = compiled(lambda _: torch.rand(4, device="npu") + 1), torch.ones(2, device="npu:0")
    drawn: list[list[Any]] = []
    for call in (graph, lambda _: torch.rand(4, device="npu") + 1):
        torch.npu.manual_seed_all(5)
        drawn.append([])
        for device in DEVICES:
            torch.npu.set_device(device)
            drawn[-1].append(_seen(call(x)))
    assert drawn[0] == drawn[1]


@pytest.mark.skipif(default_device.DIFFERENCE.older, reason=default_device.DIFFERENCE.what)
def test_a_default_device() -> None:
    """The graph names no device; torch's default one is the current one."""
    torch.set_default_device("npu")
    try:
        graph = compiled(lambda: torch.arange(4) * 2)
        for device in DEVICES:
            torch.npu.set_device(device)
            assert _seen(graph()) == _seen(torch.arange(4) * 2)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("traced_on", [0, 1])
def test_without_dynamo(traced_on: int, caplog: pytest.LogCaptureFixture) -> None:
    """No guard stands before the graph; a call under another device is right, and the user learns that it is slow."""
    function: Function = FUNCTIONS["concatenated"]
    torch.npu.set_device(traced_on)
    x = torch.ones(2, device="npu:0")
    graph = compile_fx(make_fx(function, tracing_mode="fake")(x))
    for device in DEVICES:
        torch.npu.set_device(device)
        (result,) = graph(x)
        assert _seen(result) == _seen(function(x))
    assert "makes tensors on the current device" in caplog.text
