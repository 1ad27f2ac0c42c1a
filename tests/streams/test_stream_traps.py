"""Every way in which streams are known to go wrong inside compiled code, each as a program that must come out right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from stream_programs import Tagged, check, compiled, plain, vector
from torch import fx

import npu_emulator
import npugraph_ex
from npugraph_ex import ops, scope
from npugraph_ex.aclgraph import side_streams
from npugraph_ex.errors import ScopeError
from npugraph_ex.streams.findings import Code

_written: list[torch.Tensor] = []
_library = torch.library.Library("nge_stream_test", "DEF")
_library.define("note(Tensor x) -> ()")
_library.define("noted(Tensor like) -> Tensor")
torch.library.register_fake("nge_stream_test::note", lambda _: None, lib=_library)
torch.library.register_fake("nge_stream_test::noted", torch.empty_like, lib=_library)


@torch.library.impl(_library, "note", "PrivateUse1")
def _note(x: torch.Tensor) -> None:
    """Write to device memory that no argument names."""
    _written[0].copy_(x)


@torch.library.impl(_library, "noted", "PrivateUse1")
def _noted(like: torch.Tensor) -> torch.Tensor:
    """Read it."""
    return _written[0] + 0


note, noted = torch.ops.nge_stream_test.note, torch.ops.nge_stream_test.noted
fx.has_side_effect(note.default)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Inference, and nothing captured is left to the next test."""
    with torch.no_grad():
        yield
    torch._dynamo.reset()
    gc.collect()


def on_side(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compute a function on a side stream that starts after what is before it, and wait for it."""
    start, end = ops.npu_create_tagged_event("start"), ops.npu_create_tagged_event("end")

    def run(x: torch.Tensor) -> torch.Tensor:
        ops.npu_tagged_event_record(start)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(start)
            y = function(x)
            ops.npu_tagged_event_record(end)
        ops.npu_tagged_event_wait(end)
        return y

    return run


def test_a_write_back_comes_after_every_stream() -> None:
    """pytorch#197416: an input that one stream mutates and another still reads is written when both are through."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("reader"):
            y = x * 2
        with scope.npu_stream_switch("writer"):
            x.add_(1)
        return y

    def eager(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        x.add_(1)
        return y

    check(compiled(function), eager, (vector(1, 2),), (vector(5, 6),))
    check(compiled(function, force_eager=True), eager, (vector(1, 2),))


def test_a_wait_without_tensors_stays_where_it_is() -> None:
    """pytorch#185546: `wait_stream` orders memory that no tensor names, so nothing may move it, or move across it."""
    _written[:] = [torch.zeros(2, device="npu")]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        side = torch.npu.Stream()
        note(x)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = noted(x)
        torch.npu.current_stream().wait_stream(side)
        note(x * 10)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            z = noted(x)
        return y, z

    check(compiled(function), lambda x: (x, x * 10), (vector(1, 2),), (vector(3, 4),))


def test_a_fused_operator_stays_on_its_stream() -> None:
    """pytorch#189095: what replaces operators of a stream runs there, and waits for what they waited for."""
    halves = {"device": "npu", "dtype": torch.float16}

    def norm(x: torch.Tensor) -> torch.Tensor:
        y, _, _ = torch_npu.npu_add_rms_norm(x, x, torch.ones(32, **halves))
        return torch_npu.npu_dynamic_quant(y)[0]

    side = on_side(norm)
    fast = compiled(lambda x: side(x * 2))
    x = torch.randn(4, 32, **halves)
    expected = norm(x * 2).cpu().int()
    with npu_emulator.timeline() as clock:
        assert (fast(x).cpu().int() - expected).abs().max() <= 1  # fused, it rounds once less
    with npu_emulator.schedule("lazy"), npu_emulator.detect_races() as races:
        assert (fast(x).cpu().int() - expected).abs().max() <= 1
    assert not races
    report = npugraph_ex.last_report()
    assert report is not None
    assert report.fusions("add_rms_norm_dynamic_quant") == 1
    streams = {span.stream for span in clock.spans if "dynamic_quant" in span.name}
    assert streams.isdisjoint({span.stream for span in clock.spans if "mul" in span.name})


def test_nothing_is_fused_across_streams() -> None:
    """Two operators of a default rule on two streams stay two, and the report says why."""
    halves = {"device": "npu", "dtype": torch.float16}
    done = ops.npu_create_tagged_event("normed")

    def function(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        y, _, _ = torch_npu.npu_add_rms_norm(x, x, gamma)
        ops.npu_tagged_event_record(done)
        with scope.npu_stream_switch("quant"):
            ops.npu_tagged_event_wait(done)
            return torch_npu.npu_dynamic_quant(y)[0]

    x, gamma = torch.randn(4, 32, **halves), torch.ones(32, **halves)
    fast, expected = compiled(function), function(x, gamma).cpu()
    with npu_emulator.schedule("lazy"), npu_emulator.detect_races() as races:
        assert torch.equal(fast(x, gamma).cpu(), expected)
    assert not races
    report = npugraph_ex.last_report()
    assert report is not None
    assert report.fusions() == 0
    assert "stream_label" in report.near_misses("add_rms_norm_dynamic_quant")[0].reason


ALLOCATING = [{"inplace_pass": False}, {"inplace_pass": False, "force_eager": True}]
"""Reinplacing would hide what a stream that goes on allocating does."""


@pytest.mark.parametrize("options", ALLOCATING)
def test_memory_is_not_reused_while_another_stream_reads_it(options: dict[str, bool]) -> None:
    """A value that another stream reads last keeps its memory, though its own stream goes on allocating."""
    ready, back = ops.npu_create_tagged_event("ready"), ops.npu_create_tagged_event("back")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        ops.npu_tagged_event_record(ready)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(ready)
            z = y * 2
            w = z * 3
            ops.npu_tagged_event_record(back)
            z2 = z - 1
        a = x - 1  # these would take the memory of y
        b = a * 5
        ops.npu_tagged_event_wait(back)
        c = b + w
        d = c * 2  # and this the memory of w, had the side stream nothing to do any more
        return d, z2

    def eager(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = (x + 1) * 2
        return ((x - 1) * 5 + z * 3) * 2, z - 1

    check(compiled(function, **options), eager, (vector(1, 2),), (vector(5, 7),))


@pytest.mark.parametrize("options", ALLOCATING)
def test_a_side_stream_reuses_memory_only_after_the_main_one(options: dict[str, bool]) -> None:
    """The same the other way round: the main stream reads a side stream's value while that goes on allocating."""
    done = ops.npu_create_tagged_event("done")

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            y = x + 1
            ops.npu_tagged_event_record(done)
        ops.npu_tagged_event_wait(done)
        z = y * 2
        with scope.npu_stream_switch("side"):
            w = (x - 5) * 3 - x
        return z, w

    fast = compiled(function, **options)
    check(fast, lambda x: ((x + 1) * 2, (x - 5) * 3 - x), (vector(1, 2),), (vector(5, 7),))


def test_a_fork_that_nobody_joins_is_joined() -> None:
    """vllm-ascend#13792: a stream whose results nothing waits for does not leave the capture open (error 107025)."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with scope.npu_stream_switch("left alone"):
            y = x * 2
        with scope.npu_stream_switch("dead"):
            x.sin()
        return x + 1, y

    check(compiled(function), lambda x: (x + 1, x * 2), (vector(1, 2),))


def test_a_wait_before_its_record_is_reported() -> None:
    """A wait on an event that nothing recorded waits for nothing; the report says so and the graph runs."""
    event = ops.npu_create_tagged_event("late")

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(event)
            y = x * 2
        ops.npu_tagged_event_record(event)
        return y

    check(compiled(function), lambda x: x * 2, (vector(1, 2),), schedules=("lazy",))
    (finding,) = npugraph_ex.last_report().streams.of(Code.WAIT_WITHOUT_RECORD)
    assert "event 'late'" in finding.message
    assert finding.first.stream == "side"


def test_an_event_recorded_twice_is_reported() -> None:
    """The second record before any wait is reported; the wait is for the second."""
    event = ops.npu_create_tagged_event("twice")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ops.npu_tagged_event_record(event)
        z = y * 2
        ops.npu_tagged_event_record(event)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(event)
            return z * 3

    check(compiled(function), lambda x: (x + 1) * 6, (vector(1, 2),), schedules=("lazy",))
    (finding,) = npugraph_ex.last_report().streams.of(Code.RECORDED_TWICE)
    assert "event 'twice'" in finding.message.lower()


def test_redundant_events_are_dropped_and_counted() -> None:
    """What is ordered anyway is not waited for again, and what nobody awaits not recorded; the report counts both."""
    events = [ops.npu_create_tagged_event(f"e{number}") for number in range(4)]

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ops.npu_tagged_event_record(events[0])
        z = y * 2
        ops.npu_tagged_event_record(events[1])
        ops.npu_tagged_event_record(events[3])  # nobody waits
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(events[0])  # the next says more
            ops.npu_tagged_event_wait(events[1])
            w = z * 3
            ops.npu_tagged_event_wait(events[0])  # known
            v = w - 1
            ops.npu_tagged_event_record(events[2])
        ops.npu_tagged_event_wait(events[2])
        ops.npu_tagged_event_wait(events[2])
        return v + w

    check(compiled(function), lambda x: (x + 1) * 12 - 1, (vector(1, 2),))
    report = npugraph_ex.last_report()
    assert (report.dropped_waits, report.dropped_records) == (3, 2)
    assert "3 waits and 2 records" in report.table()


def test_streams_are_given_back() -> None:
    """vllm-ascend#9564: many captured graphs that come and go leave no stream behind on the device."""
    torch._dynamo.reset()
    gc.collect()  # what earlier tests left goes now and not while this one counts
    before = len(npu_emulator.resources().graphs)

    def compile_and_drop() -> int:
        fast = compiled(Tagged())
        for size in (2, 3, 4):
            fast(torch.ones(size, device="npu"))
        assert len(npu_emulator.resources().graphs) == before + 3
        torch.npu.synchronize()
        del fast
        torch._dynamo.reset()
        gc.collect()
        assert len(npu_emulator.resources().graphs) == before
        return npu_emulator.resources().streams_used

    assert compile_and_drop() == compile_and_drop()


def test_tags_of_two_models_never_meet() -> None:
    """Two models with the same tags and event tags run interleaved, each right, on streams of their own."""
    first, second = compiled(Tagged()), torch.compile(Tagged(), backend="npugraph_ex", fullgraph=True)
    x = vector(1, 2)
    with npu_emulator.detect_races() as races, npu_emulator.schedule("lazy"):
        results = [fast(x + number) for number, fast in enumerate((first, second, first, second))]
        for number, got in enumerate(results):
            for have, want in zip(got, plain(x.cpu() + number), strict=True):
                assert torch.equal(have.cpu(), want)
    assert not races


def test_one_tag_for_two_events_of_a_graph_is_refused() -> None:
    """The message names the tag and says what to do."""
    pair = [ops.npu_create_tagged_event("same"), ops.npu_create_tagged_event("same")]

    def function(x: torch.Tensor) -> torch.Tensor:
        for event in pair:
            ops.npu_tagged_event_record(event)
        with scope.npu_stream_switch("side"):
            return x * 2

    with pytest.raises(Exception, match=r"tag 'same'.*give each npu_create_tagged_event of a model a tag of its own"):
        compiled(function)(vector(1))


def test_one_tag_with_two_priorities_is_refused() -> None:
    """One tag is one stream, and a stream has one priority."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side", -1):
            x = x + 1
        with scope.npu_stream_switch("side", 0):
            return x * 2

    with pytest.raises(Exception, match="stream 'side' is given the priorities -1 and 0"):
        compiled(function)(vector(1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: scope.npu_stream_switch(""), "stream_tag takes a str that is not empty; got ''"),
        (lambda: scope.npu_stream_switch("a", "high"), "stream_priority takes an int; got 'high'"),
        (lambda: ops.npu_create_tagged_event(7), "tag takes a str that is not empty; got 7"),
        (lambda: ops.npu_tagged_event_record("66"), "takes an event from npu_create_tagged_event; got '66'"),
        (lambda: ops.npu_tagged_event_wait(None), "takes an event from npu_create_tagged_event; got None"),
        (lambda: ops.npu_record_tagged_stream(vector(1), 3), "takes the tag of a stream, a str; got 3"),
    ],
)
def test_wrong_arguments_are_refused(wrong: Callable[[], Any], message: str) -> None:
    """Each message names the argument, what is allowed and what came."""
    with pytest.raises(ScopeError, match=message):
        wrong()


def test_a_graph_break_in_a_stream_scope() -> None:
    """Without fullgraph the function runs in eager mode, in the order in which it is written; values are right."""
    model = Tagged()

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("a"):
            y = x * 2
            torch._dynamo.graph_break()
            y = y + 1
        return model(y)[0]

    torch._dynamo.reset()
    fast = torch.compile(function, backend="npugraph_ex")
    check(fast, lambda x: plain(x * 2 + 1)[0], (vector(1, 2),))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(function)(vector(1))


def test_limits_and_priorities_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core limit in a stream scope limits that stream and inherits the caller's; a priority is the stream's own."""
    priorities: list[int] = []
    draw = side_streams._draw

    def noting(priority: int, taken: set[Any]) -> torch.npu.Stream:
        priorities.append(priority)
        return draw(priority, taken)

    monkeypatch.setattr(side_streams, "_draw", noting)
    seen: dict[str, tuple[int, int]] = {}
    library = torch.library.Library("nge_stream_look", "DEF")
    library.define("look(Tensor x, str place) -> Tensor")
    torch.library.register_fake("nge_stream_look::look", lambda x, _: torch.empty_like(x), lib=library)

    def note_limits(x: torch.Tensor, place: str) -> torch.Tensor:
        limits = torch.npu.get_stream_limit(torch.npu.current_stream())
        seen[place] = (limits["cube_core_num"], limits["vector_core_num"])
        return x + 1

    library.impl("look", note_limits, "PrivateUse1")
    look = torch.ops.nge_stream_look.look

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side", -1):
            x = look(x, "side")
            with scope.limit_core_num(4, -1):
                x = look(x, "limited")
            y = look(x, "again")
        with scope.limit_core_num(2, 2), scope.npu_stream_switch("other"):
            z = look(x, "around")
        return y, z

    with scope.limit_core_num(-1, 20):
        compiled(function)(vector(1))
    assert priorities == [-1, 0]
    assert seen == {"side": (24, 20), "limited": (4, 20), "again": (24, 20), "around": (2, 2)}
