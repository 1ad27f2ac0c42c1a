"""The memory that captures for many sizes of one model keep, beside those for the largest size alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from decoders import stack
from host_calls import BACKEND

import npu_emulator

WIDTH, ROWS, COUNT = 4096, 48, 64
"""Rows of the smallest input, and how many sizes: each has so many rows more."""
EXPANDABLE = ", expandable"


def size_memory(way: str) -> dict[str, float]:
    """Bytes that a model's captures keep, after calls of the largest size alone and after calls of all sizes.

    "tensors" are the allocator's blocks in use, "device" all that the allocator has taken from the device. Both without weights.

    Args:
        way: "dynamic, largest first", "dynamic, smallest first", the same ", expandable" with segments that grow, "static", and
            "session", which this library alone has.
    """
    if way.endswith(EXPANDABLE):
        torch.npu.memory._set_allocator_settings("expandable_segments:True")  # as PYTORCH_NPU_ALLOC_CONF does
    with npu_emulator.null_kernels():  # so nothing writes to the memory, and its pages are never made
        return _size_memory(way)


def _size_memory(way: str) -> dict[str, float]:
    sizes = [ROWS * (number + 1) for number in range(COUNT)]
    if not way.startswith("dynamic, smallest first"):
        sizes.reverse()
    model, _ = stack(2, inputs=1, width=WIDTH)
    answer: dict[str, float] = {}
    for name, given in (("largest", [max(sizes)]), ("all", sizes)):
        torch.compiler.reset()
        before = _memory()
        kept = _called(model, way, given)
        answer |= {
            f"{name}, {what}": now - then for (what, now), then in zip(_memory().items(), before.values(), strict=True)
        }
        del kept
    return answer | {f"all of largest, {what}": answer[f"all, {what}"] / answer[f"largest, {what}"] for what in before}


def _called(model: Callable[..., Any], way: str, sizes: Iterable[int]) -> object:
    """What was compiled and called with each size, twice, with one result alive."""

    def inputs(size: int) -> tuple[torch.Tensor, ...]:
        return (torch.empty(size, WIDTH, device="npu"),)

    if way == "session":
        from npugraph_ex.inference import session

        step = session(model, inputs(max(sizes)), dynamic=True)
        step.warm_up(sizes, inputs)
        return step
    with torch._dynamo.config.patch(recompile_limit=2 * COUNT):
        compiled = torch.compile(model, backend=BACKEND, dynamic=way != "static")
        for size in sizes:
            result = None
            for _ in range(2):
                result = compiled(*inputs(size))
            del result
    return compiled


def _memory() -> dict[str, float]:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    return {"tensors": torch.npu.memory_allocated(), "device": torch.npu.memory_reserved()}
