"""The memory of captures for many sizes of one graph: as much as the largest needs, and each call's values are its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from device_helpers import NPU, compiled

import npu_emulator
from npugraph_ex.aclgraph import frame_memory
from npugraph_ex.inference import session
from npugraph_ex.report.captures import capture_records, captures_so_far

WIDTH, LARGEST = 1024, 16 * 1024


def _function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rolled = x.roll(1).cumsum(0)
    return rolled.roll(2), rolled.exp().roll(1)


def _called(sizes: Sequence[int], *, dynamic: bool = True) -> object:
    graph: Callable[..., Any] = compiled(_function, dynamic=dynamic)
    for size in sizes:
        kept: list[Any] = []
        for _ in range(2):
            kept = [graph(torch.empty(size, WIDTH, device=NPU)), kept[:1]]
    return graph


def _compiled_each(sizes: Sequence[int]) -> object:
    with torch._dynamo.config.patch(recompile_limit=len(sizes)):
        return _called(sizes, dynamic=False)


def _warmed_up(sizes: Sequence[int]) -> object:
    step = session(_function, (torch.empty(LARGEST, WIDTH, device=NPU),), dynamic=True)
    step.warm_up(sorted(sizes), lambda size: (torch.empty(size, WIDTH, device=NPU),))
    return step


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("way", [_called, _compiled_each, _warmed_up])
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


@pytest.mark.slow
def test_buffers_of_growing_sizes_double() -> None:
    """A size that does not fit takes a new block of at least twice the bytes, so all blocks together are few."""
    with npu_emulator.null_kernels(), torch.inference_mode():
        before = _memory()
        graph = _called([1000 * number for number in range(1, 17)])
        used = _memory()[0] - before[0]
    del graph
    assert used <= 4 * 16_000 * WIDTH * 4


@pytest.mark.slow
@pytest.mark.parametrize("moves", [True, False], ids=["inputs that move", "inputs that stay"])
def test_each_size_reads_its_own_input(moves: bool) -> None:
    """Inputs of all sizes, dtypes and layouts go through one block: each call computes with its own."""
    graph = compiled(lambda x, y: (x.roll(1) + 1, y.roll(1) * 2), dynamic=True)
    stay = {size: (torch.randn(size, 6).npu(), torch.randn(3, size).npu()) for size in (2, 7, 31, 64)}
    for size in (31, 7, 64, 7, 31, 2, 64) * 10:
        x, y = stay[size] if not moves else (torch.randn(size, 6).npu(), torch.randn(3, size).npu())
        for have, want in zip(graph(x, y), (x.roll(1) + 1, y.roll(1) * 2), strict=True):
            assert torch.equal(have, want), size


MEBIBYTE = 1 << 20


@pytest.fixture
def unlimited_afterwards() -> Iterator[None]:
    """The limit of memory that a test sets is lifted."""
    yield
    torch.npu.set_per_process_memory_fraction(1.0)


def _step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(x[:4])
    return (x.roll(1) + 1).cumsum(0, dtype=torch.int32).roll(1)


def _grown(rounds: int, *, dynamic: bool = True, **options: object) -> list[str]:
    """The reasons of the captures for growing sizes, on a device without room for all of them.

    Each call's values are eager mode's, and the result of the call before it stays.
    """
    sizes = range(10, 42, 2)
    given = {size: torch.arange(size, size + size * MEBIBYTE // 4, dtype=torch.int32) for size in sizes}
    inputs = {size: value.npu() for size, value in given.items()}
    graph = compiled(_step, dynamic=dynamic, **options)
    state, known = torch.zeros(4, dtype=torch.int32).npu(), torch.zeros(4, dtype=torch.int32)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    gc.collect()
    torch.npu.empty_cache()
    limit, total = torch.npu.memory_reserved() + 400 * MEBIBYTE, torch.npu.get_device_properties(0).total_memory
    torch.npu.set_per_process_memory_fraction(limit / total)
    mark = captures_so_far()
    for _ in range(rounds):
        for size in sizes:
            want = _step(given[size], known)
            del kept[:-1]
            kept.append((graph(inputs[size], state), want))
            for have, wanted in kept:
                assert torch.equal(have.cpu(), wanted), size
            assert torch.equal(state.cpu(), known), size
    return [record.reason for record in capture_records(after=mark)]


@pytest.mark.slow
@pytest.mark.usefixtures("unlimited_afterwards")
@pytest.mark.parametrize("dynamic", [True, False], ids=["one graph", "a graph for each size"])
def test_a_larger_size_takes_the_memory_of_the_smaller_ones(dynamic: bool) -> None:
    """Where memory is short their captures go, and each is made again at its next call; live results and the state stay."""
    with torch._dynamo.config.patch(recompile_limit=64):
        reasons = _grown(2, dynamic=dynamic, require_capture=True)
    assert any("short of memory" in reason for reason in reasons)


@pytest.mark.slow
@pytest.mark.usefixtures("unlimited_afterwards")
def test_sizes_that_do_not_fit_together_are_not_captured_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After so many times the graph runs operator by operator, with the same values."""
    monkeypatch.setattr(frame_memory, "MAX_DROPS", 1)
    reasons = _grown(1)
    assert sum("short of memory" in reason for reason in reasons) == 1
    said = [record.getMessage() for record in caplog.records]
    assert sum("dropped the captures" in text for text in said) == 1
    assert sum("operator by operator" in text for text in said) == 1
