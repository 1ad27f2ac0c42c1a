"""Every way in which streams are known to go wrong inside compiled code, each as a program that must come out right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu
from stream_programs import SCHEDULES, check, compiled, vector
from torch import fx

import npu_emulator
import npugraph_ex
from npugraph_ex import ops, scope
from npugraph_ex.errors import StreamOrderWarning

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


pytestmark = pytest.mark.usefixtures("fresh")


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
    for schedule in SCHEDULES:
        with npu_emulator.schedule(schedule), npu_emulator.detect_races() as races:
            assert (fast(x).cpu().int() - expected).abs().max() <= 1, schedule
        assert not races, schedule
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
    for schedule in SCHEDULES:
        with npu_emulator.schedule(schedule), npu_emulator.detect_races() as races:
            assert torch.equal(fast(x, gamma).cpu(), expected), schedule
        assert not races, schedule
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


def test_a_repair_names_the_call_and_not_the_line() -> None:
    """Of a line with several statements, or a remark, it takes the one call that made the node."""
    ready, done = (ops.npu_create_tagged_event(name) for name in ("ready", "done"))

    def racy(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            y = x * 3; ops.npu_tagged_event_record(ready); z = y + 1  # noqa: E702 # fmt: skip
            ops.npu_tagged_event_wait(done); ops.npu_tagged_event_record(event=done)  # noqa: E702 # fmt: skip
        return y * 2 + z

    with pytest.warns(StreamOrderWarning) as warned:
        torch.compile(racy, backend="npugraph_ex")(torch.ones(4, device="npu"))
    said = "\n".join(str(warning.message) for warning in warned)
    assert "add `ops.npu_tagged_event_wait(ready)` on the main stream" in said
    assert "add `ops.npu_tagged_event_wait(event=done)` on the main stream" in said


@pytest.mark.parametrize(("option", "advice"), [("warn", '"raise" and "repair"'), ("repair", "change the program")])
def test_a_warning_advises_what_the_option_does_not_do_already(option: str, advice: str) -> None:
    """A wait before its record stays wrong under "repair", too, so the advice is another one there."""
    done = ops.npu_create_tagged_event("done")

    def waits_too_early(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        ops.npu_tagged_event_wait(done)
        ops.npu_tagged_event_record(done)
        return y

    with pytest.warns(StreamOrderWarning) as warned:
        torch.compile(waits_too_early, backend="npugraph_ex", options={"stream_check": option})(vector(1, 2))
    (said,) = (str(warning.message) for warning in warned)
    assert "error [wait-without-record]" in said
    assert advice in said.splitlines()[-2]
