"""Launches: turns an operator on tensors into a task on the current stream.

A kernel body is a Python function without arguments that computes on CPU tensors which share the device's memory. If the
schedule allows it, the body runs immediately. Otherwise it is queued under a number, and the runtime calls that number when
the task runs (many times, if it was captured).
"""

from __future__ import annotations

import itertools
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from npu_emulator.clock.products import counted
from npu_emulator.device import QUEUE, RUN_NOW
from npu_emulator.errors import EmulatorError, add_note, address_of, without_address
from npu_emulator.frames import said_line, user_frames, user_line, user_stack
from npu_emulator.host_state import HostState, without_autocast
from npu_emulator.interrupts import Interrupts
from npu_emulator.memory.bounds import INVALID_ADDRESS, first_outside
from npu_emulator.memory.views import Views
from npu_emulator.operator_records import OperatorRecords
from npu_emulator.random_seeds import Draws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from npu_emulator.device import Note, Runtime
    from npu_emulator.kernels.moves import Move
    from npu_emulator.kernels.overflow import OverflowStatus
    from npu_emulator.kernels.row_reads import RowReads
    from npu_emulator.memory.watch import MemoryWatch
    from npu_emulator.recorder import Recorder

__all__ = ["Launch", "Launcher", "Observer"]

_KERNEL_FAILED = 507015  # ACL_ERROR_RT_AICORE_EXCEPTION
_FIFO = 0  # `Schedule.policy`
_SWEEP_EVERY = 256


class Launch(NamedTuple):
    """The facts about one launch for a checker."""

    name: str
    frames: tuple[str, ...]
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    fresh: bool
    stream: int
    """The raw handle."""
    work: Callable[[], tuple[float, float]] | None = None
    """Returns the numbers of matrix and of vector operations, if its kernel reports them."""


def _run_now(name: str, body: Callable[[], object]) -> None:
    """Run a kernel at its launch; where torch's own raises, say the line and the remedy, as of one in a queue."""
    try:
        without_autocast(body)
    except (IndexError, RuntimeError) as error:
        if type(error) in {IndexError, RuntimeError}:  # the emulator's classes have a remedy
            line = next(iter(user_frames(1)), "an unknown line")
            told = f"{name}, launched at {line}, failed on the device; mend what that line launches"
            add_note(error, f"{told}\n{address_of(_KERNEL_FAILED)}")
        raise


class Queued:
    """A kernel in the queue, or a kernel of a captured graph."""

    __slots__ = (
        "body",
        "captured",
        "error",
        "frees",
        "launched_by",
        "line",
        "name",
        "reads",
        "state",
        "work",
        "writes",
    )

    def __init__(
        self,
        name: str,
        body: Callable[[], object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        frees: int,
        work: Callable[[], tuple[float, float]] | None,
    ) -> None:
        self.name = name
        self.body = body
        self.state = HostState()
        self.line = ""  # of the program, as the launcher knows it
        self.reads = reads
        self.writes = writes
        self.frees = frees  # the number of frees when all of its memory was last known to be allocated
        self.work = work  # as in `Launch`
        self.captured = False  # or of a graph
        self.launched_by = 0  # the thread that launches it now, if an error is to be raised there
        self.error: BaseException | None = None


class Observer(Protocol):
    """A checker that observes launches."""

    def launching(self, key: int, launch: Launch) -> None:
        """Receive kernel number `key` before its launch."""

    def read(self, notes: Sequence[Note]) -> None:
        """Read the next lines of the log, after a launch or a wait of the host."""


class Launcher:
    """Launches kernels on streams and counts them; `views` has their memory as CPU tensors."""

    def __init__(self, runtime: Runtime) -> None:
        """Register with the runtime, which calls this object to run queued kernels."""
        import torch_npu
        from torch_npu.utils._npu_trace import CallbackRegistry

        self.runtime = runtime
        self.launches = 0
        self._raw_stream: Callable[[int], int] = torch_npu._C._npu_getCurrentRawStream  # noqa: SLF001 - the public property is ten times slower
        self.checks_marks: Callable[[], bool] = torch_npu._C._get_npu_data_unsafe_flag  # noqa: SLF001 - as above
        """Whether kernels must refuse memory that a fault has marked (`kernels/recovery.py`)."""
        self.observers: list[Observer] = []
        self.recorder: Recorder | None = None
        self.products: dict[int, int] | None = None
        """The operations of matrix products in kernels that ran, by kernel; none are counted without a timeline."""
        self.memory: MemoryWatch | None = None
        self.overflow: OverflowStatus | None = None
        """Where the chip computes in saturation mode."""
        self._numbers: dict[str, int] = {}
        self._bodies: dict[int, Queued] = {}
        self._next = itertools.count(1)
        self.views = Views(runtime)
        self._records: OperatorRecords | None = None
        self.draws = Draws(runtime)
        runtime.set_kernel_runner(self._run_queued)
        runtime.set_seed_giver(self.draws.reserve)
        runtime.set_capture_watcher(self.draws.capture_ends)
        runtime.set_replay_watcher(self._replayed)
        runtime.set_finders(user_line, user_stack, user_frames)
        runtime.set_operator_recorder(self._record_operators)
        self._interrupts = Interrupts(behind=CallbackRegistry.fire_callbacks.__code__)
        runtime.set_raise(self._interrupts.surface)

    # -- launching ------------------------------------------------------------------------------------------------------

    def number(self, name: str) -> int:
        """Return the runtime's number for an operator, under which it counts kernels."""
        known = self._numbers.get(name)
        if known is None:
            known = self._numbers[name] = len(self._numbers)
            self.runtime.name_op(known, name.encode())
        return known

    def launch(  # noqa: PLR0913 - what a launch is made of
        self,
        name: str,
        number: int,
        device: int,
        body: Callable[[], object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        fresh: bool = False,
        work: Callable[[], tuple[float, float]] | None = None,
        move: Move | RowReads | None = None,
    ) -> None:
        """Put a kernel on the device's current stream.

        `reads` and `writes` are the CPU views of the device memory that `body` will read and write. `fresh` tells whether the
        written memory was allocated for this launch; `work` is for `Launch`; `move` is for `memory`.
        """
        stream = self._raw_stream(device)
        self.launches += 1
        if self._records is not None:
            self._records.note(name, reads, writes)
        if self.overflow is not None:
            body = self.overflow.guard(name, device, body, reads, writes)
        if self.memory is not None:
            body = self.memory.guard(name, stream, body, reads, writes, move, fresh=fresh)
        if self.views.may_be_freed():
            self._check_memory(name, stream, (*reads, *writes))
        answer = None  # as it stays if a signal's handler raises where `begin` returns
        try:
            answer = self.runtime.begin(stream, number)
            if answer == RUN_NOW:
                _run_now(name, body)
        finally:
            if answer is None or answer == RUN_NOW:
                self.runtime.end()
        if answer == QUEUE:
            key = next(self._next)
            frames = user_frames(6 if self.observers else 1)
            if self.observers:
                launch = Launch(name, frames, reads, writes, fresh, stream, work)
                for observer in self.observers:
                    observer.launching(key, launch)
            queued = Queued(name, body, reads, writes, self.runtime.frees(), work)
            queued.line = frames[0] if frames else "an unknown line"
            self._queue(key, queued, number, stream)
            self.show_log()

    def show_log(self) -> None:
        """Give every observer the lines that the log has had since the last time."""
        if self.observers:
            notes = self.runtime.take_notes()
            for observer in self.observers:
                observer.read(notes)

    def _replayed(self) -> None:
        """Give observers the log after a replay, and raise what they find where the program has launched it."""
        if threading.current_thread() is not threading.main_thread():  # elsewhere nothing can be raised from here
            return
        try:
            self.show_log()
        except Exception as error:  # noqa: BLE001 - an exception would end in the runtime's C++ frames
            self.runtime.raise_later(error)

    def _check_memory(self, name: str, stream: int, touched: Iterable[torch.Tensor]) -> None:
        """Raise if the next kernel would touch memory that is not allocated."""
        self.views.forget()
        wrong = first_outside(self.runtime, touched)
        if wrong is not None:
            raise RuntimeError(
                f"{name} on stream {self.runtime.stream_id(stream)} cannot run: {wrong} (ACL error {INVALID_ADDRESS}); "
                f"keep memory allocated until the work on it has run{said_line()}\n{address_of(INVALID_ADDRESS)}"
            )

    def _record_operators(self, folder: bytes | None) -> None:
        """Start describing operators in a folder, or stop."""
        self._records = None if folder is None else OperatorRecords(Path(folder.decode()))

    def current_stream(self) -> int:
        """Return the raw handle of the current device's current stream."""
        return self._raw_stream(torch.npu.current_device())

    def stream_of(self, device: int) -> int:
        """Return the raw handle of a device's current stream."""
        return self._raw_stream(device)

    def is_capturing(self, stream: int) -> bool:
        """Tell whether a stream, given by its raw handle, is being captured."""
        return self.runtime.capture(stream) != 0

    def _queue(self, key: int, queued: Queued, number: int, stream: int) -> None:
        if key % _SWEEP_EVERY == 0:
            self.sweep()
        self._interrupts.install()
        queued.captured = self.is_capturing(stream)
        self._bodies[key] = queued
        if self.runtime.schedule.policy == _FIFO:
            queued.launched_by = threading.get_ident()
        status = self.runtime.launch(stream, key, number)
        queued.launched_by = 0
        if queued.error is not None:
            error, queued.error = queued.error, None
            raise error
        if status != 0:
            del self._bodies[key]
            raise EmulatorError(f"{queued.name} could not be launched (error {status}): {self.runtime.recent_error()}")
        if self.recorder is not None:
            self.recorder.deliver()

    def kernel(self, key: int) -> Queued:
        """Return the queued or captured kernel of that number."""
        return self._bodies[key]

    def sweep(self) -> None:
        """Forget queued kernels that have run, and those of destroyed graphs."""
        if self.recorder is not None:
            self.recorder.deliver()  # it needs the kernels that ran
        for key in self.runtime.take_released():
            self._bodies.pop(key, None)

    def _run_queued(self, key: int, seeds: int | None) -> int:
        queued = self._bodies[key]
        self.draws.seeds = seeds or 0
        frees = self.runtime.frees()
        if frees != queued.frees:
            outside = first_outside(self.runtime, (*queued.reads, *queued.writes))
            if outside is not None:
                self._describe_failure(queued, outside)
                return INVALID_ADDRESS
            queued.frees = frees
        try:
            if queued.launched_by == threading.get_ident():  # as a kernel that no queue had
                with counted(self.products, key):
                    without_autocast(queued.body)
            else:  # a replay may run inside the caller's autograd or dispatch mode, none of which applies on a device
                with _disable_current_modes(), counted(self.products, key):
                    queued.state.run(queued.body)
        except KeyboardInterrupt as interrupt:  # from a handler of another signal
            self.runtime.raise_later(interrupt)
            return 0
        except BaseException as error:  # noqa: BLE001 - no exception may unwind through the runtime's C++ frames
            if queued.launched_by == threading.get_ident():
                queued.error = error
                return 0
            self._describe_failure(queued, error)
            if not isinstance(error, Exception):
                traceback.print_exc()
            return _KERNEL_FAILED
        return 0

    def _describe_failure(self, queued: Queued, error: object) -> None:
        """Say what failed, and where it raises at its line: where it is launched eagerly under the schedule fifo."""
        fifo = self.runtime.schedule.policy == _FIFO
        advice = "mend what that line launches"
        if queued.captured:
            advice += f": run eagerly{'' if fifo else ' under the schedule fifo'} it raises there"
        elif not fifo:
            how = "NPU_EMULATOR_SCHEDULE=fifo, or pytest --npu=emulated --npu-schedule fifo"
            advice += f": under the schedule fifo it raises there ({how})"
        text = f"{queued.name}, launched at {queued.line}, failed on the device: {without_address(error)}"
        self.runtime.describe_failure(text, advice)

    def wait(self, device: int, what: str, *, computes: bool = False) -> None:
        """Wait for the current stream before the host reads device memory, or computes on it (`nonzero`)."""
        status = self.runtime.wait(self._raw_stream(device), "size" if computes else "read")
        if status < 0:
            raise RuntimeError(
                f"{what} reads device memory from the host, which is not permitted while a stream is being captured "
                f"(ACL error {-status}); {self._capture_advice(device)}{said_line()}\n"
                f"{address_of(-status)}"
            )
        self._waited(status)

    def wait_for_copy(self, device: int) -> None:
        """Wait for the current stream after a blocking copy to the device, which no capture refused."""
        self._waited(self.runtime.wait(self._raw_stream(device), "copy"))

    def _waited(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"ACL error {abs(status)}: {self.runtime.recent_error()}")
        self.show_log()

    def refuse_in_capture(self, device: int, what: str, *, pinned: bool = True) -> None:
        """Raise if a capture forbids an operation that blocks the host; ``pinned`` memory may help."""
        code = self.runtime.may_not_block(self._raw_stream(device))
        if code != 0:
            raise RuntimeError(
                f"{what} blocks the host, which is not permitted while a stream is being captured (ACL error "
                f"{code}); {self._capture_advice(device)}"
                f"{', or copy from pinned memory with non_blocking=True' if pinned else ''}{said_line()}\n"
                f"{address_of(code)}"
            )

    def _capture_advice(self, device: int) -> str:
        if self.runtime.only_others_capture(self._raw_stream(device)):
            return (
                "another thread captures and forbids it to all: give that capture "
                'capture_error_mode="thread_local", which torch.npu.graph and npugraph_ex take'
            )
        return "move it out of the captured region"

    # -- counting -------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return how many kernels ran so far, by operator name; replays count each kernel again."""
        by_number = self.runtime.counts()
        return {
            name: by_number[number]
            for name, number in self._numbers.items()
            if number < len(by_number) and by_number[number]
        }
