"""What compiling does for a model of `architectures.py`: device work, distance from float64, time to the first result."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from decoders import Inputs
from device_calls import one_call
from host_calls import BACKEND, SETTLED
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import npu_emulator

PAIRS = (32, 128, 512, 1024)
"""So many pairs of weights and inputs are compared, and the next number only where errors look larger than eager mode's.

The errors of one pair differ by a tenth by chance, so that of models with equal errors half look worse over few.
"""
TURNS = ((6, 1.2), (16, 1.2), (64, 1.225), (192, 0.0))
"""So many first calls are compared, and the next number only where compiling looks more than this many times as long as `aot_eager`
takes.

The first turn does not count, because it pays what a process pays once, such as imports. On a busy machine two equal calls of one
turn differ by a fifth, so that the median of 16 is off by a twentieth in every third run, that of 64 by half of it, and that of 192
by a seventieth.
"""
TINIEST = 1e-30
"""Stands for an error of zero in a quotient."""


def architecture(name: str, lift: str = "") -> dict[str, float]:
    """What one call of a model of `architectures.py` does, eager and compiled, and how far the results are from float64.

    Args:
        name: of the model.
        lift: the option, for this library, which is also asked how long it compiles.
    """
    from npugraph_ex_conformance.models import architectures  # which imports transformers, for this question alone

    model, inputs = architectures.make(name, torch.float16, "npu")
    model.prepare()
    seconds = compile_times(model, inputs, lift) if lift else {}
    return work_and_errors(name, model, inputs, lift) | seconds


def work_and_errors(name: str, model: Any, inputs: Inputs, lift: str) -> dict[str, float]:
    """As `architecture`, without the time to the first result."""
    options = {"lift": lift} if lift else {}
    torch.compiler.reset()
    compiled = torch.compile(model, backend=BACKEND, dynamic=False, options=options)
    with npu_emulator.timeline() as times:
        model.prepare()
        eager = one_call(times, model, inputs)
        model.prepare()
        for _ in range(SETTLED):
            compiled(*inputs)
        graph = one_call(times, compiled, inputs)
    errors = paired_errors(name, model, compiled, inputs) if lift else {}
    return {f"eager {key}": value for key, value in eager.items()} | graph | errors


def compile_times(model: Any, inputs: Inputs, lift: str) -> dict[str, float]:
    """Seconds of processor time of a first call, the least of several, and ours in terms of that of `aot_eager`.

    That is the median of the quotients of the turns: the two calls of a turn meet the same load of the machine.
    """
    took: dict[str, list[float]] = {"aot_eager": [], "compile": []}
    for turns, long in TURNS:
        while len(took["compile"]) < turns:
            first = _first_call(model, inputs, "aot_eager"), _first_call(model, inputs, BACKEND, lift)
            for key, seconds in zip(took, first, strict=True):
                took[key].append(seconds)
        quotient = statistics.median(ours / theirs for theirs, ours in list(zip(*took.values(), strict=True))[1:])
        if quotient <= long:
            break
    return {f"{key} s": min(seconds[1:]) for key, seconds in took.items()} | {"of aot_eager": quotient}


def _first_call(model: Any, inputs: Inputs, backend: str, lift: str = "") -> float:
    """One that begins with nothing kept of the model: no code of Dynamo, no fake tensors, no rulings on what is lifted."""
    torch.compiler.reset()
    FakeTensorMode.cache_clear()
    if lift:
        from npugraph_ex.lifting import judging  # the bundled backend has none

        judging.forget()
    model.prepare()  # the cache of a decode step has room for few steps
    gc.collect()
    begin = time.process_time()
    torch.compile(model, backend=backend, dynamic=False, options={"lift": lift} if lift else None)(*inputs)
    return time.process_time() - begin


class _InFloat64(TorchFunctionMode):
    """Where a model computes in float32 whatever its dtype is, as norms and routers do, it computes in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def paired_errors(name: str, model: Any, compiled: Callable[..., Any], inputs: Inputs) -> dict[str, float]:
    """How far eager mode and ours are from float64, over weights and inputs drawn anew each time, both the same.

    Of the tensors that leave the model, written caches too, the one whose errors are larger most surely: the largest mean of the
    logarithm of ours over eager mode's, in standard errors of that mean. Beside it the worst element of all of them, in ulps of the
    dtype of its tensor: a single element, near zero in most models, which tells less.
    """
    from npugraph_ex_conformance.models import architectures

    right, _ = architectures.make(name, torch.float64, "cpu")
    squares: dict[str, list[list[float]]] = {"truth": [], "eager": [], "": []}
    ulps = {"eager": 0.0, "": 0.0}
    for pairs in PAIRS:
        for seed in range(len(squares["truth"]), pairs):
            architectures.redraw((model, right), seed)
            drawn = architectures.drawn(inputs, seed)
            results = _results(model, right, compiled, drawn)
            for key, largest in ulps.items():
                ulps[key] = max(largest, *map(_furthest, results[key], results["truth"]))
            for key, leaving in results.items():
                beside = zip(leaving, results["truth"], strict=True)
                off = (value if key == "truth" else value.double() - truth for value, truth in beside)
                squares[key].append([float(value.square().mean()) for value in off])
        errors = {key: torch.tensor(found, dtype=torch.float64) for key, found in squares.items()}
        ratios = ((errors[""] + TINIEST) / (errors["eager"] + TINIEST)).log() / 2
        mean, deviation = ratios.mean(0), ratios.std(0) / pairs**0.5
        worst = int((mean / (deviation + TINIEST)).argmax())
        if mean[worst] <= 0:
            break
    relative = {
        f"{key} error".strip(): float(errors[key][:, worst].sum() / errors["truth"][:, worst].sum()) ** 0.5
        for key in ("eager", "")
    }
    single = {f"{key} worst ULP".strip(): far for key, far in ulps.items()}
    return {"log ratio": float(mean[worst]), "deviation": float(deviation[worst])} | relative | single


def _results(model: Any, right: Any, compiled: Callable[..., Any], drawn: Inputs) -> dict[str, list[torch.Tensor]]:
    """The tensors that leave the model: in float64, in eager mode, and compiled."""
    results: dict[str, list[torch.Tensor]] = {}
    for key, function, given in (
        ("truth", right, [value.double() if value.is_floating_point() else value for value in drawn]),
        ("eager", model, [value.npu() for value in drawn]),
        ("", compiled, [value.npu() for value in drawn]),
    ):
        computed = right if key == "truth" else model
        with _InFloat64() if key == "truth" else nullcontext():
            computed.prepare()
            results[key] = [value.cpu() for value in (function(*given), *computed.written())]
    return results


def _furthest(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Of the element that is farthest from float64, in ulps."""
    from npugraph_ex.operators import ulp  # the bundled backend has none

    if not value.is_floating_point():
        return 0.0
    return float(((value.double() - truth).abs() / ulp(truth, value.dtype)).max())
