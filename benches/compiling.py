"""What a compilation costs the host, beside AOT's own backend: whole models, equal layers as regions, saved code."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from both import answers_of
from decoders import between_layers, stack
from host_calls import BACKEND
from torch import fx


def compile_time(layers: int, rounds: int) -> dict[str, float]:
    """Seconds of processor time from `torch.compile` to the first result: AOT's own backend, and this one beyond it.

    The shortest of several rounds. What earlier compilations left is collected before each of them and not looked at by the
    collections within: a process that is new, as a user's, has nothing of it.
    """
    prepare()
    pairs = [(_first_call("aot_eager", layers), _first_call(BACKEND, layers)) for _ in range(rounds)]
    alone, whole = (min(times) for times in zip(*pairs, strict=True))
    return {"aot_eager": alone, "whole": whole}


def region_time(layers: int, rounds: int) -> dict[str, float]:
    """The same, and the times of both backends where the layers are calls of one nested compile region."""
    kinds = {"aot_eager": ("aot_eager", False), "whole": (BACKEND, False)}
    kinds |= {"aot_eager, regions": ("aot_eager", True), "regions": (BACKEND, True)}
    prepare()
    found = [
        {name: _first_call(backend, layers, regions=regions) for name, (backend, regions) in kinds.items()}
        for _ in range(rounds)
    ]
    return {name: min(times[name] for times in found) for name in kinds}


def pieces_time(layers: int, rounds: int) -> dict[str, float]:
    """Seconds of processor time in which vLLM's compiler object compiles and saves a model in pieces, and one of one layer.

    The shortest of several rounds. The pieces between layers are equal; the first and the last are of their own.
    """
    from npugraph_ex.integrations.vllm.compiler import NpuGraphExCompiler  # not where the bundled backend has the name

    first, between, last = map(fx.symbolic_trace, (lambda x, w: x * w, between_layers, lambda x, w: (x + 1) * w))
    inputs = [weight.npu() for weight in (torch.randn(4, 16), torch.ones(16), *torch.randn(2, 16, 16))]
    found: dict[str, list[float]] = {"one layer": [], "all": []}
    for _ in range(1 + rounds):
        for kind, times in zip(found, (1, layers), strict=True):
            pieces = [(first, inputs[:2]), *[(between, inputs)] * times, (last, inputs[:2])]
            with tempfile.TemporaryDirectory() as folder:
                compiler = NpuGraphExCompiler()
                compiler.initialize_cache(folder)
                start = time.process_time()
                for number, (piece, given) in enumerate(pieces):
                    compiler.compile(piece, given, key=str(number))
                found[kind].append(time.process_time() - start)
    return {kind: min(seconds[1:]) for kind, seconds in found.items()}


def _first_call(backend: str, layers: int, *, regions: bool = False) -> float:
    model, arguments = stack(layers, regions=regions)
    torch.compiler.reset()
    gc.collect()
    gc.freeze()
    start = time.process_time()
    torch.compile(model, backend=backend, dynamic=False)(*arguments)
    torch.npu.synchronize()
    seconds = time.process_time() - start
    gc.unfreeze()
    return seconds


@cache
def prepare() -> None:
    """Do what only the first compilation of a process does."""
    for backend in ("aot_eager", BACKEND):
        model, arguments = stack(1)
        torch.compiler.reset()
        torch.compile(model, backend=backend, dynamic=False)(*arguments)


def cold_and_warm(layers: int, warm: int) -> dict[str, float]:
    """Seconds of processor time of the first call of a cached method, in a process that saves it and in those that load it.

    Args:
        layers: of the model.
        warm: in how many processes it is loaded; the shortest time counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("cached_start.py")), str(layers), folder]
        cold, *loading = (
            answers_of(command, name="the process with a cached method")[0]["seconds"] for _ in range(1 + warm)
        )
    return {"cold": cold, "warm": min(loading)}
