"""What a call costs the host: the floor, a replay, inputs that move, sessions, new sizes."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from decoders import Inputs, stack
from functorch.compile import make_boxed_func
from measure import instructions, side_by_side
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import unset_fake_temporarily

import npu_emulator

BACKEND = "npugraph_ex"
SETTLED = 12
"""After how many calls a backend has captured all that it will capture for steady inputs."""
ROUNDS, FEW_LAYERS = 50, 8
"""Turns of each subject of a call's host time, half as many beyond so many layers: two or three seconds either way."""


def one_task() -> torch.npu.NPUGraph:
    """A captured graph with one kernel."""
    captured, scratch = torch.npu.NPUGraph(), torch.ones(8, device="npu")
    with torch.npu.graph(captured):
        scratch.add_(1)
    return captured


def floor_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Do what no backend can do less of: after Dynamo and AOT, replay one graph and return tensors that are there."""

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        del inputs
        outputs = graph.graph.output_node().args[0]  # type: ignore[union-attr]  # AOT's wrapper around the module
        values = [node.meta["val"] for node in outputs]
        with unset_fake_temporarily():
            results = [torch.zeros(value.shape, dtype=value.dtype, device="npu") for value in values]
            captured = one_task()

        def run(*arguments: Any) -> list[torch.Tensor]:
            del arguments
            captured.replay()
            return results

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=compiler)(gm, example_inputs)
    return compiled


def compiled_for(model: Callable[..., Any], inputs: Inputs, **options: object) -> Callable[..., Any]:
    """The model compiled and settled."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend=BACKEND, dynamic=False, options=options)
    for _ in range(SETTLED):
        compiled(*inputs)
    return compiled


def host_cost(layers: int, inputs: int = 2, outputs: int = 2, rounds: int | None = None) -> dict[str, float]:
    """Microseconds of host time a call: the floor, this backend with inputs that stay and that move, a replay, a copy."""
    model, arguments = stack(layers, inputs=inputs, outputs=outputs)
    torch.compiler.reset()
    floor = torch.compile(model, backend=floor_backend, dynamic=False)
    floor(*arguments)
    compiled = torch.compile(stack(layers, inputs=inputs, outputs=outputs)[0], backend=BACKEND, dynamic=False)
    captured, buffers = one_task(), [torch.empty_like(argument) for argument in arguments]
    # Three sets in turn, so that no input is twice in a row where it was.
    elsewhere = itertools.cycle([tuple(argument.clone() for argument in arguments) for _ in range(3)])
    for _ in range(SETTLED):
        compiled(*arguments)
    for _ in range(SETTLED):
        compiled(*next(elsewhere))

    def floor_and_copies() -> None:
        for buffer, argument in zip(buffers, arguments, strict=True):
            buffer.copy_(argument)
        floor(*arguments)

    with npu_emulator.null_kernels():
        return side_by_side(
            {
                "floor": lambda: floor(*arguments),
                "steady inputs": lambda: compiled(*arguments),
                "moving inputs": lambda: compiled(*next(elsewhere)),
                "replay": captured.replay,
                "floor and copies": floor_and_copies,
            },
            rounds=rounds or (ROUNDS if layers <= FEW_LAYERS else ROUNDS // 2),
        )


def call_instructions(layers: int) -> dict[str, float]:
    """How many instructions of bytecode a replayed call executes: the floor, inputs that stay, inputs that move."""
    model, arguments = stack(layers)
    torch.compiler.reset()
    floor = torch.compile(model, backend=floor_backend, dynamic=False)
    floor(*arguments)
    compiled = torch.compile(stack(layers)[0], backend=BACKEND, dynamic=False)
    elsewhere = itertools.cycle([tuple(argument.clone() for argument in arguments) for _ in range(3)])
    with npu_emulator.null_kernels():
        for _ in range(SETTLED):
            compiled(*arguments)
        found = {
            "floor": instructions(lambda: floor(*arguments)),
            "steady inputs": instructions(lambda: compiled(*arguments)),
        }
        for _ in range(SETTLED):
            compiled(*next(elsewhere))
        return found | {"moving inputs": instructions(lambda: compiled(*next(elsewhere)))}


def unguarded_call(layers: int, inputs: int = 2, outputs: int = 2) -> dict[str, float]:
    """Microseconds of a call with inputs that stay, where Dynamo was told not to check modules and parameters."""
    model, arguments = stack(layers, inputs=inputs, outputs=outputs)
    compiled = compiled_for(model, arguments, guard_filter_fn=torch.compiler.skip_guard_on_all_nn_modules_unsafe)
    with npu_emulator.null_kernels():
        return side_by_side({"modules unguarded": lambda: compiled(*arguments)})


def session_call(layers: int, inputs: int = 2, outputs: int = 2) -> dict[str, float]:
    """Microseconds of a session's call beside a raw replay of the same model, a compiled call, and what torch offers.

    "alive" calls keep the last result during the next call, as a loop does; others drop it.
    """
    from npugraph_ex.inference import session  # the bundled backend has none

    torch.compiler.reset()
    model, arguments = stack(layers, inputs=inputs, outputs=outputs)
    captured = torch.npu.NPUGraph()
    with torch.npu.graph(captured):
        kept = [model(*arguments)]
    sets = itertools.cycle([tuple(argument.clone() for argument in arguments) for _ in range(3)])
    floor = torch.compile(model, backend=floor_backend, dynamic=False, isolate_recompiles=True)
    floor(*arguments)
    calls: dict[str, Callable[[], object]] = {"raw replay": captured.replay, "floor": lambda: floor(*arguments)}

    def three(name: str, make: Callable[[], Callable[..., Any]]) -> None:
        """Steady inputs, moving inputs, and results that stay alive: each with a function that has seen nothing else."""
        steady, moving, alive = make(), make(), make()

        def keeping() -> None:
            kept[0] = alive(*arguments)

        for kind, call in (
            ("", lambda: steady(*arguments)),
            (" moving", lambda: moving(*next(sets))),
            (" alive", keeping),
        ):
            calls[name + kind] = call
            for _ in range(SETTLED):
                call()

    # Isolated: otherwise each call would look at the guards of the other functions, too.
    compiled = partial(torch.compile, model, backend=BACKEND, dynamic=False, fullgraph=True, isolate_recompiles=True)
    three("session", lambda: session(model, arguments, dynamic=False))
    three("compiled", compiled)
    unguarded = compiled()
    ahead = torch.compile(model.forward, backend=BACKEND, dynamic=False, fullgraph=True).aot_compile((arguments, {}))
    for _ in range(SETTLED):
        ahead(model, *arguments), unguarded(*arguments)
    calls["aot_compile"] = lambda: ahead(model, *arguments)
    with npu_emulator.null_kernels():
        found = side_by_side(calls)
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            return found | side_by_side({"stance": lambda: unguarded(*arguments)})


def recapture(sizes: int) -> dict[str, float]:
    """Milliseconds for the first call at a new size and for returning to one; what calls leave behind, compile and capture.

    "compilations" and "captures" count those of all the sizes; "compiled again" and "captured again" those of every call
    after each size has been seen twice.
    """
    torch.compiler.reset()
    counters.clear()
    model, _ = stack(2)
    compiled = torch.compile(model, backend=BACKEND, dynamic=True)
    tensors = [tuple(torch.randn(size + 2, 16).npu() for _ in range(2)) for size in range(sizes)]

    def milliseconds(pair: Sequence[torch.Tensor]) -> float:
        start = time.thread_time()
        compiled(*pair)
        return (time.thread_time() - start) * 1e3

    with counting_captures() as captures:
        compiled(*tensors[0]), compiled(*tensors[1])
        new = [milliseconds(pair) for pair in tensors[2:]]
        first = captures.total()
        back = [min(milliseconds(pair) for _ in range(3)) for pair in tensors]
        returning = captures.total() - first
        for pair in tensors[:4]:
            for _ in range(SETTLED):
                compiled(*pair)
        compilations = counters["stats"]["unique_graphs"]
        settled = captures.total()
        gc.collect()
        torch.npu.synchronize()
        device, host = torch.npu.memory_allocated(), sys.getallocatedblocks()
        for number in range(10_000):
            compiled(*tensors[number % 4])
        gc.collect()
        torch.npu.synchronize()
    return {
        "new size": sorted(new)[len(new) // 2],
        "known size": sorted(back)[len(back) // 2],
        "compilations": compilations,
        "captures": first,
        "captures on returning": returning,
        "compiled again": counters["stats"]["unique_graphs"] - compilations,
        "captured again": captures.total() - settled,
        "bytes left by 10,000 calls": torch.npu.memory_allocated() - device,
        "objects left by 10,000 calls": sys.getallocatedblocks() - host,
    }


@contextmanager
def counting_captures() -> Iterator[Counter[str]]:
    """Count the captures within the block, whichever backend makes them."""
    begun, begin = Counter[str](), torch.npu.NPUGraph.capture_begin

    def counting(self: torch.npu.NPUGraph, *arguments: Any, **options: Any) -> None:
        begun["captures"] += 1
        begin(self, *arguments, **options)

    torch.npu.NPUGraph.capture_begin = counting
    try:
        yield begun
    finally:
        torch.npu.NPUGraph.capture_begin = begin
