"""Ctrl-C while the runtime calls Python: wherever it arrives, every kernel runs, and the program gets what its handler raises."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import npu_emulator
from npu_emulator import host_state, launch, random_seeds


class Stop(Exception):  # noqa: N818 - not an error
    """What the program's own handler raises."""


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stop]]:
    """What the program's handler raised so far, each time another; nothing may be swallowed."""
    raised: list[Stop] = []

    def handler(number: int, frame: FrameType | None) -> None:
        del number, frame
        raised.append(Stop())
        raise raised[-1]

    swallowed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    before = signal.signal(signal.SIGINT, handler)
    yield raised
    signal.signal(signal.SIGINT, before)
    assert not swallowed


def _replays() -> tuple[Callable[[], object], torch.Tensor]:
    """Of a graph of three kernels, one of which draws; and the number that each replay increases by three."""
    total, graph = torch.zeros(4, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        total.add_(1)
        total.add_(torch.rand(4, device="npu").ceil())
        total.add_(1)
    return graph.replay, total


def _caught(call: Callable[[], object]) -> list[Stop]:
    """What a call, or what follows it, raises; a second exception may come while the first one is handled."""
    caught: list[Stop] = []
    try:
        try:
            call()
            torch.npu.synchronize()
        except Stop as stop:
            caught.append(stop)
            torch.npu.synchronize()
    except Stop as stop:
        caught.append(stop)
    return caught


@contextmanager
def _signal_at(code: CodeType, at: Callable[[int], bool], number: int = signal.SIGINT) -> Iterator[list[int]]:
    """Send the signal before those instructions of a function that `at` chooses by their number; how many it has run so far."""
    run = [0]

    def step(frame: FrameType, event: str, value: object) -> Any:
        del value
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            run[0] += 1
            if at(run[0]):
                signal.raise_signal(number)
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield run
    finally:
        sys.settrace(before)


_KERNEL, _SEEDS = launch.Launcher._run_queued.__code__, random_seeds.Draws.reserve.__code__


@pytest.mark.parametrize("order", ["fifo", "lazy"])
@pytest.mark.parametrize("code", [_KERNEL, _SEEDS], ids=["kernel", "seeds"])
def test_at_each_step_of_a_callback(raised: list[Stop], order: str, code: CodeType) -> None:
    """The signal comes before each instruction of a callback in turn, its first and its last included; another comes later."""
    with npu_emulator.schedule(order):
        replay, total = _replays()
        for at in count(1):
            with _signal_at(code, at.__eq__) as run:
                caught = _caught(replay)
            assert total.cpu().tolist() == [3.0 * at] * 4, at
            assert caught == raised[at - 1 :]
            if run[0] < at:
                break
            assert len(caught) == 1, at
        assert at > 20


@pytest.mark.parametrize("order", ["fifo", "lazy"])
@pytest.mark.parametrize("code", [_KERNEL, _SEEDS], ids=["kernel", "seeds"])
def test_before_all_steps_of_all_callbacks(raised: list[Stop], order: str, code: CodeType) -> None:
    """Signals that come before the first is raised are one, as where Python does not look for them."""
    with npu_emulator.schedule(order):
        replay, total = _replays()
        torch.npu.synchronize()
        with _signal_at(code, bool) as run:
            caught = _caught(replay)
        assert run[0] > 20
        assert total.cpu().tolist() == [3.0] * 4
        assert caught == raised
        assert len(caught) == 1


def test_in_another_thread(raised: list[Stop]) -> None:
    """The main thread's handler raises at once; the thread's kernels all run."""
    replay, total = _replays()

    def replays() -> None:
        with _signal_at(_KERNEL, (5).__eq__):
            replay()
            torch.npu.synchronize()

    def runs(thread: threading.Thread) -> None:
        thread.start()
        thread.join()
        del thread  # Python looks for signals no later than here

    thread = threading.Thread(target=replays)
    with pytest.raises(Stop):
        runs(thread)
    thread.join()
    assert total.cpu().tolist() == [3.0] * 4
    assert len(raised) == 1


@pytest.mark.usefixtures("raised")
def test_another_signal_in_a_kernel() -> None:
    """What its handler raised is raised after the replay, and not what SIGINT's handler would raise; all other kernels run."""
    replay, total = _replays()

    def runs() -> None:
        with _signal_at(host_state.HostState.run.__code__, (1).__eq__, signal.SIGUSR1):
            replay()
            torch.npu.synchronize()

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            runs()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert total.cpu().tolist() == [2.0] * 4
