"""One random program on the emulated device, and all that the device tells of it, against a small model of both.

The program launches kernels on several streams, which wait for each other, or do not where they should; memory is read that
nobody wrote; all of it runs eagerly or is captured and replayed. What runs eagerly also copies from the host, lends memory to
other streams, and has external events. The model knows which kernels are ordered, so it says what
the values are, where the races are, which memory is unwritten, when each kernel begins on the modelled clock, and in which
order the log may have them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import npu_emulator
from npu_emulator.chips import CHIPS
from npu_emulator.clock.picture import picture
from npu_emulator.clock.summary import summarise
from npugraph_ex.testing.generator.choices import Choices, Sampled

_SCHEDULES = ("fifo", "lazy", "random:1", "random:2", "pct:1:3")
_FORGETS, _FORGOTTEN, _UNWRITTEN, _CAPTURED, _ALL_ORDERS, _FREED, _EARLY = 50, 30, 12, 50, 40, 60, 50
"""Chances in percent: that a program forgets waits; that such a one forgets a wait; that a cell is not written at first; that the
program is captured; that every order of one that runs eagerly is tried; that a captured one loses a cell before its last replay;
that another graph is captured after it, whose result is read before its replay."""
_GATED, _LENT, _POLLED = 20, 15, 15
"""And in one that runs eagerly: that a wait is one for an external event; that a block is lent after a kernel; that it asks."""
_MOST_QUERIES = 1000
_UPLOADED = 3.0
_REPLAYS = 2
_MOST_ORDERS = 60
_CLOSE = 1e-6
"""Microseconds, of rounding."""
_DRAWN, _MARKED, _LEAST_MARKS = 0.0002, 0.01, 2
"""Percent of a chart's width, by which a box and a mark of the axis may be off; the least number of marks."""


@dataclass(frozen=True)
class _LaunchStep:
    """A kernel on a stream, or a stream that waits for another, or memory that is lent to a stream and freed.

    Attributes:
        stream: which.
        what: add, copy, zero, mm, or upload, after which the host has waited for the stream; empty for a wait; gate for a wait
            that is launched before the record for which it waits; poll, where the host asks until the stream is done; lend.
        target: the written cell, or the stream that is waited for.
        sources: the cells that are read besides.
    """

    stream: int
    what: str
    target: int
    sources: tuple[int, ...] = ()

    @property
    def is_kernel(self) -> bool:
        return self.what not in {"", "gate", "poll", "lend"}

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.target, *self.sources) if self.what == "add" else self.sources

    def run(self, cells: list[torch.Tensor]) -> None:
        target, sources = cells[self.target], [cells[source] for source in self.sources]
        match self.what:
            case "add":
                target.add_(sources[0])
            case "copy":
                target.copy_(sources[0])
            case "zero":
                target.zero_()
            case "mm":
                torch.mm(*sources, out=target)
            case "upload":
                target.copy_(torch.full(target.shape, _UPLOADED))

    def order(self, streams: list[Any], gate: Any) -> None:
        """Launch what is no kernel; `gate` is an external event that is not set."""
        stream = streams[self.stream]
        match self.what:
            case "":
                stream.wait_stream(streams[self.target])
            case "gate":
                gate.wait(stream)
                gate.reset(stream)
                gate.record(streams[self.target])
            case "poll":
                event = stream.record_event()
                for _ in range(_MOST_QUERIES):
                    if event.query():
                        return
                raise TimeoutError(f"an event is not complete after {_MOST_QUERIES} queries")
            case "lend":
                torch.empty(1, device="npu").record_stream(stream)
                torch.empty(1, device="npu")  # here the allocator asks whether the stream is done with the block


@dataclass(frozen=True)
class _DeviceProgram:
    """Steps over square cells of one size.

    Attributes:
        size: rows, and columns, of each cell.
        unwritten: the cells that have no value at first.
    """

    steps: tuple[_LaunchStep, ...]
    size: int
    streams: int
    cells: int
    unwritten: frozenset[int]

    @property
    def kernels(self) -> list[_LaunchStep]:
        return [step for step in self.steps if step.is_kernel]

    def made(self, device: str) -> list[torch.Tensor]:
        """The cells. Their values are small, so that float32 holds all that the program computes."""
        shape = self.size, self.size
        return [
            torch.empty(shape, device=device) if cell in self.unwritten else torch.full(shape, cell % 2 + 1.0, device=device)
            for cell in range(self.cells)
        ]  # fmt: skip

    def launch(self, cells: list[torch.Tensor], streams: list[Any]) -> None:
        for number, step in enumerate(self.steps):
            if not step.is_kernel:
                step.order(streams, _gates()[number])
                continue
            with torch.npu.stream(streams[step.stream]):
                step.run(cells)


@dataclass
class _OrderModel:
    """What is true of a program: which kernels come before each kernel, and what nobody has written."""

    before: list[frozenset[int]] = field(default_factory=list)
    racy: bool = False
    unwritten_reads: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, program: _DeviceProgram, runs: int = 1) -> _OrderModel:
        model, unwritten = cls(), set(program.unwritten)
        seen: list[frozenset[int]] = [frozenset()] * program.streams
        host: frozenset[int] = frozenset()
        kernels = program.kernels
        for step in program.steps:
            if step.what == "lend":
                continue
            if step.what == "poll":
                host |= seen[step.stream]
                continue
            if not step.is_kernel:
                seen[step.stream] |= seen[step.target]
                continue
            number = len(model.before)
            seen[step.stream] |= host
            conflicts = {at for at, other in enumerate(kernels[:number]) if _conflict(step, other)}
            model.racy |= not conflicts <= seen[step.stream]
            model.before.append(seen[step.stream])
            seen[step.stream] |= {number}
            if step.what == "upload":
                host |= seen[step.stream]
        for step in kernels * runs:
            if step.what == "copy" and step.sources[0] in unwritten:
                unwritten.add(step.target)
                continue
            if unwritten.intersection(step.reads):
                model.unwritten_reads.add(step.what)
            unwritten.discard(step.target)
        return model


def _conflict(step: _LaunchStep, other: _LaunchStep) -> bool:
    return step.target in {other.target, *other.reads} or other.target in step.reads


def _drawn(choices: Choices, *, captured: bool) -> _DeviceProgram:
    """A program that begins on stream 0, forks, and joins there; waits that its kernels need may be forgotten."""
    streams, cells = choices.number(1, 3), choices.number(3, 5)
    steps = [_LaunchStep(stream, "", 0) for stream in range(1, streams)]
    forgetful = choices.chance(_FORGETS)
    for _ in range(choices.number(1, 9)):
        what = choices.pick(("add", "copy", "add", "zero", "mm", *(() if captured else ("upload",))))
        target, first, second = choices.order(range(cells))[:3]
        sources = {"zero": (), "upload": (), "mm": (first, second)}.get(what, (first,))
        step = _LaunchStep(choices.number(0, streams - 1), what, target, sources)
        others = {one.stream for one in steps if one.is_kernel and one.stream != step.stream and _conflict(step, one)}
        steps += [
            _LaunchStep(step.stream, "gate" if not captured and choices.chance(_GATED) else "", other)
            for other in sorted(others)
            if not (forgetful and choices.chance(_FORGOTTEN))
        ]
        steps.append(step)
        if not captured and choices.chance(_LENT):
            steps.append(_LaunchStep(step.stream, "lend", 0))
        if not captured and choices.chance(_POLLED):
            steps.append(_LaunchStep(choices.number(0, streams - 1), "poll", 0))
    steps += [_LaunchStep(0, "", stream) for stream in range(1, streams)]
    unwritten = frozenset(cell for cell in range(cells) if choices.chance(_UNWRITTEN))
    return _DeviceProgram(tuple(steps), choices.pick((1, 8, 64)), streams, cells, unwritten)


@cache
def _streams() -> list[Any]:
    """One on which graphs are captured, and others, for all examples: of many streams some are the same in torch_npu."""
    return [torch.npu.Stream() for _ in range(3)]


@cache
def _gates() -> list[Any]:
    """External events, more than a program has steps, that live on: the beginning and the end of one may wait for the device."""
    return [torch.npu.ExternalEvent() for _ in range(64)]


def device_program_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    choices = Choices(Sampled(f"device program {seed}"))
    order, captured = choices.pick(_SCHEDULES), choices.chance(_CAPTURED)
    program = _drawn(choices, captured=captured)
    try:
        wrong = _observed(choices, program, order, captured=captured)
        if not wrong and not captured and choices.chance(_ALL_ORDERS):
            wrong = _in_every_order(program)
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the device raise is what was found
        wrong = f"raised {type(error).__name__}: {error}"
    return f"{wrong}\n{program} under {order}{', captured' if captured else ''}" if wrong else ""


def _observed(choices: Choices, program: _DeviceProgram, order: str, *, captured: bool) -> str:
    """Run it with every observer at once."""
    runs = _REPLAYS if captured else 1
    model = _OrderModel.of(program, runs)
    streams = [torch.npu.current_stream(), *_streams()[1:]]
    with ExitStack() as block:
        block.enter_context(npu_emulator.schedule(order))
        memory = block.enter_context(npu_emulator.check_memory())
        cells, graph = program.made("npu"), torch.npu.NPUGraph()
        _gates()
        torch.npu.synchronize()
        races = block.enter_context(npu_emulator.detect_races())
        log = block.enter_context(npu_emulator.kernel_log())
        timeline = block.enter_context(npu_emulator.timeline())
        if captured:
            with torch.npu.graph(graph, stream=_streams()[0]):
                program.launch(cells, _streams())
            for _ in range(runs):
                graph.replay()
        else:
            program.launch(cells, streams)
        torch.npu.synchronize()
        timeline.refresh()
        wrong = _wrong_log(log, program, model, runs) or _wrong_clock(timeline, program, runs)
        faults, values = list(memory), [cell.cpu() for cell in cells]
        if captured and choices.chance(_FREED) and not wrong and not faults:
            lost = choices.pick(program.kernels).target
            cells[lost] = torch.zeros(1, device="npu")
            graph.replay()
            torch.npu.synchronize()
            wrong = "" if memory else f"nothing is said of cell {lost}, which is freed before a replay"
        if captured and choices.chance(_EARLY) and not wrong:
            wrong = _read_early(cells[choices.number(0, program.cells - 1)], graph if choices.chance(50) else None)
    if wrong or model.racy != bool(races):
        return wrong or f"races {races} of a program with {'some' if model.racy else 'none'}"
    if model.racy:
        return ""
    if {_plain(fault.operator) for fault in faults} != model.unwritten_reads or not all(map(str, faults)):
        return f"{sorted(model.unwritten_reads)} read unwritten memory, and this was found: {list(map(str, faults))}"
    return _wrong_values(program, values, runs)


def _read_early(cell: torch.Tensor, shared: Any) -> str:
    """The result of a capture has no value before the first replay, and has one after it; the pool may be a graph's that ran."""
    graph = torch.npu.NPUGraph()
    with npu_emulator.check_memory() as faults:
        cell = torch.ones_like(cell)
        with torch.npu.graph(graph, stream=_streams()[0], pool=shared.pool() if shared is not None else None):
            result = cell + 1
        result.cpu()
        early = len(faults)
        graph.replay()
        right = bool((result.cpu() == 2.0).all())
    if early == 1 == len(faults) and right:
        return ""
    return (
        f"the result of a capture, read before and after its first replay, gives {list(map(str, faults))} and {result}"
    )


def _plain(operator: str) -> str:
    return operator.split(".")[1].removesuffix("_")


def _wrong_values(program: _DeviceProgram, values: list[torch.Tensor], runs: int) -> str:
    if program.unwritten:
        return ""
    wanted = program.made("cpu")
    for step in program.kernels * runs:
        step.run(wanted)
    right = all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(values, wanted, strict=True))
    return "" if right else f"values {values} instead of {wanted}"


def _wrong_log(log: Any, program: _DeviceProgram, model: _OrderModel, runs: int) -> str:
    """Every run has every kernel once, after those that come before it."""
    ran, kernels = list(log), program.kernels
    if len(ran) != len(kernels) * runs or len(log.of("aten.add_*")) != runs * sum(
        step.what == "add" for step in kernels
    ):
        return f"the log has {len(ran)} kernels: {list(map(str, ran))}"
    first = min((one.launch for one in ran), default=0)
    for run in range(runs):
        own = ran[run * len(kernels) : (run + 1) * len(kernels)]
        done: set[int] = set()
        for one in own:
            number = one.launch - first
            step = kernels[number]
            sides = [len(side) for side in (one.reads, one.writes)]
            name, replays = "copy" if step.what == "upload" else step.what, {None, run + 1}
            if _plain(one.name) != name or sides != [len(step.reads), 1] or one.replay not in replays:
                return f"kernel {number} of run {run} is in the log as {one}"
            if not model.before[number] <= done:
                return f"kernel {number} of run {run} ran before others that it waits for: {list(map(str, own))}"
            done.add(number)
    return ""


def _wrong_clock(timeline: Any, program: _DeviceProgram, runs: int) -> str:
    """Each kernel begins when its stream has reached it, and takes as long as the chip's figures say.

    The clock lets no stream wait for a record that is launched later, and knows no host that polls.
    """
    if any(step.what in {"gate", "poll"} for step in program.steps):
        return ""
    wanted: list[tuple[float, float]] = []
    now = host = 0.0
    for _ in range(runs):
        ends = [now] * program.streams
        for step in program.steps:
            if step.is_kernel:
                wanted.append((max(ends[step.stream], host), _microseconds(step, program.size)))
                ends[step.stream] = sum(wanted[-1])
                host = ends[step.stream] if step.what == "upload" else host
            elif not step.what:
                ends[step.stream] = max(ends[step.stream], ends[step.target])
        now = max(ends)
    spans, path = timeline.spans, timeline.critical_path
    found = [(span.start, span.duration) for span in spans]
    if len(found) != len(wanted) or any(
        abs(a - b) > _CLOSE for pair in zip(found, wanted, strict=True) for a, b in zip(*pair, strict=True)
    ):
        return f"the clock says {found} instead of {wanted}"
    late = [
        abs(one.start - before)
        for one, before in zip(path, [0.0, *(span.start + span.duration for span in path)], strict=False)
    ]
    if max(late, default=0) > _CLOSE or abs(timeline.end - now) > _CLOSE:
        return f"the critical path of {now} is {path}"
    return _wrong_figures(timeline, wanted) or _wrong_chart(timeline) or _wrong_file(timeline, wanted)


def _wrong_figures(timeline: Any, wanted: list[tuple[float, float]]) -> str:
    """Where some work runs, how much there is, and how idle each stream is, counted between the moments where anything changes."""
    moments = sorted({moment for start, length in wanted for moment in (start, start + length)})
    pieces = list(pairwise(moments))

    def covered(spans: Iterable[tuple[float, float]]) -> float:
        some = [*spans]
        return sum(
            end - begin for begin, end in pieces if any(at <= begin and end <= at + length for at, length in some)
        )

    found = summarise(timeline)
    if (
        abs(found.whole.busy - covered(wanted)) > _CLOSE
        or abs(found.whole.serial - sum(length for _, length in wanted)) > _CLOSE
    ):
        return f"of {wanted} the figures are {found.whole}"
    for lane in found.lanes:
        busy = covered((span.start, span.duration) for span in lane.spans)
        if abs(lane.idle * (moments[-1] - moments[0]) + busy - (moments[-1] - moments[0])) > _CLOSE:
            return f"{lane.name} is idle for {lane.idle} of the time: {wanted}"
    said = str(found)
    lines = [f"{found.whole.busy:.1f} modelled us", *(f"idle {lane.idle:.0%}" for lane in found.lanes)]
    return "" if all(line in said for line in lines) else f"of {lines} some are missing in {said}"


def _wrong_chart(timeline: Any) -> str:
    """Each box lies where its kernel does, each mark of the axis at its round time, and each event ends at a dot."""
    page, spans = picture(timeline, title="one"), timeline.spans
    begin, length = min(span.start for span in spans), max(span.start + span.duration for span in spans)
    length -= begin
    boxes = re.findall(r'<i[^>]* style="left:([\d.]+)%;width:([\d.]+)%" title="([^"\n]+)', page)
    of_lanes = [span for lane in dict.fromkeys(span.stream for span in spans) for span in spans if span.stream == lane]
    wanted = [(100 * (span.start - begin) / length, 100 * span.duration / length, span.name) for span in of_lanes]
    if [name for *_, name in boxes] != [name for *_, name in wanted] or any(
        max(abs(float(at) - left), abs(float(wide) - width)) > _DRAWN
        for (at, wide, _), (left, width, _) in zip(boxes, wanted, strict=True)
    ):
        return f"the chart has {boxes} instead of {wanted}"
    axis = [(float(at), float(time)) for at, time in re.findall(r'<span style="left:([\d.]+)%">([\d.e+-]+) µs<', page)]
    steps = {f"{(b - a):.3e}"[0] for (_, a), (_, b) in pairwise(axis)}
    if (
        len(axis) < _LEAST_MARKS
        or not steps <= set("125")
        or any(abs(at - 100 * (time - begin) / length) > _MARKED for at, time in axis)
    ):
        return f"the axis from {begin} for {length} is {axis}"
    lanes = {span.stream for span in spans}
    arrows = [arrow for arrow in timeline.arrows if {arrow.source[0], arrow.target[0]} <= lanes]
    heads = [float(at) for at in re.findall(r'<b style="left:([\d.]+)%', page)]
    curves = re.findall(r'<path d="M([\d.]+) [\d.-]+C[^"]* ([\d.]+) [\d.-]+"', page)
    drawn = [(float(start), float(end), at) for (start, end), at in zip(curves, heads, strict=False)]
    places = [[100 * (time - begin) / length for _, time in (arrow.source, arrow.target)] for arrow in arrows]
    right = len(curves) == len(heads) == len(arrows) and all(
        max(abs(start - 10 * source), abs(end - 10 * target)) < 10 * _MARKED and abs(at - target) < _MARKED
        for (start, end, at), (source, target) in zip(drawn, places, strict=True)
    )
    return "" if right else f"of the events {arrows} {drawn} are drawn"


def _microseconds(step: _LaunchStep, size: int) -> float:
    """Of a float32 kernel on the whole chip."""
    chip, bytes_ = CHIPS[npu_emulator.current().settings.soc], 4 * size * size
    moved = bytes_ * (len(step.reads) + 1) / chip.bandwidth
    computed = 2 * size**3 / (chip.half_flops / 4) if step.what == "mm" else bytes_ / chip.vector_bytes
    return 2 + 1e6 * max(moved, computed)


def _wrong_file(timeline: Any, wanted: list[tuple[float, float]]) -> str:
    """The saved trace has the same kernels; two ranks without a collective keep their times."""
    with TemporaryDirectory() as folder:
        file = timeline.save(Path(folder) / "one.json")
        other = timeline.save(Path(folder) / "other.json")
        both = npu_emulator.merge_timelines([file, other], Path(folder) / "both.json")
        rows, of_both = (json.loads(path.read_text())["traceEvents"] for path in (file, both))
    spans = [row for row in rows if row["ph"] == "X"]
    places = sorted((row["pid"], row["ts"], row["dur"]) for row in of_both if row["ph"] == "X")
    if places != sorted((rank, row["ts"], row["dur"]) for rank in (0, 1) for row in spans):
        return f"two ranks of {rows} are {of_both}"
    close = all(
        abs(row["ts"] - start) < 0.001 and abs(row["dur"] - duration) < 0.002
        for row, (start, duration) in zip(spans, wanted, strict=True)
    )
    return "" if close else f"the file has {spans} instead of {wanted}"


def _in_every_order(program: _DeviceProgram) -> str:
    """Some order shows a race, or the detector does; without one all orders give the same."""
    model, results = _OrderModel.of(program), dict[str, list[torch.Tensor]]()

    def run() -> list[torch.Tensor]:
        cells = program.made("npu")
        program.launch(cells, [torch.npu.current_stream(), *_streams()[1:]])
        torch.npu.synchronize()
        return [cell.cpu() for cell in cells]

    try:
        for order, values in npu_emulator.every_order(run, limit=_MOST_ORDERS):
            if order in results:
                return f"{order} comes twice"
            results[order] = values
    except npu_emulator.RaceError:
        return "" if model.racy else f"a race in a program without one, in {len(results)} orders"
    except npu_emulator.EmulatorError as error:
        return "" if len(results) == _MOST_ORDERS else f"every order: {error}"
    if model.racy:
        first = next(iter(results.values()))
        return (
            ""
            if any(not torch.equal(*pair) for values in results.values() for pair in zip(values, first, strict=True))
            else "no race in any order"
        )
    return next((wrong for values in results.values() if (wrong := _wrong_values(program, values, 1))), "")
