"""The random numbers of each draw. The host determines them at the launch, as with the device's graph-safe generators.

A generator is a seed and an offset. An eager draw takes the next offset at its launch. Inside a capture torch_npu has a
separate offset for the graph, which starts at 0 and which `get_rng_state` and `set_rng_state` read and write; a captured draw
takes its offset from it. Each replay advances the generator by the graph's last offset. So a replay gets the same numbers as
eager draws at its position, under every schedule.
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
_SPREAD = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits, so that neighbouring offsets give unrelated seeds
_STEP = 4  # torch's generators count Philox offsets, which are multiples of four
_OFFSET_AT = 8  # a generator's state is eight bytes of seed and eight of offset


def _seed_at(generator: torch.Generator, offset: int) -> int:
    return (generator.initial_seed() + (offset + 1) * _SPREAD) & _MASK


def _captured_offset(generator: torch.Generator, *, advance: int = 0) -> int:
    """Return a generator's offset in the current capture, and advance it. `get_offset` raises there."""
    state = generator.get_state()
    place = ctypes.c_uint64.from_address(state.data_ptr() + _OFFSET_AT)
    offset = place.value
    if advance:
        place.value += advance
        generator.set_state(state)
    return offset


class _GraphDraws:
    """The last offsets of one captured graph's generators; lives as long as one of its kernels."""

    def __init__(self) -> None:
        self.reached: dict[torch.Generator, int] = {}


class Draws:
    """Gives each draw its seed."""

    def __init__(self, runtime: Runtime) -> None:
        """Manage the draws of the graphs of `runtime`."""
        self._runtime = runtime
        self._graphs: weakref.WeakValueDictionary[int, _GraphDraws] = weakref.WeakValueDictionary()
        self.seeds = 0
        """The address of the current replay's seeds: 64 bits for each generator of its graph."""

    def next(self, generator: torch.Generator, stream: int) -> Callable[[], int]:
        """Return a function that gives a kernel launched now, on a stream, its 64-bit seed at run time."""
        graph = self._runtime.capture(stream)
        if graph == 0:
            offset = generator.get_offset()
            generator.set_offset(offset + _STEP)
            seed = _seed_at(generator, offset)
            return lambda: seed
        draws = self._graphs.setdefault(graph, _GraphDraws())
        before = _captured_offset(generator, advance=_STEP)
        draws.reached[generator] = before + _STEP
        place = list(draws.reached).index(generator)
        self._runtime.capture_draws(stream, len(draws.reached))

        def replayed(kept: _GraphDraws = draws) -> int:  # the default keeps the draws alive with the kernel
            del kept
            first = ctypes.c_uint64.from_address(self.seeds + 8 * place).value
            return (first + before * _SPREAD) & _MASK

        return replayed

    def capture_ends(self, graph: int) -> None:
        """Note the last offsets of a graph's generators: the program may have set their states after the last draw."""
        draws = self._graphs.get(graph)
        if draws is not None:
            for generator in draws.reached:
                draws.reached[generator] = _captured_offset(generator)

    def reserve(self, graph: int, seeds: int) -> None:
        """Write the seeds of one replay of a graph to the address `seeds`: of the first draw from each generator.

        torch_npu has already advanced the generators for the replay.
        """
        draws = self._graphs.get(graph)
        if draws is None:
            return  # an update of a task group has replaced all random kernels
        for place, (generator, reached) in enumerate(draws.reached.items()):
            seed = _seed_at(generator, generator.get_offset() - reached)
            ctypes.c_uint64.from_address(seeds + 8 * place).value = seed
