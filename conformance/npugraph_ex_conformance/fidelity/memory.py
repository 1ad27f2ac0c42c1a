"""What torch_npu's allocator does with the device's memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import torch

from npugraph_ex_conformance.fidelity.rule import (
    ASSUMED,
    HEADER,
    RUNTIME,
    TORCH,
    TORCH_NPU,
    DeviceRule,
    captured,
    code,
    held,
    ones,
)

_GRAPHS = f"{TORCH}: CUDA graphs, by analogy"
_MEMORY = f"{TORCH}: memory management, by analogy"


def _same_block(*, other_stream: bool) -> bool:
    """Whether a block that was freed is given to the next tensor of its size."""
    torch.npu.empty_cache()
    side = torch.npu.Stream()
    x = torch.empty(3 << 20, dtype=torch.uint8, device="npu")
    address = x.data_ptr()
    del x
    with torch.npu.stream(side if other_stream else torch.npu.current_stream()):
        return bool(torch.empty(3 << 20, dtype=torch.uint8, device="npu").data_ptr() == address)


def _rounded(size: int) -> int:
    """The least of several that are kept: a free block that is little larger is given whole, and then the next one is cut."""
    kept, taken = [], []
    for _ in range(8):
        before = torch.npu.memory_allocated()
        kept.append(torch.empty(size, dtype=torch.uint8, device="npu"))
        taken.append(torch.npu.memory_allocated() - before)
    return int(min(taken))


def _emptied() -> bool:
    x = torch.empty(1 << 26, device="npu")
    reserved = torch.npu.memory_reserved()
    del x
    torch.npu.empty_cache()
    return bool(torch.npu.memory_reserved() <= reserved - (4 << 26))


def _kept() -> bool:
    x = torch.empty(1 << 26, device="npu")
    reserved = torch.npu.memory_reserved()
    del x
    return bool(torch.npu.memory_reserved() == reserved)


def _peak() -> bool:
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    x = torch.empty(1 << 24, device="npu")
    del x
    return bool(torch.npu.max_memory_allocated() >= before + (4 << 24))


def _pool_keeps() -> bool:
    """A graph's memory is not given to eager work."""
    graph, y = captured(lambda: ones(1 << 20) + 1)
    address = y.data_ptr()
    del y
    others = [torch.empty(1 << 20, device="npu") for _ in range(4)]
    found = all(other.data_ptr() != address for other in others)
    del graph
    return found


def _pool_is_given_back() -> bool:
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    graph, y = captured(lambda: ones(1 << 24) + 1)
    grown = torch.npu.memory_reserved() > before
    del graph, y
    gc.collect()
    torch.npu.empty_cache()
    return bool(grown and torch.npu.memory_reserved() <= before)


def rules() -> Iterator[DeviceRule]:
    """The rules."""
    for name, size, taken in (
        ("one-byte", 1, 512),
        ("480", 480, 512),
        ("481", 481, 1024),
        ("mebibyte", 1 << 20, (1 << 20) + 512),
    ):
        yield DeviceRule(
            f"memory.rounds-{name}", f"A tensor of {size} bytes counts as {taken} of the allocator's.",
            f"{TORCH_NPU}: NPUCachingAllocator.cpp", partial(_rounded, size), taken,
        )  # fmt: skip
    yield DeviceRule(
        "memory.empty-tensor", "A tensor without elements takes no memory.", _MEMORY, lambda: _rounded(0), 0,
    )  # fmt: skip
    yield DeviceRule(
        "memory.reuse", "A freed block is given to the next tensor of its size on its stream.", _MEMORY,
        lambda: _same_block(other_stream=False), True,
    )  # fmt: skip
    yield DeviceRule(
        "memory.other-stream", "It is not given to a tensor of another stream.", _MEMORY,
        lambda: _same_block(other_stream=True), False,
    )  # fmt: skip
    yield DeviceRule("memory.kept", "A freed block stays reserved.", _MEMORY, _kept, True)
    yield DeviceRule("memory.empty-cache", "empty_cache() gives it back to the device.", _MEMORY, _emptied, True)
    yield DeviceRule("memory.peak", "max_memory_allocated() counts what has been freed since.", _MEMORY, _peak, True)
    yield DeviceRule(
        "memory.alignment", "The allocator's addresses are multiples of 512.", f"{TORCH_NPU}: NPUCachingAllocator.cpp",
        lambda: torch.empty(3, device="npu").data_ptr() % 512, 0,
    )  # fmt: skip
    yield DeviceRule(
        "memory.too-much", "More memory than the device has is an OutOfMemoryError.", f"{HEADER}: 207001",
        lambda: held(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="npu")), "OutOfMemoryError",
    )  # fmt: skip
    yield DeviceRule(
        "memory.after-too-much", "After that the device works.", ASSUMED,
        lambda: (held(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="npu")), code(ones))[1], "done",
    )  # fmt: skip
    yield DeviceRule(
        "memory.info", "Free memory is at most all memory.", f"{RUNTIME}: aclrtGetMemInfo",
        lambda: torch.npu.mem_get_info()[0] <= torch.npu.mem_get_info()[1], True,
    )  # fmt: skip
    yield DeviceRule("memory.pool-keeps", "Eager work is not given the memory of a graph.", _GRAPHS, _pool_keeps, True)
    yield DeviceRule(
        "memory.pool-returns", "The memory of a graph that was deleted goes back to the device.", _GRAPHS,
        _pool_is_given_back, True,
    )  # fmt: skip
    yield DeviceRule(
        "memory.pinned", "pin_memory() gives memory that is_pinned() knows.", _MEMORY,
        lambda: torch.ones(4).pin_memory().is_pinned(), True,
    )  # fmt: skip
    yield DeviceRule(
        "memory.pageable", "Other memory of the host is not pinned.", _MEMORY, lambda: torch.ones(4).is_pinned(), False,
    )  # fmt: skip
    yield DeviceRule(
        "memory.snapshot", "memory_snapshot() lists segments with their addresses.", f"{TORCH_NPU}: npu/memory.py",
        lambda: (ones(), all("address" in segment for segment in torch.npu.memory_snapshot()))[1], True,
    )  # fmt: skip
