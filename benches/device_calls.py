"""What a call does on the device: kernels, copies, bytes and modelled time, eager and compiled, by pass."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from decoders import Inputs, device_models, modelled_models
from host_calls import compiled_for

import npu_emulator
from npu_emulator.clock.timeline import Timeline

SWITCHES = ("remove_noop_ops", "remove_cat_ops", "inplace_pass", "input_inplace_pass", "pattern_fusion_pass")


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
    return {
        "kernels": did.total() + bytes_copied,
        "copies": copies,
        "bytes": sum(span.moved for span in times.spans[spans:]),
        "modelled us": sum(span.duration for span in times.spans[spans:]),
        "until": times.end - started,
    }


def settled_call(times: Timeline, model: Callable[..., Any], inputs: Inputs, **options: object) -> dict[str, float]:
    """What one call does of the model compiled and settled, the bytes that its captures keep, and the most while they ran."""
    torch.compiler.reset()
    gc.collect()
    torch.npu.synchronize()
    held = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    did = one_call(times, compiled_for(model, inputs, **options), inputs)
    torch.npu.synchronize()
    kept, most = torch.npu.memory_allocated() - held, torch.npu.max_memory_allocated() - held
    return did | {"pool bytes": kept, "peak bytes": most}


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


def device_work(name: str) -> dict[str, float]:
    """What one call of a model does on the device, eager and compiled, once the backend has settled."""
    torch.compiler.reset()
    with npu_emulator.timeline() as times:
        model, inputs = device_models()[name]()
        eager = one_call(times, model, inputs)
        graph = settled_call(times, model, inputs)
    return {f"eager {key}": value for key, value in eager.items()} | graph
