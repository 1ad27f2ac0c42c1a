"""Streams and events behave as PyTorch documents them, whatever the schedule."""

from __future__ import annotations

import threading

import pytest
import torch

from npu_emulator import detect_races, every_order, schedule, timeline

SCHEDULES = ["fifo", "lazy", "random:1", "random:2", "pct:3:2"]


@pytest.fixture(params=SCHEDULES)
def _scheduled(request: pytest.FixtureRequest) -> object:
    """Run the test under one schedule."""
    with schedule(request.param):
        yield


@pytest.mark.usefixtures("_scheduled")
class TestUnderEverySchedule:
    """What must hold however the device interleaves."""

    def test_a_stream_is_a_queue(self) -> None:
        """Work on one stream happens in launch order."""
        x = torch.ones(4, device="npu")
        for factor in (2, 3, 5):
            x = x * factor + 1
        assert x.cpu().tolist() == [51] * 4

    def test_wait_stream_orders_two_streams(self) -> None:
        """What a side stream computed is there after `wait_stream` both ways."""
        side = torch.npu.Stream()
        x = torch.full((4,), 2.0, device="npu")
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x * 3
        torch.npu.current_stream().wait_stream(side)
        assert (y + 1).cpu().tolist() == [7] * 4

    def test_a_wait_is_for_the_record_before_it(self) -> None:
        """Recording an event again does not move a wait that was issued against the first record."""
        first, second = torch.npu.Stream(), torch.npu.Stream()
        event = torch.npu.Event()
        x = torch.zeros(1, device="npu")
        first.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(first):
            x.add_(1)
            event.record()
        with torch.npu.stream(second):
            event.wait()
            x.mul_(10)
        second_done = second.record_event()
        first.wait_event(second_done)
        with torch.npu.stream(first):
            x.add_(5)
            event.record()
        torch.npu.current_stream().wait_event(event)
        assert x.item() == 15

    def test_waiting_for_an_unrecorded_event_returns_at_once(self) -> None:
        """An event that was never recorded counts as complete."""
        event = torch.npu.Event()
        event.wait()
        assert event.query()
        assert torch.ones(1, device="npu").item() == 1

    def test_queries_become_true(self) -> None:
        """Polling a stream makes progress, so a polling loop ends."""
        side = torch.npu.Stream()
        with torch.npu.stream(side):
            torch.ones(2, device="npu").add_(1)
        assert any(side.query() for _ in range(100))

    @pytest.mark.parametrize("order", ["fifo", "lazy", "random:1", "random:2", "pct:3:2"])
    def test_a_loop_that_queries_an_event_ends(self, order: str) -> None:
        """Also where another stream has work of its own, and the event comes after several kernels."""
        with schedule(order):
            side, x, y = torch.npu.Stream(), torch.zeros(2, device="npu"), torch.zeros(2, device="npu")
            torch.npu.synchronize()
            with torch.npu.stream(side):
                for _ in range(5):
                    x.add_(1)
                event = side.record_event()
            y.add_(2)
            assert any(event.query() for _ in range(100))
            assert (x + y).tolist() == [7, 7]

    def test_elapsed_time_is_a_time(self) -> None:
        """Two timing events that completed give milliseconds that are not negative."""
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        start.record()
        torch.ones(1000, device="npu").exp()
        end.record()
        end.synchronize()
        assert 0 <= start.elapsed_time(end) < 60_000


def test_lazy_runs_nothing_until_something_waits() -> None:
    """Under `lazy` a stream stays busy until it is synchronised."""
    with schedule("lazy"):
        side = torch.npu.Stream()
        with torch.npu.stream(side):
            torch.ones(2, device="npu").add_(1)
            event = side.record_event()
        assert not event.query()
        event.synchronize()
        assert event.query()


def test_threads_may_launch_at_once() -> None:
    """Several Python threads launching and waiting neither deadlock nor mix up values."""
    results: dict[int, float] = {}

    def work(number: int) -> None:
        with torch.npu.stream(torch.npu.Stream()):
            x = torch.full((16,), float(number), device="npu")
            for _ in range(50):
                x = x + 1
            results[number] = x.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=900)
    assert results == {number: 16.0 * (number + 50) for number in range(4)}


def test_schedules_nest() -> None:
    """A block inside another goes back to the schedule around it, and so does a run through every order."""
    x = torch.zeros(1, device="npu")
    torch.npu.synchronize()

    def is_lazy() -> bool:
        side = torch.npu.Stream()
        with torch.npu.stream(side):
            x.add_(1)
            event = side.record_event()
        return not event.query()

    assert not is_lazy()
    with schedule("lazy"):
        assert is_lazy()
        with schedule("fifo"):
            assert not is_lazy()
        assert is_lazy()
        assert len(list(every_order(x.cpu))) == 1
        assert is_lazy()
    assert not is_lazy()


def test_timelines_and_race_checks_may_lie_in_each_other() -> None:
    """Each sees the work of its own block, and none takes another's away: a story of a program that draws its own timeline."""
    x, side = torch.zeros(4, device="npu"), torch.npu.Stream()
    with timeline() as whole:
        x.add_(1)
        with detect_races() as races, timeline() as part, detect_races() as again:
            x.mul_(2)
            with torch.npu.stream(side):
                x.div_(2)
        x.sub_(1)
    torch.npu.synchronize()
    names = ["aten.add_.Tensor", "aten.mul_.Tensor", "aten.div_.Tensor", "aten.sub_.Tensor"]
    assert [span.name for span in whole.spans] == names
    assert [span.name for span in part.spans] == names[1:3]
    assert (len(races), len(again)) == (1, 1)
    with detect_races() as later:
        x.add_(1)
    assert not later
