"""Inputs that come from one address call after call. The captures of a graph key read them in place, without a copy.

A decode loop passes its static buffers to the compiled function at every step. Copies into the graph's own buffers would be
useless, and their launches are the largest part of a call's host time. So this module watches the addresses. If some stay, a
new capture that reads these inputs in place replaces the capture that copies them. If they move later, the copying capture is
made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from npugraph_ex.aclgraph.address_guard import LayoutGuard
from npugraph_ex.aclgraph.capture_set import CaptureSet
from npugraph_ex.aclgraph.inputs import InputPlan

WATCHED_CALLS = 8
"""How many calls an input must come from one address before it counts as stable."""

MAX_CAPTURES = 4
"""How often one graph key is captured again because inputs became stable at another address."""

MAX_PAUSE = 1024
"""The longest pause between two watches, in calls. A watch that finds nothing stable doubles the pause before the next one,
so that inputs which always move cost no watching."""

_Layout = tuple[int, tuple[int, ...]]


def _layouts(inputs: Sequence[Any], positions: Sequence[int]) -> list[_Layout]:
    """Address and strides of the tensors at ``positions``; their sizes are part of the graph key."""
    return [(inputs[position].data_ptr(), inputs[position].stride()) for position in positions]


class StableInputs:
    """The captures of one graph key: a set that copies inputs, and one that reads stable inputs in place.

    Args:
        plan: what happens to each input whose address is not known to be stable.
        make: makes a capture set for a plan and the reason for its first capture.
        reason: the reason for the key's first capture.
    """

    def __init__(self, plan: InputPlan, make: Callable[[InputPlan, str], CaptureSet], reason: str) -> None:
        self._plan = plan
        self._make = make
        self._copying: CaptureSet | None = make(plan, reason)
        self._reading: CaptureSet | None = None
        self._stable: tuple[int, ...] = ()  # the inputs that `_reading` reads in place
        self._guard: LayoutGuard | None = None
        self._captures_left = MAX_CAPTURES if plan.copied else 0
        self._pause = WATCHED_CALLS
        self._start_watch()

    def _start_watch(self) -> None:
        self._calls = 0
        self._last: list[_Layout] = []
        self._moved: set[int] = set()

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run with ``inputs``; read the stable ones in place if they have the addresses of the capture."""
        if self._reading is not None and self._guard is not None and self._guard.matches(inputs):
            return self._reading.run(inputs)
        stable = self._watch(inputs) if self._captures_left else ()
        if stable:
            return self._read_in_place(inputs, stable)
        if self._copying is None:
            self._copying = self._make(
                self._plan, f"{self._names(self._stable)} having left the address it was read at"
            )
        return self._copying.run(inputs)

    def _read_in_place(self, inputs: list[Any], stable: tuple[int, ...]) -> list[Any]:
        """Replace all captures with one that reads the inputs at ``stable`` in place."""
        self._captures_left -= 1
        reason = f"{WATCHED_CALLS} calls having had {self._names(stable)} at the same address, to read without a copy"
        # Earlier replays may still be queued. A graph that runs must keep its memory and must not be freed.
        torch.npu.current_stream().synchronize()
        # The new capture may use that memory.
        for captures in (self._copying, self._reading):
            if captures is not None:
                captures.release()
        self._copying = self._guard = None
        self._stable, self._reading = stable, self._make(self._plan.reading_in_place(stable), reason)
        results = self._reading.run(inputs)
        self._guard = LayoutGuard(stable, inputs)
        return results

    def _names(self, positions: Sequence[int]) -> str:
        return ", ".join(self._plan.names[position] for position in positions)

    def _watch(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Note the inputs' addresses. After enough calls, return the positions of the inputs that have not moved."""
        self._calls += 1
        if self._calls <= 0:
            return ()
        layouts = _layouts(inputs, self._plan.copied)
        for position, new, old in zip(self._plan.copied, layouts, self._last or layouts, strict=True):
            if new != old:
                self._moved.add(position)
        self._last = layouts
        if self._calls < WATCHED_CALLS:
            return ()
        stable = tuple(
            position
            for position in self._plan.copied
            if position not in self._moved and not self._shares_memory(inputs, position)
        )
        self._start_watch()
        if not stable:
            self._calls = -self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
        return stable

    def _shares_memory(self, inputs: Sequence[Any], position: int) -> bool:
        """Whether the graph might write memory that it would read in place. Then only a copy keeps the input unchanged."""
        storage = _storage(inputs[position])
        return any(_storage(inputs[other]) == storage for other in self._plan.in_place)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
