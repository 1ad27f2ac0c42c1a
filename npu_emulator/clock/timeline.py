"""A modelled timeline per stream, and the file that Perfetto and chrome://tracing open.

Launches, events, replays and synchronisations come from the runtime's log. A stream's work starts when its earlier work and
the awaited work have ended. The host launches in no time, and nothing starts before the end of an earlier synchronisation.
Streams do not slow each other down: they share neither cores nor bandwidth in this model.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from npu_emulator.clock.links import collective_us
from npu_emulator.clock.roofline import LAUNCH_US, Roofline
from npu_emulator.clock.trace import chrome_trace
from npu_emulator.device import Note, NoteKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npu_emulator.launch import Launch, Launcher, Queued

__all__ = ["Arrow", "Span", "Timeline"]


class Span(NamedTuple):
    """One piece of work; times in modelled microseconds.

    `meeting` names a collective alike on all of its ranks: the communicator, and how many were there before. Else it is empty.
    `moved` has the bytes from and to memory.
    """

    name: str
    stream: str
    start: float
    duration: float
    line: str
    meeting: str = ""
    moved: int = 0


class Arrow(NamedTuple):
    """An event between two streams: each end is a stream and a time in modelled microseconds."""

    source: tuple[str, float]
    target: tuple[str, float]


class _SpanEnd(NamedTuple):
    """A time, and the number of the span that ends then (-1: the beginning). The maximum of two is the later one."""

    time: float = 0.0
    cause: int = -1


class _Price(NamedTuple):
    """What is known of a kernel's time at its launch; the operations of its products are counted when it runs."""

    name: str
    least: float
    each: float
    """Microseconds for each operation of a counted product; 0 where a record gives the work."""
    line: str
    moved: int = 0

    def with_products(self, operations: int) -> tuple[str, float, str, int]:
        return self.name, max(self.least, LAUNCH_US + operations * self.each), self.line, self.moved


_BEGINNING = _SpanEnd()
_GONE = _Price("launched before the timeline began", LAUNCH_US, 0.0, "")


@dataclass
class _Lanes:
    """The clocks of a set of streams: those of the program, or those of one replay."""

    title: str
    ends: dict[int, _SpanEnd] = field(default_factory=dict)
    records: dict[int, tuple[str, _SpanEnd]] = field(default_factory=dict)

    def stream(self, number: int) -> str:
        return f"{self.title} {number}"


class Timeline:
    """The work of a part of a program on a modelled clock. Everything here is modelled; nothing is measured."""

    def __init__(self, launcher: Launcher, model: Roofline, products: Mapping[int, int] | None = None) -> None:
        """Follow what `launcher` starts; `model` gives the times, `products` the operations of products by kernel, once it ran."""
        self.model = model
        self.notes: dict[int, str] = {}
        """What captured graphs are, by their number, where a compiler says it; the figures show it."""
        self.names: dict[int, str] = {}
        """The functions that graphs come from, likewise; the picture's lanes show them."""
        self._spans: list[Span] = []
        self._arrows: list[Arrow] = []
        self._products = {} if products is None else products
        self._unread: list[Note] = []
        self._launcher = launcher
        self._runtime = launcher.runtime
        self.refresh = launcher.show_log
        """Take in what ran since the last launch; the end of the block does so by itself."""
        self._program = _Lanes("stream")
        self._host = _BEGINNING
        self._causes: list[int] = []
        self._captured: dict[int, list[Note]] = {}
        self._works: dict[int, _Price] = {}
        self._read = 0
        """Bytes that the collective reads whose notes come now."""
        self._meetings: Counter[int] = Counter()
        self.read(self._runtime.captured())  # a program warms up, then measures

    @property
    def spans(self) -> list[Span]:
        """The work so far, in the order of its launches. A kernel's products count once it has run."""
        self._settle()
        return self._spans

    @property
    def arrows(self) -> list[Arrow]:
        """The events that streams waited for."""
        self._settle()
        return self._arrows

    @property
    def end(self) -> float:
        """The end of the last work, in modelled microseconds."""
        return max((span.start + span.duration for span in self.spans), default=0.0)

    def _repr_html_(self) -> str:
        """The picture, below a cell of a Jupyter notebook."""
        from npu_emulator.clock.picture import sections
        from npu_emulator.pages import Page

        return Page("Modelled timeline", sections(self))._repr_html_()

    @property
    def critical_path(self) -> list[Span]:
        """The spans that determine the end, in order. Each starts where the one before it ends."""
        path: list[Span] = []
        spans = self.spans
        place = max(range(len(spans)), key=lambda n: spans[n].start + spans[n].duration, default=-1)
        while place >= 0:
            path.append(spans[place])
            place = self._causes[place]
        return path[::-1]

    def launching(self, key: int, launch: Launch) -> None:
        """Price kernel number `key` on its stream's present cores."""
        line = launch.frames[0] if launch.frames else ""
        self._works[key] = self._price_of(launch, line, *self._runtime.cores(launch.stream))

    def read(self, notes: Sequence[Note]) -> None:
        """Take the next lines of the log; their times are computed when they are asked for."""
        for note in notes:
            if note.graph:
                self._captured.setdefault(note.graph, []).append(note)
                continue
            self._unread.append(note)
            if note.kind == NoteKind.REPLAY:
                for task in self._captured.get(note.first, []):
                    if task.kind == NoteKind.KERNEL and task.first not in self._works:
                        self._works[task.first] = self._captured_before(task)

    def _settle(self) -> None:
        unread, self._unread = self._unread, []
        for note in unread:
            self._follow(self._program, note, note.first, note.first)

    def _follow(self, lanes: _Lanes, note: Note, record: int, awaited: int) -> None:
        """Advance one stream; `record` and `awaited` give the event numbers."""
        now = max(lanes.ends.get(note.stream, _BEGINNING), self._host)
        match note.kind:
            case NoteKind.COLLECTIVE_READ:
                self._read += note.third
            case NoteKind.KERNEL | NoteKind.COPY | NoteKind.FILL | NoteKind.COLLECTIVE_WRITE:
                name, duration, line, moved = self._price(note)
                meeting = self._meeting(note) if note.kind == NoteKind.COLLECTIVE_WRITE else ""
                self._spans.append(Span(name, lanes.stream(note.stream), now.time, duration, line, meeting, moved))
                self._causes.append(now.cause)
                now = _SpanEnd(now.time + duration, len(self._spans) - 1)
            case NoteKind.RECORD:
                lanes.records[record] = (lanes.stream(note.stream), now)
            case NoteKind.WAIT if awaited in lanes.records:
                stream, recorded = lanes.records[awaited]
                now = max(now, recorded)
                if stream != lanes.stream(note.stream):
                    self._arrows.append(Arrow((stream, recorded.time), (lanes.stream(note.stream), now.time)))
            case NoteKind.REPLAY:
                now = self._replay(note, now)
            case NoteKind.SYNC_STREAM:
                self._host = max(self._host, lanes.ends.get(note.first, _BEGINNING))
                return
            case NoteKind.SYNC_DEVICE:
                self._host = max([self._host, *lanes.ends.values()])
                return
            case NoteKind.SYNC_TICKET:
                self._host = max(self._host, lanes.records.get(note.first, ("", _BEGINNING))[1])
                return
        lanes.ends[note.stream] = now

    def _price(self, note: Note) -> tuple[str, float, str, int]:
        if note.kind == NoteKind.KERNEL:  # a captured kernel takes its time at each replay
            price = self._works.get(note.first, _GONE) if note.graph else self._works.pop(note.first, _GONE)
            return price.with_products(self._products.get(note.first, 0))
        if note.kind == NoteKind.COLLECTIVE_WRITE:
            name, devices = self._runtime.collective_name(note.second), self._runtime.devices_of(note.second)
            moved = max(self._read, note.third * (len(devices) if name.endswith("scatter") else 1))
            self._read = 0
            return name, LAUNCH_US + collective_us(name.removeprefix("hccl."), devices, moved), "", moved
        return ("memset" if note.kind == NoteKind.FILL else "memcpy", self.model.copy_us(note.third), "", note.third)

    def _captured_before(self, note: Note) -> _Price:
        """Price a kernel that was captured before the timeline began, on the cores that its stream had."""
        try:
            kernel = self._launcher.kernel(note.first)
        except KeyError:  # its graph was destroyed, or an update replaced it
            return _GONE
        return self._price_of(kernel, kernel.line, note.second >> 32, note.second & 0xFFFFFFFF)

    def _price_of(self, kernel: Launch | Queued, line: str, cube: int, vector: int) -> _Price:
        work = None if kernel.work is None else kernel.work()
        duration = self.model.kernel_us(
            kernel.name, kernel.reads, kernel.writes, work=work, cube_cores=cube, vector_cores=vector
        )
        each = 0.0 if work is not None else self.model.counted_us(kernel.name, kernel.reads, cube_cores=cube)
        moved = self.model.kernel_bytes(kernel.name, kernel.reads, kernel.writes)
        return _Price(kernel.name, duration, each, line, moved)

    def _meeting(self, note: Note) -> str:
        communicator = self._runtime.communicator_of(note.second)
        self._meetings[communicator] += 1
        return f"{communicator:x}/{self._meetings[communicator]}"

    def _replay(self, note: Note, start: _SpanEnd) -> _SpanEnd:
        """Run a captured graph's lanes from `start`; return when the last of them ends."""
        tasks = self._captured.get(note.first, [])
        lanes = _Lanes(f"stream {note.stream}, graph {note.first}, lane")
        lanes.ends = {task.stream: start for task in tasks}
        for task in tasks:
            self._follow(lanes, task, task.task, task.edge - 1)
        return max(lanes.ends.values(), default=start)

    def save(self, path: str | Path) -> Path:
        """Write the timeline as a Chrome trace: open it in https://ui.perfetto.dev. Arrows are events."""
        target = Path(path)
        target.write_text(json.dumps(chrome_trace(self)))
        return target
