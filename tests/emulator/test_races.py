"""A corpus of small programs, each with its race and mended: the detector and the schedules must agree with the truth."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from race_corpus import CORPUS

import npu_emulator
from npu_emulator import schedule

CASES = [
    pytest.param(name, mended, id=f"{name}-{'clean' if mended else 'racy'}") for name in CORPUS for mended in (0, 1)
]


def _result(name: str, *, mended: bool) -> list[list[Any]]:
    outputs = CORPUS[name](mended)
    torch.npu.synchronize()
    return [output.cpu().tolist() for output in outputs]


@pytest.mark.parametrize(("name", "mended"), CASES)
def test_the_detector_knows_the_racy_half_from_the_clean(name: str, mended: bool) -> None:
    """Under plain fifo every racy program is reported, and no mended one."""
    with npu_emulator.detect_races() as races:
        _result(name, mended=mended)
    assert bool(races) != bool(mended), "\n".join(map(str, races)) or "no race was found"


@pytest.mark.parametrize(("name", "mended"), CASES)
def test_results_depend_on_the_schedule_exactly_when_there_is_a_race(name: str, mended: bool) -> None:
    """A mended program gives the same bits under every schedule; a racy one differs under at least one."""
    expected = _result(name, mended=True)
    schedules = ["fifo", "lazy", *(f"random:{seed}" for seed in range(12)), *(f"pct:{seed}:3" for seed in range(12))]
    differ = []
    for text in schedules:
        with schedule(text):
            if _result(name, mended=mended) != expected:
                differ.append(text)
    assert bool(differ) != bool(mended), differ
    if differ:
        with schedule(differ[0]):
            assert _result(name, mended=mended) != expected, "the schedule string did not replay its run"


def test_every_order_of_a_small_program() -> None:
    """Exhaustion meets both outcomes of a race, and each string replays its own."""
    outcomes = dict(npu_emulator.every_order(lambda: _result("write_then_write", mended=False)))
    assert len({str(result) for result in outcomes.values()}) > 1
    for text, result in outcomes.items():
        with schedule(text):
            assert _result("write_then_write", mended=False) == result
    clean = [result for _, result in npu_emulator.every_order(lambda: _result("write_then_write", mended=True))]
    assert len({str(result) for result in clean}) == 1


def test_a_report_has_both_sides_the_edge_and_the_repair() -> None:
    """The text names both operators with their Python lines, both streams and what to write."""
    with npu_emulator.detect_races() as races:
        _result("write_then_read", mended=False)
    text = str(races[0])
    for part in ("aten.mul_", "aten.add", "test_races.py", "in write_then_read", "missing edge", "wait_event"):
        assert part in text
    with npu_emulator.detect_races() as races:
        _result("memory_reused", mended=False)
    assert any("record_stream" in str(race) for race in races)


def test_stopping_at_the_first_race_points_at_its_line() -> None:
    """With `stop_at_first` the launch that completes a race raises."""
    with pytest.raises(npu_emulator.RaceError, match="missing edge"), npu_emulator.detect_races(stop_at_first=True):
        _result("write_then_read", mended=False)
    assert (torch.ones(2, device="npu") + 1).cpu().tolist() == [2, 2]


def _captured() -> tuple[torch.Tensor, torch.npu.NPUGraph, torch.npu.Stream]:
    x, graph, side = torch.zeros(8, device="npu"), torch.npu.NPUGraph(), torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        _ = x + 1
    torch.npu.synchronize()
    return x, graph, side


def _race(x: torch.Tensor, graph: torch.npu.NPUGraph, side: torch.npu.Stream) -> None:
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.fill_(1.0)
    graph.replay()
    torch.npu.synchronize()


@pytest.mark.parametrize("text", ["fifo", "lazy"])
def test_a_replay_that_completes_a_race_raises_at_its_line(text: str) -> None:
    """A replay launches no kernel of Python's; the error comes in the statement all the same, and not only at the next launch."""
    with schedule(text), npu_emulator.detect_races(stop_at_first=True):
        x, graph, side = _captured()
        graph.replay()
        torch.npu.synchronize()
        with torch.npu.stream(side):
            x.fill_(1.0)
        with pytest.raises(npu_emulator.RaceError, match="missing edge"):
            graph.replay()


def test_a_graph_captured_before_is_told_or_known() -> None:
    """Once, with what to do; inside an outer block its replay's race is found, by the inner one alone."""
    program = _captured()
    with npu_emulator.detect_races() as races, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _race(*program)
        _race(*program)
    assert [str(one.message).partition("Capture it ")[2] for one in told] == ["inside the block"]
    assert not races
    with npu_emulator._captures_noted():
        program = _captured()
        with npu_emulator.detect_races() as races:
            _race(*program)
    (race,) = races
    assert "in a replay of graph" in str(race)


def test_a_graph_without_tasks_is_no_unknown_one() -> None:
    """A capture of views alone touches nothing, so there is nothing to know of it."""
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    with npu_emulator.detect_races() as races, warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.npu.graph(graph):
            x.view(2, 2)
        graph.replay()
        torch.npu.synchronize()
    assert not races


def _here() -> str:
    """The line of the caller, as a race names it."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _copies(x: torch.Tensor, y: torch.Tensor, host: torch.Tensor) -> Iterator[str]:
    """Copies and fills of 32 bytes of `x`, by the runtime's functions and by torch; yields the line of each."""
    runtime, stream = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    at, other, size = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_uint64(32)
    yield (runtime.aclrtMemsetAsync(at, size, 0, size, stream), _here())[1]
    yield (runtime.aclrtMemcpyAsync(at, size, other, size, 3, stream), _here())[1]
    yield (x.zero_(), _here())[1]
    yield (x.copy_(host, non_blocking=True), _here())[1]
    yield (x.copy_(y), _here())[1]


def _memory() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.ones(8, device="npu"), torch.ones(8, device="npu"), torch.ones(8).pin_memory()
    torch.npu.synchronize()
    return made


@pytest.mark.parametrize("replayed", [False, True])
def test_each_copy_and_fill_has_the_line_that_launched_it(replayed: bool) -> None:
    """Eager or in a replay, however many others the log has before it is read: the line of its own call, and of no other."""
    x, y, host = _memory()
    graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with npu_emulator.detect_races() as races:
        if replayed:
            with torch.npu.graph(graph):
                lines = list(_copies(x, y, host))
        with torch.npu.stream(side):
            x.mul_(3)
        if replayed:
            graph.replay()
        else:
            lines = list(_copies(x, y, host))
        torch.npu.synchronize()
    assert [race.second.frames[0] for race in races] == lines
    assert [race.second.name.split()[0] for race in races] == [
        "memset", "memcpy", "aten.zero_.default", "aten.copy_.default", "aten.copy_.default",
    ]  # fmt: skip
    assert all(earlier != later for earlier, later in pairwise(lines))


def test_the_input_of_a_compiled_call_has_the_line_of_the_call() -> None:
    """The runtime copies it into the captured graph's memory, without an operator of torch."""
    compiled, x, side = torch.compile(_doubled, backend="npugraph_ex"), torch.ones(8, device="npu"), torch.npu.Stream()
    with npu_emulator.detect_races() as races:
        compiled(x)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.mul_(3)
        _, line = compiled(x), _here()
        torch.npu.synchronize()
    (race,) = races
    assert race.second.name == "memcpy"
    assert race.second.frames[1] == line


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1
