"""Saved graphs that are called while one or the other of two devices is current, or with inputs of one or the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

WHAT = """
import json, tempfile, torch
import npu_emulator
npu_emulator.activate(quiet=True)
import npugraph_ex
from torch.fx.experimental.proxy_tensor import make_fx
from npugraph_ex.frontend.entry.compiler import CompiledFxArtifacts, CompiledFxGraph
from npugraph_ex.inference import cache_compile
from npugraph_ex.integrations.vllm.compiler import NpuGraphExCompiler

def beside(x):
    return x * 2, torch.arange(3, device="npu")

def moved(x):
    return x.to("npu") * 2, x + 1

def inputs_only(x):
    return x.sin() + 1, x * 2

def of_vllm(function):
    graphs = []
    torch.compile(function, backend=lambda gm, given: graphs.append(gm) or gm, dynamic=False)(torch.ones(3, device="npu:0"))
    compiler, given = NpuGraphExCompiler(), [torch.ones(3, device="npu:0")]
    compiler.initialize_cache(tempfile.mkdtemp())
    handle = compiler.compile(graphs[0], given, None, None, "key")[1]
    assert handle is not None
    return lambda: compiler.load(handle, graphs[0], given)

def of_cache(function):
    folder = tempfile.mkdtemp()
    def make():
        torch.compiler.reset()
        return cache_compile(function, cache_dir=folder, dynamic=False)
    make()(torch.ones(3, device="npu:0"))
    return make

def of_artifacts(function):
    x = torch.ones(3, device="npu:0")
    text = npugraph_ex.compile_fx(make_fx(function, tracing_mode="fake")(x), [x]).get_code()
    assert text is not None
    return lambda: CompiledFxGraph.load_artifacts(CompiledFxArtifacts(py_code=text))

def seen(call, place):
    try:
        return [(str(value.device), value.tolist()) for value in call(torch.ones(3, device=f"npu:{place}"))]
    except Exception as error:
        return f"{type(error).__name__}: {error}"

answer = {}
for way, function in [
    *((way, function) for way in (of_cache, of_vllm) for function in (beside, moved, inputs_only)),
    (of_artifacts, beside), (of_artifacts, inputs_only),
]:
    torch.compiler.reset()
    torch.npu.set_device(0)
    make = way(function)
    calls = answer.setdefault(way.__name__, {})[function.__name__] = []
    for loaded_on in (0, 1):
        torch.npu.set_device(loaded_on)
        call = make()
        for place, current in ((0, 0), (0, 1), (1, 1), (0, 0), (1, 0)):
            torch.npu.set_device(current)
            calls.append((loaded_on, place, current, seen(function, place), seen(call, place)))
"""


@pytest.fixture(scope="module")
def calls(ask: Callable[..., Any]) -> Any:
    """For each way and function: the device of loading, the inputs' device, the current one, eager mode's results, the graph's."""
    return ask(WHAT, NPU_EMULATOR_DEVICES="2")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["of_cache", "of_vllm"])
def test_a_saved_graph_follows_the_current_device(calls: Any, way: str) -> None:
    """Results lie where eager mode lays them, wherever the inputs lie and whichever device was current at loading."""
    assert set(calls[way]) == {"beside", "moved", "inputs_only"}
    for name, made in calls[way].items():
        assert [call[4] for call in made] == [call[3] for call in made], name


def test_a_saved_aten_graph_is_right_or_refuses(calls: Any) -> None:
    """Nothing stands behind it where its inputs lie away from the device that it makes tensors on: it says so."""
    for name, made in calls["of_artifacts"].items():
        for _, place, current, want, have in made:
            if name == "beside" and place != current:
                assert re.match(rf"SavedGraphError: .*\bdevice {current}\b.* npu:{place}\b", have, re.DOTALL), have
            else:
                assert have == want
