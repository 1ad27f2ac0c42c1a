"""Finds races from the runtime's log: eager work, work inside a captured graph, and replays against everything else."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from npu_emulator.device import Note, NoteKind
from npu_emulator.errors import RaceError
from npu_emulator.races.access import Access, of_range, of_tensor
from npu_emulator.races.clocks import Clock, Domain, Operation, join
from npu_emulator.races.report import Race

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npu_emulator.device import Runtime
    from npu_emulator.launch import Launch

__all__ = ["Detector"]

_Work = tuple[str, tuple[str, ...], bool, list[Access]]
"""An operation's name, its Python lines, whether it writes memory allocated for it, and what it touches."""


@dataclass
class _Captured:
    """The detector's facts about one graph."""

    domain: Domain = field(default_factory=Domain)
    records: dict[int, Clock] = field(default_factory=dict)
    awaits: list[int] = field(default_factory=list)
    """External events that a replay waits for."""
    fires: list[int] = field(default_factory=list)
    """External events that a replay records."""
    work: list[tuple[str, tuple[str, ...], list[Access]]] = field(default_factory=list)


class Detector:
    """Collects the races of a part of a program.

    The host counts as one thread: a wait of one Python thread counts for all.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        stop_at_first: bool = False,
        captures_only: bool = False,
        leaves: bool = False,
        around: Sequence[Detector] = (),
    ) -> None:
        """Read the log of `runtime`.

        Args:
            runtime: whose log it is.
            stop_at_first: raise RaceError at the launch of the second side.
            captures_only: look at captures alone, for detectors that begin later.
            leaves: do not stop at a race that a detector of an inner block finds, too.
            around: those that began before, which know the graphs captured since.
        """
        self.races: list[Race] = []
        self.raised: list[Race] = []
        self._runtime = runtime
        self._stop = stop_at_first
        self._captures_only = captures_only
        self._leaves = leaves
        self._inner = 0
        self._left: list[Race] = []
        self._around = tuple(around)
        self._eager = Domain()
        self._host: Clock = {}
        self._tickets: dict[int, Clock] = {}
        self.graphs: dict[int, _Captured] = {}
        self._launches: dict[int, _Work] = {}
        self._seen: set[object] = set()

    # -- calls from the launcher ----------------------------------------------------------------------------------------

    def launching(self, key: int, launch: Launch) -> None:
        """Note the accesses of kernel number `key`."""
        accesses = [of_tensor(tensor, writes=True) for tensor in launch.writes]
        accesses += [of_tensor(tensor, writes=False) for tensor in launch.reads]
        self._launches[key] = (launch.name, launch.frames, launch.fresh, [access for access in accesses if access])

    def read(self, notes: Sequence[Note]) -> None:
        """Read the next lines of the log."""
        found = len(self.races)
        for note in notes:
            self._follow(note)
        if self._stop and len(self.races) > found:
            if not (self._leaves and self._inner):
                self._raise(self.races[found])
            self._left += self.races[found:]

    @contextmanager
    def around_another(self, inner: Detector) -> Iterator[None]:
        """Leave to `inner` what it finds in the block; what it cannot know, such as earlier work, raises at the block's end."""
        self._inner += 1
        try:
            yield
        finally:
            self._inner -= 1
            left = self._left
            self._left = left if self._inner else []
        missed = next((race for race in left if _place(race) not in inner._seen), None)
        if missed is not None and not self._inner:
            self._raise(missed)

    def _raise(self, race: Race) -> NoReturn:
        self.raised.append(race)
        raise RaceError(str(race))

    # -- lines of the log ---------------------------------------------------------------------------------------------

    def _follow(self, note: Note) -> None:
        if note.graph:
            self._follow_captured(note)
            return
        if self._captures_only:
            self._launches.pop(note.first if note.kind == NoteKind.KERNEL else -1, None)
            return
        clock = self._eager.clock(note.stream)
        match note.kind:
            case NoteKind.KERNEL | NoteKind.COPY | NoteKind.FILL | NoteKind.COLLECTIVE_READ | NoteKind.COLLECTIVE_WRITE:
                name, frames, fresh, accesses = self._work(note)
                self._touch(self._eager, note.stream, name, frames, accesses, fresh=fresh)
            case NoteKind.RECORD:
                join(clock, self._host)
                self._tickets[note.first] = dict(clock)
            case NoteKind.WAIT:
                join(clock, self._tickets.get(note.first, {}))
            case NoteKind.REPLAY:
                self._replay(note)
            case NoteKind.SYNC_STREAM:
                join(self._host, self._eager.clock(note.first))
            case NoteKind.SYNC_DEVICE:
                join(self._host, self._eager.everything())
            case NoteKind.SYNC_TICKET:
                join(self._host, self._tickets.get(note.first, {}))

    def _work(self, note: Note) -> _Work:
        if note.kind == NoteKind.KERNEL:
            return self._launches.pop(note.first)
        if note.kind in {NoteKind.COLLECTIVE_READ, NoteKind.COLLECTIVE_WRITE}:
            touched = of_range(note.first, note.third, writes=note.kind == NoteKind.COLLECTIVE_WRITE)
            return self._runtime.collective_name(note.second), (), False, [touched] if note.third else []
        target = of_range(note.first, note.third, writes=True)
        if note.kind == NoteKind.FILL:
            return "memset", self._runtime.lines_of(note), False, [target]
        return "memcpy", self._runtime.lines_of(note), False, [target, of_range(note.second, note.third, writes=False)]

    def _touch(  # noqa: PLR0913 - what an operation is made of
        self,
        domain: Domain,
        stream: int,
        name: str,
        frames: tuple[str, ...],
        accesses: list[Access],
        *,
        fresh: bool = False,
        graph: int | None = None,
        number: int | None = None,
    ) -> None:
        if domain is self._eager:
            join(domain.clock(stream), self._host)
        operation = Operation(name, frames, stream, number or domain.next_number(stream), fresh)

        def found(first: Operation, earlier: Access, second: Operation, later: Access, shared: int) -> None:
            race = Race(first, earlier, second, later, shared, graph)
            if _place(race) not in self._seen:
                self._seen.add(_place(race))
                self.races.append(race)

        domain.touch(operation, accesses, found)

    # -- graphs ---------------------------------------------------------------------------------------------------------

    def _follow_captured(self, note: Note) -> None:
        """Process a captured task: its lane is a stream, its edge an event."""
        graph = self.graphs.setdefault(note.graph, _Captured())
        clock = graph.domain.clock(note.stream)
        match note.kind:
            case NoteKind.RECORD:
                graph.records[note.task] = dict(clock)
                if note.first:
                    graph.fires.append(note.first)
            case NoteKind.WAIT if not note.edge:
                graph.awaits.append(note.first)
            case NoteKind.WAIT:
                join(clock, graph.records.get(note.edge - 1, {}))
            case NoteKind.KERNEL | NoteKind.COPY | NoteKind.FILL | NoteKind.COLLECTIVE_READ | NoteKind.COLLECTIVE_WRITE:
                name, frames, _, accesses = self._work(note)
                graph.work.append((name, frames, accesses))
                self._touch(graph.domain, note.stream, name, frames, accesses, graph=note.graph)

    def _replay(self, note: Note) -> None:
        """Process a replay: for the rest of the program it is one operation of its stream with all accesses of its tasks."""
        graph = next((one.graphs[note.first] for one in (self, *self._around) if note.first in one.graphs), None)
        if graph is None:
            self.graphs[note.first] = _Captured()  # one warning for each
            if any(task.graph == note.first for task in self._runtime.captured()):  # one without tasks touches nothing
                warnings.warn(
                    f"graph {note.first} was captured before the race detector began: what its replays touch is not known, and "
                    "no race with them is found. Capture it inside the block",
                    stacklevel=2,
                )
            return
        clock = self._eager.clock(note.stream)
        join(clock, self._host)
        for ticket in graph.awaits:
            join(clock, self._tickets.get(ticket, {}))
        number = self._eager.next_number(note.stream)
        for name, frames, accesses in graph.work:
            title = f"{name} in a replay of graph {note.first}"
            self._touch(self._eager, note.stream, title, frames, accesses, number=number)
        for ticket in graph.fires:
            self._tickets[ticket] = dict(clock)


def _place(race: Race) -> object:
    """Equal for races of the same lines."""
    first, second = race.first, race.second
    return first.name, first.frames, first.stream, second.name, second.frames, second.stream, race.graph
