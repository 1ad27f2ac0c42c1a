"""Inputs that keep coming from one address: after a few calls they are read where they are instead of being copied.

A decode loop hands its static buffers to the compiled function at every step. Copying them into the graph's own buffers
moves bytes for nothing, and its launches are the largest part of a call's host time. So addresses are watched; where
some stay, a graph is captured that reads these inputs in place and takes the place of the one that copies; should they
move after all, that one is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.aclgraph.places import Layouts

WATCHED_CALLS = 8
"""How many calls an input must come from one address before it counts as stable."""

MOST_CAPTURES = 4
"""How often one graph key is captured anew for inputs that had become stable at yet another address."""

LONGEST_PAUSE = 1024
"""At most so many calls are not watched. Each watch that finds nothing stable doubles the pause before the next one, so
that inputs which move for ever cost no watching."""

_Place = tuple[int, tuple[int, ...]]


class Runner(Protocol):
    """Something that runs a graph on inputs."""

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run with ``inputs`` and hand out the results."""


class Captures(Runner, Protocol):
    """The captures for one plan."""

    def release(self) -> list[torch.npu.NPUGraph]:
        """Give up the captures and their memory; what is returned keeps the memory pool alive."""


def _places(inputs: Sequence[Any], positions: Sequence[int]) -> list[_Place]:
    """Address and strides of the tensors at ``positions``; their sizes are part of the graph's key."""
    return [(inputs[position].data_ptr(), inputs[position].stride()) for position in positions]


class StableInputs:
    """The captures for one graph key, of which one may read stable inputs in place.

    Args:
        plan: what happens to each input while nothing is known of its address.
        make: makes the captures for a plan, given the reason for them.
        reason: why the key is captured at all.
    """

    def __init__(self, plan: InputPlan, make: Callable[[InputPlan, str], Captures], reason: str) -> None:
        self._plan = plan
        self._make = make
        self._copying: Captures | None = make(plan, reason)
        self._reading: Captures | None = None
        self._read: tuple[int, ...] = ()
        self._expected: Layouts | None = None
        # Graphs without their memory: a pool is gone with its last graph, so they stay until another has joined it.
        self._kept: list[torch.npu.NPUGraph] = []
        self._captures_left = MOST_CAPTURES if plan.copied else 0
        self._pause = WATCHED_CALLS
        self._forget()

    def _forget(self) -> None:
        self._calls = 0
        self._last: list[_Place] = []
        self._moved: set[int] = set()

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run with ``inputs``, read in place as far as they are where they were at the capture."""
        if self._reading is not None and self._expected is not None and self._expected.hold(inputs):
            return self._reading.run(inputs)
        stable = self._watch(inputs) if self._captures_left else ()
        if stable:
            return self._switch(inputs, stable)
        if self._copying is None:
            self._copying = self._make(self._plan, f"{self._names(self._read)} having left the address it was read at")
            results = self._copying.run(inputs)
            self._kept.clear()
            return results
        return self._copying.run(inputs)

    def _switch(self, inputs: list[Any], stable: tuple[int, ...]) -> list[Any]:
        """Read the inputs at ``stable`` in place from now on."""
        self._captures_left -= 1
        reason = f"{WATCHED_CALLS} calls having had {self._names(stable)} at the same address, to read without a copy"
        # A graph must not be destroyed while it runs, nor its memory be given away, and earlier replays may still be queued.
        torch.npu.current_stream().synchronize()
        # The new capture may have that memory.
        for runner in (self._copying, self._reading):
            self._kept += [] if runner is None else runner.release()
        self._copying = self._expected = None
        self._read, self._reading = stable, self._make(self._plan.reading(stable), reason)
        results = self._reading.run(inputs)
        self._expected = Layouts(stable, inputs)
        self._kept.clear()
        return results

    def _names(self, positions: Sequence[int]) -> str:
        return ", ".join(self._plan.names[position] for position in positions)

    def _watch(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Note where the inputs are; after enough calls, answer which of them have stayed where they are."""
        self._calls += 1
        if self._calls <= 0:
            return ()
        places = _places(inputs, self._plan.copied)
        for position, new, old in zip(self._plan.copied, places, self._last or places, strict=True):
            if new != old:
                self._moved.add(position)
        self._last = places
        if self._calls < WATCHED_CALLS:
            return ()
        stable = tuple(
            position
            for position in self._plan.copied
            if position not in self._moved and not self._shares_memory(inputs, position)
        )
        self._forget()
        if not stable:
            self._calls = -self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return stable

    def _shares_memory(self, inputs: Sequence[Any], position: int) -> bool:
        """Whether the graph might write what it would read: the copy is what keeps the two apart."""
        storage = _storage(inputs[position])
        return any(_storage(inputs[other]) == storage for other in self._plan.in_place)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
