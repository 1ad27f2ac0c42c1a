"""The memory of captures for many sizes of one graph: as much as the largest needs, and each call's values are its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_helpers import NPU, compiled

import npu_emulator
from npugraph_ex.inference import session

WIDTH, LARGEST = 1024, 16 * 1024


def _function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rolled = x.roll(1).cumsum(0)
    return rolled.roll(2), rolled.exp().roll(1)


def _called(sizes: Sequence[int]) -> object:
    graph: Callable[..., Any] = compiled(_function, dynamic=True)
    for size in sizes:
        kept: list[Any] = []
        for _ in range(2):
            kept = [graph(torch.empty(size, WIDTH, device=NPU)), kept[:1]]
    return graph


def _warmed_up(sizes: Sequence[int]) -> object:
    step = session(_function, (torch.empty(LARGEST, WIDTH, device=NPU),), dynamic=True)
    step.warm_up(sorted(sizes), lambda size: (torch.empty(size, WIDTH, device=NPU),))
    return step


def test_lent_results_are_no_freed_memory() -> None:
    """The emulated device's check of memory takes the results for what they are, also where other sizes were captured since."""
    with npu_emulator.check_memory() as faults:
        graph, kept = compiled(_function, dynamic=True), []
        for size in (8, 64, 8, 5, 64, 30):
            x = torch.randn(size, 16).npu()
            kept = [*kept[-1:], (graph(x), _function(x))]
            for have, want in kept:
                for one, other in zip(have, want, strict=True):
                    assert torch.equal(one.cpu(), other.cpu())
        torch.npu.synchronize()
    assert faults == []


def _memory() -> tuple[int, int]:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    return torch.npu.memory_allocated(), torch.npu.memory_reserved()


@pytest.mark.parametrize("way", [_called, _warmed_up])
def test_the_largest_size_has_the_memory_of_all(way: Callable[[Sequence[int]], object]) -> None:
    """16 sizes keep at most 1.05 times the memory of the largest alone, in tensors and on the device."""
    kept = []
    with npu_emulator.null_kernels(), torch.inference_mode():
        for sizes in ([LARGEST], [LARGEST - 1000 * number for number in range(16)]):
            torch.compiler.reset()
            before = _memory()
            callable_ = way(sizes)
            kept.append([now - then for now, then in zip(_memory(), before, strict=True)])
            del callable_
    for largest, all_sizes in zip(*kept, strict=True):
        assert largest < all_sizes + 1 <= 1.05 * largest


def test_buffers_of_growing_sizes_double() -> None:
    """A size that does not fit takes a new block of at least twice the bytes, so all blocks together are few."""
    with npu_emulator.null_kernels(), torch.inference_mode():
        before = _memory()
        graph = _called([1000 * number for number in range(1, 17)])
        used = _memory()[0] - before[0]
    del graph
    assert used <= 4 * 16_000 * WIDTH * 4


@pytest.mark.parametrize("moves", [True, False], ids=["inputs that move", "inputs that stay"])
def test_each_size_reads_its_own_input(moves: bool) -> None:
    """Inputs of all sizes, dtypes and layouts go through one block: each call computes with its own."""
    graph = compiled(lambda x, y: (x.roll(1) + 1, y.roll(1) * 2), dynamic=True)
    stay = {size: (torch.randn(size, 6).npu(), torch.randn(3, size).npu()) for size in (2, 7, 31, 64)}
    for size in (31, 7, 64, 7, 31, 2, 64) * 10:
        x, y = stay[size] if not moves else (torch.randn(size, 6).npu(), torch.randn(3, size).npu())
        for have, want in zip(graph(x, y), (x.roll(1) + 1, y.roll(1) * 2), strict=True):
            assert torch.equal(have, want), size
