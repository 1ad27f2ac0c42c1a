"""Which random numbers a draw gets: settled by the host at launch, as the device's graph-safe generators do.

A generator is a seed and an offset. An eager draw takes the next offset when it is launched. The draws of a captured graph
are numbered at capture; each replay, when it is launched, reserves as many offsets as the graph has draws. So a replay gets
the numbers that the same draws would have got eagerly at its place, and no schedule changes them.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from npu_emulator.device import Runtime

__all__ = ["Draws"]

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbouring offsets give unrelated seeds
_STEP = 4  # Philox offsets, which torch's generators count in, come in multiples of four


def _seed_at(generator: torch.Generator, offset: int) -> int:
    return (generator.initial_seed() + (offset + 1) * _SPREAD) & _MASK


def _reserve(generator: torch.Generator, draws: int) -> int:
    """Advance a generator by some draws; return the seed of the first."""
    offset = generator.get_offset()
    generator.set_offset(offset + draws * _STEP)
    return _seed_at(generator, offset)


class _GraphDraws:
    """How often one captured graph draws from each generator; lives as long as one of its kernels."""

    def __init__(self) -> None:
        self.counts: dict[torch.Generator, int] = {}


class Draws:
    """Gives every draw its seed."""

    def __init__(self, runtime: Runtime) -> None:
        """Keep account for the graphs of `runtime`."""
        self._runtime = runtime
        self._graphs: weakref.WeakValueDictionary[int, _GraphDraws] = weakref.WeakValueDictionary()
        self.seeds = 0
        """The address of the seeds of the replay whose kernel is running: 64 bits for each generator of its graph."""

    def next(self, generator: torch.Generator, stream: int) -> Callable[[], int]:
        """Return what tells a kernel that is launched now, on a stream, the 64-bit seed of its numbers when it runs."""
        graph = self._runtime.capture(stream)
        if graph == 0:
            seed = _reserve(generator, 1)
            return lambda: seed
        draws = self._graphs.setdefault(graph, _GraphDraws())
        before = draws.counts.get(generator, 0)
        draws.counts[generator] = before + 1
        place = list(draws.counts).index(generator)
        self._runtime.capture_draws(stream, len(draws.counts))

        def replayed(kept: _GraphDraws = draws) -> int:  # the default keeps the account alive with the kernel
            del kept
            first = ctypes.c_uint64.from_address(self.seeds + 8 * place).value
            return (first + before * _STEP * _SPREAD) & _MASK

        return replayed

    def reserve(self, graph: int, seeds: int) -> None:
        """Write the seeds of one replay of a graph to the address `seeds`: of the first draw from each generator."""
        draws = self._graphs.get(graph)
        if draws is None:
            return  # an update of a task group has replaced all kernels that drew
        for place, (generator, count) in enumerate(draws.counts.items()):
            ctypes.c_uint64.from_address(seeds + 8 * place).value = _reserve(generator, count)
