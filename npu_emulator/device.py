"""The Python interface of the compiled runtime: one object with one method for each C function, without logic.

Why ctypes: the runtime is compiled on the user's machine, which may have a C++ compiler but no `Python.h`. nanobind, pybind11
and the compiled mode of cffi need that header. The other mode of cffi needs the C declarations as a text of their own, which
saves nothing, and gives up the GIL at every call; most calls here keep it, because they never wait.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from npu_emulator.chips import CHIPS, DEFAULT
from npu_emulator.faults import parse_faults
from npu_emulator.measured import read as read_measured
from npu_emulator.meetings import Meetings
from npu_emulator.schedules import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from npu_emulator.faults import Fault
    from npu_emulator.schedules import Schedule
    from npu_emulator.settings import Settings

__all__ = ["QUEUE", "RUN_NOW", "GraphCost", "Note", "NoteKind", "Resources", "Runtime"]

RUN_NOW, QUEUE, SKIP = 0, 1, 2
"""The results of `Runtime.begin`: run the kernel now, queue it, or run nothing (null kernels)."""

_CUBE_CORE, _VECTOR_CORE = 0, 1  # ACL_RT_DEV_RES_CUBE_CORE, ACL_RT_DEV_RES_VECTOR_CORE


class GraphCost(NamedTuple):
    """The resources of one captured graph during its life."""

    id: int
    streams: int
    events: int
    """Events recorded inside it."""
    kernels: int
    other_tasks: int
    """Records, waits, copies and host functions."""
    pool_bytes: int
    """Device memory that its capture added to its pool; 0 if a shared pool had enough."""
    alive: int
    """Whether it still has them."""


class Resources(NamedTuple):
    """The limited resources of the device."""

    streams_used: int
    streams: int
    events_used: int
    events: int
    captured: tuple[GraphCost, ...]
    """Every graph captured so far, oldest first."""

    @property
    def graphs(self) -> tuple[GraphCost, ...]:
        """The graphs that are alive, oldest first."""
        return tuple(graph for graph in self.captured if graph.alive)

    def room_for(self, graph: GraphCost) -> int:
        """Return how many more graphs like this one fit before error 207008."""
        return (self.streams - self.streams_used) // graph.streams

    def takes(self, graph: GraphCost) -> int:
        """Return how many graphs like this one, and no others, the device takes before error 207008."""
        others = self.streams_used - sum(captured.streams for captured in self.graphs)
        return (self.streams - others) // graph.streams


class NoteKind(IntEnum):
    """The kind of a line of the log."""

    KERNEL = 0
    COPY = 1
    FILL = 2
    RECORD = 3
    WAIT = 4
    REPLAY = 5
    SYNC_STREAM = 6
    SYNC_DEVICE = 7
    SYNC_TICKET = 8
    COLLECTIVE_READ = 9
    COLLECTIVE_WRITE = 10
    RESET = 11
    TICKET_FREE = 12
    ALLOCATED = 13


class Note(NamedTuple):
    """One line of the log; runtime/trace.cpp gives the meaning of the numbers."""

    kind: int
    stream: int
    first: int
    second: int
    third: int
    graph: int
    task: int
    edge: int
    place: int


_NUMBERS = len(Note._fields)


class Exchanged(NamedTuple):
    """The memory of one exchange: what a rank gives to all, or, where `given` is not None, to each in turn."""

    send: int
    """Address."""
    bytes: int
    receive: int
    """Address of what the ranks give, one behind the other."""
    taken: Sequence[int]
    """Bytes from each rank."""
    given: Sequence[int] | None = None
    """Bytes to each rank."""


class Runtime:
    """The loaded runtime library.

    Loaded twice: `_held` keeps Python's GIL (for calls that never wait), `_freed` gives it up (for calls that may).
    """

    def __init__(self, path: Path) -> None:
        """Bind the functions of the library at `path`, which must already be loaded globally."""
        self.folder = path.parent
        self._held = ctypes.PyDLL(str(path))
        self._freed = ctypes.CDLL(str(path))
        self.meetings = Meetings(self._held)
        u64, i32, pointer = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
        self.begin = self._declare("emu_begin", i32, pointer, ctypes.c_uint32)
        self.end = self._declare("emu_end", None)
        self.launch = self._declare("emu_launch", i32, pointer, u64, ctypes.c_uint32)
        self.capture = self._declare("emu_capture", u64, pointer)
        self.may_not_block = self._declare("emu_may_not_block", i32, pointer)
        self.only_others_capture = self._declare("emu_only_others_capture", i32, pointer)
        self.capture_draws = self._declare("emu_capture_draws", None, pointer, ctypes.c_uint32)
        self.null_kernels = self._declare("emu_null_kernels", i32)
        self._collective_name = self._declare("emu_collective_name", ctypes.c_char_p, u64)
        self._exchange = self._declare(
            "emu_exchange", i32, pointer, ctypes.c_char_p, i32, ctypes.c_char_p, pointer, u64, pointer, pointer, pointer
        )
        self.set_null_kernels = self._declare("emu_set_null_kernels", None, i32)
        self.name_op = self._declare("emu_name_op", None, ctypes.c_uint32, ctypes.c_char_p)
        self.name_says_emulated = self._declare("emu_name_says_emulated", None)
        self._describe_failure = self._declare("emu_describe_failure", None, ctypes.c_char_p, ctypes.c_char_p)
        self.set_raise = self._declare("emu_set_raise", None, ctypes.py_object)
        self.raise_later = self._declare("emu_raise_later", None, ctypes.py_object)
        self.guard_reports = self._declare("emu_guard_reports", None)
        self._wait = self._freed.emu_wait
        self._wait.argtypes, self._wait.restype = [pointer, ctypes.c_char_p], i32
        self.is_outside_allocations = self._declare("emu_is_outside_allocations", i32, u64, u64)
        self.note_allocated = self._declare("emu_note_allocated", None, u64, u64)
        self.shadow = self._declare("emu_shadow", u64, i32)
        self.spoil = self._declare("emu_spoil", None, pointer, u64, u64, u64)
        self.note_use = self._declare("emu_note_use", None, pointer, u64, u64)
        self.new_moment = self._declare("emu_new_moment", u64)
        self.replay_moment = self._declare("emu_replay_moment", u64)
        self.stop_poisoning = self._declare("emu_stop_poisoning", None)
        self.spoil_freed = self._declare("emu_spoil_freed", None, u64, u64, u64)
        self.stream_id = self._declare("emu_stream_id", i32, pointer)
        self._frees = u64.in_dll(self._held, "emu_frees")
        self.memcpy = self._declare("aclrtMemcpy", i32, pointer, u64, pointer, u64, i32)
        self.schedule = parse("fifo")
        """The schedule in force; `set_schedule` changes it."""
        self._runner: object = None
        self._seed_giver: object = None
        self._recorder: object = None
        self._watcher: object = None
        self._replay_watcher: object = None
        self._finders: object = None
        self._places = itertools.count(1)
        self._lines: dict[int, tuple[str, ...]] = {}

    def _declare(self, name: str, result: type | None, *arguments: type) -> Callable[..., int]:
        function = getattr(self._held, name)
        function.argtypes, function.restype = list(arguments), result
        return function  # type: ignore[no-any-return]

    def configure(self, settings: Settings) -> None:
        """Set the properties of the device. Devices and memory must be set before torch_npu first reads them."""
        self._held.emu_set_devices(ctypes.c_uint32(settings.devices), settings.soc.encode())
        self._held.emu_set_memory(ctypes.c_uint64(settings.memory_gb << 30))
        self._held.emu_set_budgets(ctypes.c_uint64(settings.streams), ctypes.c_uint64(settings.events))
        self.set_cores(cube=settings.cube_cores, vector=settings.vector_cores)
        self._held.emu_set_l2(ctypes.c_uint64(CHIPS.get(settings.soc, DEFAULT).l2))
        self.set_schedule(parse(settings.schedule))
        self.set_null_kernels(int(settings.null_kernels))
        self.set_faults(parse_faults(settings.faults, settings.devices))
        if settings.as_measured:
            self.set_answers(read_measured(settings.as_measured).codes)

    def set_answers(self, codes: Mapping[str, int]) -> None:
        """Set the codes of decisions as a real device gave them, and no others; see npu_emulator/measured.py."""
        self._held.emu_set_answer(None, 0)
        for decision, code in codes.items():
            self._held.emu_set_answer(decision.encode(), code)

    def set_faults(self, faults: Sequence[Fault]) -> None:
        """Set the faults on purpose, in place of earlier ones; collectives count from now."""
        numbers = (ctypes.c_uint64 * (4 * len(faults)))(*(number for fault in faults for number in fault))
        self._held.emu_set_faults(numbers, ctypes.c_uint64(len(faults)))

    def set_schedule(self, schedule: Schedule) -> None:
        """Set the schedule of queued work; first finish the work in the queue."""
        count = len(schedule.choices)
        choices = (ctypes.c_uint32 * max(count, 1))(*schedule.choices)
        # The call may wait for the lock, so it releases the GIL.
        self._freed.emu_set_schedule(
            schedule.policy, ctypes.c_uint64(schedule.seed), schedule.depth, choices, ctypes.c_uint64(count)
        )
        self.schedule = schedule

    def finish(self) -> None:
        """Finish the work in the queues of all devices, as far as it can run; raise nothing."""
        self._freed.emu_decisions(None, ctypes.c_uint64(0))

    def decisions(self) -> list[tuple[int, int]]:
        """Finish the work in the queue; return (chosen number, number of choices) for each decision of the schedule."""
        self._freed.emu_decisions.restype = ctypes.c_uint64
        count = self._freed.emu_decisions(None, ctypes.c_uint64(0))
        numbers = (ctypes.c_uint32 * (2 * count))()
        self._freed.emu_decisions(numbers, ctypes.c_uint64(count))
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def set_kernel_runner(self, runner: Callable[[int, int | None], int]) -> None:
        """Set the function that runs queued kernel number n and returns an ACL status.

        Its second argument is the address of the replay's seeds, 64 bits for each generator; None outside replays.
        """
        self._runner = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)(runner)
        self._held.emu_set_kernel_runner(self._runner)

    def set_seed_giver(self, giver: Callable[[int, int], None]) -> None:
        """Set the function that writes the seeds of a replay of graph number n to an address at its launch."""
        self._seed_giver = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_void_p)(giver)
        self._held.emu_set_seed_giver(self._seed_giver)

    def set_capture_watcher(self, watcher: Callable[[int], None]) -> None:
        """Set the function that gets the number of a graph with random operators, just before its capture ends."""
        self._watcher = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(watcher)
        self._held.emu_set_capture_watcher(self._watcher)

    def set_replay_watcher(self, watcher: Callable[[], None]) -> None:
        """Set the function that is called after each launch of a replay that is in the log."""
        self._replay_watcher = ctypes.CFUNCTYPE(None)(watcher)
        self._held.emu_set_replay_watcher(self._replay_watcher)

    def set_finders(
        self, line: Callable[[], str], stack: Callable[[], str], frames: Callable[[], tuple[str, ...]]
    ) -> None:
        """Set the functions that name a call's Python line for errors, and its lines for collectives, and for copies in the log."""

        def writer(find: Callable[[], str]) -> Callable[[int, int], None]:
            def write(text: int, capacity: int) -> None:
                found = find().encode()[: capacity - 1]
                ctypes.memmove(text, found + b"\0", len(found) + 1)

            return write

        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)
        place = ctypes.CFUNCTYPE(ctypes.c_uint64)(lambda: self._place_of(frames()))
        self._finders = kind(writer(line)), kind(writer(stack)), place
        self._held.emu_set_finders(*self._finders)
        atexit.register(self._held.emu_set_finders, None, None, None)

    def _place_of(self, lines: tuple[str, ...]) -> int:
        place = next(self._places)
        self._lines[place] = lines
        return place

    def lines_of(self, note: Note) -> tuple[str, ...]:
        """Return the lines of the program that launched the copy or fill of a note, innermost first; none if unknown."""
        return self._lines.get(note.place, ())

    def set_operator_recorder(self, recorder: Callable[[bytes | None], None]) -> None:
        """Set the function that gets the folder for descriptions of operators from now on; None ends the descriptions."""
        self._recorder = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(recorder)
        self._held.emu_set_operator_recorder(self._recorder)

    def describe_failure(self, message: str, advice: str) -> None:
        """Set the text that the next synchronisation reports for the failing kernel, and its advice."""
        self._describe_failure(message.encode(), advice.encode())

    def wait(self, stream: int, decision: str) -> int:
        """Wait until a stream is idle; return the ACL status, which `decision` (of npu_emulator/measured.py) has in a capture."""
        return int(self._wait(stream, decision.encode()))

    def recent_error(self) -> str:
        """Take the text of this thread's most recent error."""
        self._held.aclGetRecentErrMsg.restype = ctypes.c_char_p
        text = self._held.aclGetRecentErrMsg()
        return text.decode() if text else ""

    def arena(self, device: int) -> tuple[int, int]:
        """Return (address, bytes) of a device's memory."""
        base, size = ctypes.c_uint64(), ctypes.c_uint64()
        self._held.emu_arena(ctypes.c_int(device), ctypes.byref(base), ctypes.byref(size))
        return base.value, size.value

    def frees(self) -> int:
        """Return how often device memory was freed."""
        return self._frees.value

    def take_released(self) -> list[int]:
        """Return and remove the numbers of queued kernels that can no longer run."""
        numbers = (ctypes.c_uint64 * 4096)()
        self._held.emu_take_released.restype = ctypes.c_uint64
        count = self._held.emu_take_released(numbers, ctypes.c_uint64(len(numbers)))
        return list(numbers[:count])

    def set_tracing(self, *, on: bool) -> None:
        """Start or stop the log of launches, records, waits and synchronisations; see runtime/trace.cpp."""
        self._held.emu_set_tracing(int(on))
        self._lines.clear()

    def take_notes(self) -> list[Note]:
        """Return the lines of the log and empty it."""
        return self._take(self._held.emu_take_notes)

    def captured(self) -> list[Note]:
        """Return the tasks of all captured graphs as lines of the log, whether or not it was on when they were captured."""
        function = self._held.emu_captured
        function.restype = ctypes.c_uint64
        size = function(None, ctypes.c_uint64(0))
        numbers = (ctypes.c_uint64 * (_NUMBERS * size))()
        count = min(size, function(numbers, ctypes.c_uint64(size)))
        return _notes(numbers, count)

    def collective_name(self, number: int) -> str:
        """Return the name of a collective by its number in a note: `hccl.all_reduce`."""
        name = cast("bytes", self._collective_name(number))
        return f"hccl.{name.decode()}"

    def devices_of(self, number: int) -> tuple[int, ...]:
        """Return the device of each rank that the collective of a note has."""
        devices = (ctypes.c_int32 * (number >> 8 & 0xFFFF))()
        self._held.emu_devices_of(ctypes.c_uint64(number >> 24), devices, ctypes.c_uint64(len(devices)))
        return tuple(devices)

    @staticmethod
    def communicator_of(number: int) -> int:
        """Return the communicator of a note's collective: the same number on each rank, and no other one's on the machine."""
        return number >> 24

    def group(self, name: str, device: int) -> tuple[int, int] | None:
        """Return the rank of a device in the HCCL group of that name and the group's size; None if there is no such group."""
        rank, ranks = ctypes.c_uint32(), ctypes.c_uint32()
        found = self._held.emu_group(name.encode(), device, ctypes.byref(rank), ctypes.byref(ranks))
        return (rank.value, ranks.value) if found else None

    def exchange(self, stream: int, group: str, device: int, what: str, exchanged: Exchanged) -> int:
        """Launch the exchange of an operator that communicates; see runtime/fused.cpp. Returns HCCL's code."""
        ranks = len(exchanged.taken)
        sizes = ctypes.c_uint64 * ranks
        given = None if exchanged.given is None else sizes(*exchanged.given)
        return self._exchange(
            stream,
            group.encode(),
            device,
            what.encode(),
            exchanged.send,
            exchanged.bytes,
            exchanged.receive,
            given,
            sizes(*exchanged.taken),
        )

    def set_logging(self, *, on: bool) -> None:
        """Start or stop the log of kernels that run, which begins empty."""
        self._held.emu_set_logging(int(on))

    def take_ran(self) -> list[Note]:
        """Return the kernels that ran, in order, and empty the log; inside a replay `task` is the replay and `edge` the lane."""
        return self._take(self._held.emu_take_ran)

    @staticmethod
    def _take(function: Any) -> list[Note]:
        function.restype = ctypes.c_uint64
        found: list[Note] = []
        lines = 16  # a launch has one or two; the memory for many would take longer than the rest
        numbers = (ctypes.c_uint64 * (_NUMBERS * lines))()
        while True:
            count = function(numbers, ctypes.c_uint64(lines))
            found += _notes(numbers, count)
            if count < lines:
                return found

    def set_cores(self, *, cube: int, vector: int) -> None:
        """Set a device's number of cores of each kind; core limits must not exceed it."""
        self._held.emu_set_cores(ctypes.c_uint32(cube), ctypes.c_uint32(vector))

    def cores(self, stream: int) -> tuple[int, int]:
        """Return the numbers of cube and vector cores of a stream (a raw handle): its limits, its device's limits, or all cores."""
        found = []
        for kind in (_CUBE_CORE, _VECTOR_CORE):
            limit = ctypes.c_uint32()
            self._held.aclrtGetStreamResLimit(ctypes.c_void_p(stream), ctypes.c_int(kind), ctypes.byref(limit))
            found.append(limit.value)
        return found[0], found[1]

    def resources(self) -> Resources:
        """Return the resources in use and in all."""
        numbers = (ctypes.c_uint64 * 5)()
        self._held.emu_resources(numbers)
        self._held.emu_costs.restype = ctypes.c_uint64
        rows = (ctypes.c_uint64 * (7 * max(numbers[4], 1)))()
        count = self._held.emu_costs(rows, ctypes.c_uint64(numbers[4]))
        captured = (rows[7 * line : 7 * line + 7] for line in range(count))
        costs = tuple(GraphCost(*row) for row in captured)
        return Resources(numbers[0], numbers[1], numbers[2], numbers[3], costs)

    def counts(self) -> list[int]:
        """Return the number of kernels so far, by operator number."""
        self._held.emu_counts.restype = ctypes.c_uint64
        size = self._held.emu_counts(None, ctypes.c_uint64(0))
        numbers = (ctypes.c_uint64 * size)()
        self._held.emu_counts(numbers, ctypes.c_uint64(size))
        return list(numbers)


def _notes(numbers: Any, count: int) -> list[Note]:
    """The first `count` notes in the numbers that the runtime wrote."""
    return [Note(*numbers[_NUMBERS * line : _NUMBERS * (line + 1)]) for line in range(count)]
