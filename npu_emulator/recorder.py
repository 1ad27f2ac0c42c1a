"""The log of the device: every kernel, copy and fill in the order of execution, eager or inside a replay.

The runtime notes the numbers of kernels that run (runtime/trace.cpp); the launcher has the kernels, as long as they may run.
So the log has the same contents under every schedule and with null kernels, and costs nothing without a listener.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, overload

from npu_emulator.clock.roofline import bytes_of
from npu_emulator.device import NoteKind
from npu_emulator.frames import split_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from npu_emulator.device import Note
    from npu_emulator.launch import Launcher

__all__ = ["KernelLog", "Operand", "Ran", "Recorder", "listening", "write_until_exit"]


class Operand(NamedTuple):
    """A tensor that a kernel reads or writes.

    Attributes:
        dtype: torch's name without `torch.`.
        shape: its sizes.
        bytes: the size of its memory; an expanded tensor has less memory than elements.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Ran(NamedTuple):
    """One kernel, copy, fill or collective that the device ran.

    Attributes:
        number: its position in the log, from 1.
        name: the operator, `memcpy`, `memset`, or a collective of HCCL such as `hccl.all_reduce`.
        stream: the number of the stream; for a replay, the stream of its launch.
        launch: the number of the launch by the host; a captured kernel keeps it in each replay. 0: a copy or a fill.
        graph: the graph in whose replay it ran; None for eager work.
        replay: which replay of that graph, from 1; None for eager work.
        lane: which of the graph's captured streams; None for eager work.
        reads: the tensors that it reads.
        writes: the tensors that it writes.
        line: the Python line of the launch: for captured kernels that of the capture, for compiled ones the model's; empty for
            copies and fills.
        module: the path of the module of torch.nn that launched it, from the outermost one; empty if there is none.
    """

    number: int
    name: str
    stream: int
    launch: int
    graph: int | None
    replay: int | None
    lane: int | None
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    line: str
    module: str = ""

    @property
    def read_bytes(self) -> int:
        """The number of bytes that it reads."""
        return sum(operand.bytes for operand in self.reads)

    @property
    def written_bytes(self) -> int:
        """The number of bytes that it writes."""
        return sum(operand.bytes for operand in self.writes)

    def as_json(self) -> str:
        """One line of a log file: the attributes by name, `read_bytes` and `written_bytes`."""
        fields: dict[str, Any] = self._asdict()
        for side in ("reads", "writes"):
            fields[side] = [operand._asdict() for operand in fields[side]]
        return json.dumps({**fields, "read_bytes": self.read_bytes, "written_bytes": self.written_bytes})

    def __str__(self) -> str:
        where = f"stream {self.stream}"
        if self.graph is not None:
            where += f", graph {self.graph}, replay {self.replay}, lane {self.lane}"
        sides = (
            ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in side) for side in (self.reads, self.writes)
        )
        line = f", {self.line}" + (f" of {self.module}" if self.module else "") if self.line else ""
        return f"{self.number}: {self.name} ({' -> '.join(sides)}) on {where}{line}"


class KernelLog(Sequence[Ran]):
    """The work that ran while the log was open, in order. It may be read while it is open."""

    def __init__(self, refresh: Callable[[], None], name: str) -> None:
        self._refresh = refresh
        self._name = name
        self._found: list[Ran] = []

    def take(self, ran: Ran) -> None:
        """Add work that ran, if the log selects its name."""
        if fnmatchcase(ran.name, self._name):
            self._found.append(ran._replace(number=len(self._found) + 1))

    def __len__(self) -> int:
        self._refresh()
        return len(self._found)

    @overload
    def __getitem__(self, place: int) -> Ran: ...
    @overload
    def __getitem__(self, place: slice) -> list[Ran]: ...
    def __getitem__(self, place: int | slice) -> Ran | list[Ran]:
        self._refresh()
        return self._found[place]

    def __str__(self) -> str:
        """A line for each `Ran`."""
        return "\n".join(map(str, self))

    def of(self, name: str = "*", *, stream: int | None = None, graph: int | None = None) -> list[Ran]:
        """Return the work with a name (a pattern: `aten.mm*`), on a stream, and in replays of a graph; all conditions apply."""
        return [
            ran
            for ran in self
            if fnmatchcase(ran.name, name) and stream in {None, ran.stream} and graph in {None, ran.graph}
        ]

    def save(self, path: str | Path) -> Path:
        """Write the log as JSON lines, one for each `Ran`."""
        target = Path(path)
        target.write_text("".join(f"{ran.as_json()}\n" for ran in self), encoding="utf-8")
        return target


class Recorder:
    """Turns the runtime's notes into `Ran` and passes each to the listeners."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._listeners: list[Callable[[Ran], None]] = []
        self._lock = RLock()  # two threads that deliver at the same time would change the order

    def add(self, listener: Callable[[Ran], None]) -> None:
        """Pass later work to `listener`."""
        self.deliver()
        if not self._listeners:
            self._launcher.runtime.set_logging(on=True)
            self._launcher.recorder = self
        self._listeners.append(listener)

    def remove(self, listener: Callable[[Ran], None]) -> None:
        """Pass it the work so far, then stop."""
        self.deliver()
        self._listeners.remove(listener)
        if not self._listeners:
            self._launcher.recorder = None
            self._launcher.runtime.set_logging(on=False)

    def deliver(self) -> None:
        """Pass on the work since the last call."""
        if not self._listeners:
            return
        with self._lock:
            for note in self._launcher.runtime.take_ran():
                ran = self._tell(note)
                for listener in self._listeners:
                    listener(ran)

    def _tell(self, note: Note) -> Ran:
        name, line, module, launch = "memcpy", "", "", 0
        reads: tuple[Operand, ...] = ()
        writes: tuple[Operand, ...] = (Operand("uint8", (note.third,), note.third),)
        if note.kind == NoteKind.KERNEL:
            kernel = self._launcher.kernel(note.first)
            name, launch = kernel.name, note.first
            line, module = split_frame(kernel.line)
            reads, writes = _operands(kernel.reads), _operands(kernel.writes)
        elif note.kind == NoteKind.FILL:
            name = "memset"
        elif note.kind == NoteKind.COLLECTIVE_WRITE:
            name = self._launcher.runtime.collective_name(note.first)
            reads = (Operand("uint8", (note.second,), note.second),)
        else:
            reads = writes
        graph, replay, lane = (note.graph, note.task, note.edge) if note.graph else (None, None, None)
        return Ran(0, name, note.stream, launch, graph, replay, lane, reads, writes, line, module)


def _operands(tensors: Sequence[torch.Tensor]) -> tuple[Operand, ...]:
    return tuple(
        Operand(str(tensor.dtype).removeprefix("torch."), tuple(tensor.size()), bytes_of(tensor)) for tensor in tensors
    )


@contextmanager
def listening(recorder: Recorder, name: str) -> Iterator[KernelLog]:
    """Log the work with a name inside the block."""
    log = KernelLog(recorder.deliver, name)
    recorder.add(log.take)
    try:
        yield log
    finally:
        recorder.remove(log.take)


def write_until_exit(recorder: Recorder, path: Path) -> None:
    """Write later work to a file, one line each. A forked child writes nothing."""
    file: TextIO = path.open("w", buffering=1, encoding="utf-8")  # a fork inherits no half-written buffer
    owner, numbers = os.getpid(), count(1)

    def write(ran: Ran) -> None:
        if os.getpid() == owner:
            file.write(f"{ran._replace(number=next(numbers)).as_json()}\n")

    def finish() -> None:
        recorder.remove(write)
        if os.getpid() == owner:
            file.close()

    recorder.add(write)
    atexit.register(finish)
