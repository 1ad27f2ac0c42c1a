"""Single calls under pytest-benchmark, in groups that `--benchmark-autosave` keeps and `--benchmark-compare` compares.

The gates are in the other files; here a person reads how one call became slower or faster than in an earlier run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decoders import device_models, stack
from host_calls import SETTLED, compiled_for, floor_backend, one_task
from matching_graphs import layers
from test_matching import duplicate, ours

import npu_emulator

DEPTHS = (2, 32)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("subject", ["raw replay", "floor", "steady inputs", "moving inputs"])
def test_replayed_call(depth: int, subject: str, benchmark: Any) -> None:
    """Host time of a call whose kernels do nothing."""
    benchmark.group = f"host time of a replayed call, {depth} layers"
    model, inputs = stack(depth)
    sets = itertools.cycle([tuple(value.clone() for value in inputs) for _ in range(3)])
    if subject == "raw replay":
        call: Callable[[], Any] = one_task().replay
    elif subject == "floor":
        torch.compiler.reset()
        floor = torch.compile(model, backend=floor_backend, dynamic=False)
        call = lambda: floor(*inputs)  # noqa: E731 - one of four subjects
    else:
        compiled = compiled_for(model, inputs)
        call = (lambda: compiled(*inputs)) if subject == "steady inputs" else (lambda: compiled(*next(sets)))
    with npu_emulator.null_kernels():
        for _ in range(SETTLED):
            call()
        benchmark(call)


@pytest.mark.parametrize("way", ["eager", "fused", "captured"])
@pytest.mark.parametrize("name", ["cache step", "norms and quantisation"])
def test_step(name: str, way: str, benchmark: Any) -> None:
    """A small decode step on the emulated device, kernels included: what a test suite on it waits for."""
    benchmark.group = f"a call on the emulated device, {name}"
    model, inputs = device_models()[name]()
    function = model if way == "eager" else compiled_for(model, inputs, force_eager=way == "fused")
    benchmark(lambda: function(*inputs))


@pytest.mark.parametrize("backend", ["aot_eager", "npugraph_ex"])
def test_compilation(backend: str, benchmark: Any) -> None:
    """From `torch.compile` to the first result of 8 layers."""
    benchmark.group = "first call, 8 layers"

    def first_call() -> None:
        model, inputs = stack(8)
        torch.compiler.reset()
        torch.compile(model, backend=backend, dynamic=False)(*inputs)
        torch.npu.synchronize()

    benchmark.pedantic(first_call, rounds=3, warmup_rounds=1)


def test_matching(benchmark: Any) -> None:
    """The checked matcher with the default rules over 1,000 nodes, half of whose norms fuse."""
    benchmark.group = "matching, 1,000 nodes"
    gm = layers(1000)
    benchmark.pedantic(ours, setup=lambda: ((duplicate(gm),), {}), rounds=5, warmup_rounds=1)
