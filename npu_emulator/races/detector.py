"""Finds races from the runtime's log: eager work, work inside a captured graph, and replays against everything else."""

from __future__ import annotations

import warnings
from collections import deque
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
_Step = tuple[Note, _Work | None, Clock]
"""What a stream does next, with its work if it is work, and what the host knew at its launch."""
_OF_HOST = {
    NoteKind.SYNC_STREAM,
    NoteKind.SYNC_DEVICE,
    NoteKind.SYNC_TICKET,
    NoteKind.TICKET_FREE,
    NoteKind.ALLOCATED,
}
_IS_EXTERNAL = 1
"""`Note.second` of a record, a wait or a reset: of an external event, which is a flag."""


@dataclass
class _Captured:
    """The detector's facts about one graph."""

    domain: Domain = field(default_factory=Domain)
    records: dict[int, Clock] = field(default_factory=dict)
    steps: list[tuple[Note, _Work | None]] = field(default_factory=list)
    """Its work, and its waits, records and resets of external events, as they were captured."""


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
        self._flags: dict[int, bool] = {}
        """Whether an external event is set."""
        self._queues: dict[int, deque[_Step]] = {}
        """The streams that wait for an external event which is not set, or for a record behind such a wait."""
        self._unrecorded: set[int] = set()
        """The tickets of records in those queues."""
        self._allocator: Clock = {}
        """What torch_npu's allocator knows, for the memory that it hands out again."""
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
        if note.kind in _OF_HOST:
            self._follow_host(note)
        else:
            self._queue(note)

    def _follow_host(self, note: Note) -> None:
        """Process a moment at which the host, or torch_npu's allocator, learns that work has finished."""
        match note.kind:
            case NoteKind.SYNC_STREAM:
                if note.first in self._queues:
                    self._let_all_go()
                self._host_learns(self._eager.clock(note.first))
            case NoteKind.SYNC_DEVICE:
                self._let_all_go()
                self._host_learns(self._eager.everything())
            case NoteKind.SYNC_TICKET:
                if note.first in self._unrecorded:
                    self._let_all_go()
                self._host_learns(self._tickets.get(note.first, {}))
            case NoteKind.TICKET_FREE:
                join(self._allocator, self._tickets.get(note.first, {}))
            case NoteKind.ALLOCATED if self._allocator:
                self._eager.forget(note.first, note.first + note.third, self._allocator)

    def _host_learns(self, known: Clock) -> None:
        host = dict(self._host)  # steps in queues keep the earlier one
        join(host, known)
        self._host = host

    # -- streams ------------------------------------------------------------------------------------------------------

    def _queue(self, note: Note) -> None:
        """Let a stream do what is launched, once its waits for external events are over, and others what waits for that."""
        steps = self._replay(note) if note.kind == NoteKind.REPLAY else [(note, self._work(note))]
        queue = self._queues.setdefault(note.stream, deque())
        for step, work in steps:
            queue.append((step, work, self._host))
            if step.kind == NoteKind.RECORD and step.second != _IS_EXTERNAL:
                self._unrecorded.add(step.first)
        moved = True
        while moved:
            moved = False
            for stream, waiting in list(self._queues.items()):
                while waiting and self._may_go_on(waiting[0][0]):
                    self._do(stream, waiting.popleft())
                    moved = True
                if not waiting:
                    del self._queues[stream]

    def _may_go_on(self, note: Note) -> bool:
        if note.kind != NoteKind.WAIT:
            return True
        if note.second == _IS_EXTERNAL:  # one that the log has not named has the value that it had at the launch
            return self._flags.get(note.first, bool(note.third))
        return note.first not in self._unrecorded

    def _let_all_go(self) -> None:
        """The host has seen the end of what seems to wait: something else has set the events."""
        queues, self._queues = self._queues, {}
        for stream, queue in queues.items():
            for step in queue:
                self._do(stream, step)

    def _do(self, stream: int, step: _Step) -> None:
        note, work, host = step
        clock = self._eager.clock(stream)
        join(clock, host)
        if work is not None:
            name, frames, fresh, accesses = work
            self._touch(self._eager, stream, name, frames, accesses, fresh=fresh)
        elif note.kind == NoteKind.WAIT:
            join(clock, self._tickets.get(note.first, {}))
        elif note.kind == NoteKind.RESET:
            self._flags[note.first] = False
        elif note.second == _IS_EXTERNAL:
            self._flags[note.first] = True
            self._tickets[note.first] = dict(clock)
        else:
            self._unrecorded.discard(note.first)
            self._tickets[note.first] = dict(clock)

    def _work(self, note: Note) -> _Work | None:
        if note.kind in {NoteKind.RECORD, NoteKind.WAIT, NoteKind.RESET}:
            return None
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
    ) -> None:
        operation = Operation(name, frames, stream, domain.next_number(stream), fresh)

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
        work = self._work(note)
        if work is not None:
            graph.steps.append((note, work))
            name, frames, _, accesses = work
            self._touch(graph.domain, note.stream, name, frames, accesses, graph=note.graph)
        elif note.second == _IS_EXTERNAL:
            graph.steps.append((note, None))
        elif note.kind == NoteKind.RECORD:
            graph.records[note.task] = dict(clock)
        elif note.kind == NoteKind.WAIT:
            join(clock, graph.records.get(note.edge - 1, {}))

    def _replay(self, note: Note) -> list[tuple[Note, _Work | None]]:
        """Return what a replay does; for the rest of the program it does so one by one, on the stream of its launch."""
        graph = next((one.graphs[note.first] for one in (self, *self._around) if note.first in one.graphs), None)
        if graph is None:
            self.graphs[note.first] = _Captured()  # one warning for each
            if any(task.graph == note.first for task in self._runtime.captured()):  # one without tasks touches nothing
                warnings.warn(
                    f"graph {note.first} was captured before the race detector began: what its replays touch is not known, and "
                    "no race with them is found. Capture it inside the block",
                    stacklevel=2,
                )
            return []
        steps: list[tuple[Note, _Work | None]] = []
        for step, work in graph.steps:
            if work is None:
                steps.append((step._replace(third=note.third), None))
            else:
                name, frames, _, accesses = work
                steps.append((step, (f"{name} in a replay of graph {note.first}", frames, False, accesses)))
        return steps


def _place(race: Race) -> object:
    """Equal for races of the same lines."""
    first, second = race.first, race.second
    return first.name, first.frames, first.stream, second.name, second.frames, second.stream, race.graph
