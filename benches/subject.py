"""Measures the backend that this process calls `npugraph_ex`, and prints JSON: `python benches/subject.py host_cost 2 8`.

Run with NPUGRAPH_EX=bundled it measures the backend that torch_npu carries. Two backends need two processes, since both
want the same name; what makes their figures comparable is the floor, which each process measures beside its own.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import npu_emulator

npu_emulator.activate(quiet=True)

import torch  # noqa: E402
from both import answers_of  # noqa: E402
from decoders import Inputs, device_models, modelled_models, stack  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from measure import side_by_side  # noqa: E402
from torch import fx  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402

from npu_emulator.clock.roofline import LAUNCH_US  # noqa: E402
from npu_emulator.clock.timeline import Timeline  # noqa: E402

BACKEND = "npugraph_ex"
SETTLED = 12
"""After how many calls a backend has captured all that it will capture for steady inputs."""
DRAWS = 32
"""Pairs of weights and inputs over which errors are compared: those of one pair differ by a tenth by chance."""
TINIEST = 1e-30
"""Stands for an error of zero in a quotient."""
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


def host_cost(layers: int, inputs: int = 2, outputs: int = 2, rounds: int | None = None) -> dict[str, float]:
    """Microseconds of host time a call: the floor, this backend with inputs that stay and that move, a replay, a copy."""
    model, arguments = stack(layers, inputs=inputs, outputs=outputs)
    torch._dynamo.reset()
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

    torch._dynamo.reset()
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


def _first_call(backend: str, layers: int, *, regions: bool = False) -> float:
    model, arguments = stack(layers, regions=regions)
    torch._dynamo.reset()
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
        torch._dynamo.reset()
        torch.compile(model, backend=backend, dynamic=False)(*arguments)


def one_call(times: Timeline, function: Callable[..., Any], inputs: Inputs) -> dict[str, float]:
    """What one call does on the device: kernels, copies among them, bytes of all, and how long they take on the clock."""
    torch.npu.synchronize()
    times.refresh()
    before, spans, started = Counter(npu_emulator.kernel_counts()), len(times.spans), times.end
    function(*inputs)
    torch.npu.synchronize()
    times.refresh()
    did = Counter(npu_emulator.kernel_counts()) - before
    bytes_copied = sum(span.name == "memcpy" for span in times.spans[spans:])
    copies = did["aten.copy_.default"] + did["aten.clone.default"] + bytes_copied
    busy = sum(span.duration for span in times.spans[spans:])
    # The roofline moves so many bytes a second; beyond starting the tasks, time is bytes, products of large matrices apart.
    moved = (busy - LAUNCH_US * (len(times.spans) - spans)) * times.model.chip.bandwidth / 1e6
    return {
        "kernels": did.total() + bytes_copied,
        "copies": copies,
        "bytes": moved,
        "modelled us": busy,
        "until": times.end - started,
    }


def compiled_for(model: Callable[..., Any], inputs: Inputs, **options: object) -> Callable[..., Any]:
    """The model compiled and settled."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=BACKEND, dynamic=False, options=options)
    for _ in range(SETTLED):
        compiled(*inputs)
    return compiled


def settled_call(times: Timeline, model: Callable[..., Any], inputs: Inputs, **options: object) -> dict[str, float]:
    """What one call does of the model compiled and settled, the bytes that its captures keep, and the most while they ran."""
    torch._dynamo.reset()
    gc.collect()
    torch.npu.synchronize()
    held = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    did = one_call(times, compiled_for(model, inputs, **options), inputs)
    torch.npu.synchronize()
    kept, most = torch.npu.memory_allocated() - held, torch.npu.max_memory_allocated() - held
    return did | {"pool bytes": kept, "peak bytes": most}


SWITCHES = ("remove_noop_ops", "remove_cat_ops", "inplace_pass", "input_inplace_pass", "pattern_fusion_pass")


def by_pass(name: str) -> dict[str, float]:
    """What one call of a model saves by each of the passes: its figures without the pass, less those with all passes."""
    with npu_emulator.timeline() as times:
        model, inputs = device_models()[name]()
        full = settled_call(times, model, inputs)
        without = {switch: settled_call(times, model, inputs, **{switch: False}) for switch in SWITCHES}
    return {f"{switch}: {figure}": did[figure] - full[figure] for switch, did in without.items() for figure in full}


def modelled(name: str) -> dict[str, float]:
    """Modelled microseconds of one call: eager, fused but not captured, captured."""
    with npu_emulator.timeline() as times:
        model, inputs = modelled_models()[name]()
        ways = {
            "eager": model,
            "fused": compiled_for(model, inputs, force_eager=True),
            "captured": compiled_for(model, inputs),
        }
        answer: dict[str, float] = {}
        for way, function in ways.items():
            did = one_call(times, function, inputs)
            answer |= {f"{way} kernels": did["kernels"], way: did["until"]}
    return answer


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


def device_work(name: str) -> dict[str, float]:
    """What one call of a model does on the device, eager and compiled, once the backend has settled."""
    torch._dynamo.reset()
    with npu_emulator.timeline() as times:
        model, inputs = device_models()[name]()
        eager = one_call(times, model, inputs)
        graph = settled_call(times, model, inputs)
    return {f"eager {key}": value for key, value in eager.items()} | graph


def architecture(name: str, lift: str = "") -> dict[str, float]:
    """What one call of a model of `architectures.py` does, eager and compiled, and how far the results are from float64.

    Args:
        name: of the model.
        lift: the option, for this library.
    """
    import architectures  # which imports transformers, for this question alone

    options = {"lift": lift} if lift else {}
    model, inputs = architectures.make(name, torch.float16, "npu")
    model.prepare()
    seconds = first_calls(model, inputs, {"aot_eager": ("aot_eager", {}), "compile": (BACKEND, options)})
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=BACKEND, dynamic=False, options=options)
    with npu_emulator.timeline() as times:
        model.prepare()
        eager = one_call(times, model, inputs)
        model.prepare()
        for _ in range(SETTLED):
            compiled(*inputs)
        graph = one_call(times, compiled, inputs)
    errors = paired_errors(name, model, compiled, inputs) if lift else {}
    return {f"eager {key}": value for key, value in eager.items()} | graph | errors | seconds


def first_calls(
    model: Any, inputs: Inputs, backends: dict[str, tuple[str, dict[str, str]]], rounds: int = 3
) -> dict[str, float]:
    """Seconds of processor time of a first call by backend, the least of several in turn.

    Each begins with nothing kept of the model: no code of Dynamo, no fake tensors, no rulings on what is lifted. What a process
    pays once, such as imports, is paid before.
    """
    took: dict[str, list[float]] = {key: [] for key in backends}
    for _ in range(rounds + 1):
        for key, (backend, options) in backends.items():
            torch._dynamo.reset()
            FakeTensorMode.cache_clear()
            if options:
                from npugraph_ex.lifting import judging  # the bundled backend has none

                judging.forget()
            gc.collect()
            begin = time.process_time()
            torch.compile(model, backend=backend, dynamic=False, options=options or None)(*inputs)
            took[key].append(time.process_time() - begin)
    return {f"{key} s": min(values[1:]) for key, values in took.items()}


def paired_errors(name: str, model: Any, compiled: Callable[..., Any], inputs: Inputs) -> dict[str, float]:
    """How far eager mode and ours are from float64, over weights and inputs drawn anew each time, both the same.

    Of the tensors that leave the model, written caches too, the one whose errors are larger most surely: the largest mean of the
    logarithm of ours over eager mode's, in standard errors of that mean.
    """
    import architectures

    right, _ = architectures.make(name, torch.float64, "cpu")
    squares: dict[str, list[list[float]]] = {"truth": [], "eager": [], "": []}
    for seed in range(DRAWS):
        architectures.redraw((model, right), seed)
        drawn = architectures.drawn(inputs, seed)
        results: dict[str, list[torch.Tensor]] = {}
        for key, function, given in (
            ("truth", right, [value.double() if value.is_floating_point() else value for value in drawn]),
            ("eager", model, [value.npu() for value in drawn]),
            ("", compiled, [value.npu() for value in drawn]),
        ):
            computed = right if key == "truth" else model
            computed.prepare()
            results[key] = [value.cpu().double() for value in (function(*given), *computed.written())]
        for key, leaving in results.items():
            pairs = zip(leaving, results["truth"], strict=True)
            off = (value if key == "truth" else value - truth for value, truth in pairs)
            squares[key].append([float(value.square().mean()) for value in off])
    errors = {key: torch.tensor(found, dtype=torch.float64) for key, found in squares.items()}
    ratios = ((errors[""] + TINIEST) / (errors["eager"] + TINIEST)).log() / 2
    mean, deviation = ratios.mean(0), ratios.std(0) / DRAWS**0.5
    worst = int((mean / (deviation + TINIEST)).argmax())
    relative = {
        f"{key} error".strip(): float(errors[key][:, worst].sum() / errors["truth"][:, worst].sum()) ** 0.5
        for key in ("eager", "")
    }
    return {"log ratio": float(mean[worst]), "deviation": float(deviation[worst])} | relative


def recapture(sizes: int) -> dict[str, float]:
    """Milliseconds for the first call at a new size and for returning to one; what calls leave behind, compile and capture.

    "compilations" and "captures" count those of all the sizes; "compiled again" and "captured again" those of every call
    after each size has been seen twice.
    """
    torch._dynamo.reset()
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


QUESTIONS: dict[str, Callable[..., dict[str, float]]] = {
    question.__name__: question
    for question in (
        host_cost,
        unguarded_call,
        session_call,
        compile_time,
        region_time,
        cold_and_warm,
        device_work,
        by_pass,
        modelled,
        recapture,
        architecture,
    )
}


def main() -> None:
    """Answer one question, or several joined by "+", for each of the arguments: JSON, a value or a list of several."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine count as processor time
    questions = [QUESTIONS[name] for name in sys.argv[1].split("+")]
    answers = []
    with torch.no_grad():
        for text in sys.argv[2:]:
            given = json.loads(text)
            arguments = given if isinstance(given, list) else [given]
            answers.append({key: value for question in questions for key, value in question(*arguments).items()})
            print("answered", text, file=sys.stderr, flush=True)  # so that who dies tells how far it came
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
