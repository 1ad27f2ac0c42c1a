"""Compiled code with streams among eager code with streams: what is ordered before, after and between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_programs import compiled, vector

import npu_emulator
from npugraph_ex_conformance.models.stream_forms import Tagged, native_events, native_wait_stream, plain

SCHEDULES = ("lazy", "random:2")


pytestmark = pytest.mark.usefixtures("fresh")


def twice(program: Callable[[], list[torch.Tensor]], expected: list[list[float]]) -> None:
    """Run a program under two schedules; its tensors have the expected values and nothing races."""
    with npu_emulator.detect_races() as races:  # around the capture too, or replays are not looked into
        program()
        for schedule in SCHEDULES:
            torch.npu.synchronize()
            with npu_emulator.schedule(schedule):
                assert [tensor.cpu().tolist() for tensor in program()] == expected, schedule
    assert not races, races[0]


@pytest.mark.parametrize("compiled_on", ["another stream", "that stream"])
def test_a_users_stream_means_the_same_inside_and_outside(compiled_on: str) -> None:
    """What the user's stream was given before the call comes before it, and what it is given later after it."""
    side = torch.npu.Stream()

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.npu.stream(side):
            return x * 2

    fast, x = compiled(function), torch.zeros(2, device="npu")
    if compiled_on == "that stream":
        with torch.npu.stream(side):
            fast(x)

    def program() -> list[torch.Tensor]:
        x.zero_()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.add_(3)  # no event: it is the same stream
        y = fast(x)
        with torch.npu.stream(side):
            z = y + 1
        torch.npu.current_stream().wait_stream(side)
        return [y, z]

    twice(program, [[6, 6], [7, 7]])


def test_events_that_cross_the_border_of_the_graph() -> None:
    """An event recorded before the call holds inside, and one recorded inside can be awaited after it."""
    side, other = torch.npu.Stream(), torch.npu.Stream()
    before, inside = torch.npu.Event(), torch.npu.Event()

    def function(x: torch.Tensor) -> torch.Tensor:
        before.wait()
        y = x * 2
        inside.record()
        return y

    fast, x = compiled(function), torch.zeros(2, device="npu")

    def program() -> list[torch.Tensor]:
        x.zero_()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.add_(3)
            before.record()
        y = fast(x)
        other.wait_event(inside)
        with torch.npu.stream(other):
            z = y + 1
        torch.npu.current_stream().wait_stream(other)
        return [y, z]

    twice(program, [[6, 6], [7, 7]])


@pytest.mark.parametrize("form", [Tagged(), native_wait_stream], ids=["tagged", "native"])
@pytest.mark.parametrize("options", [{}, {"force_eager": True}], ids=["captured", "force_eager"])
def test_calls_on_the_callers_streams(form: Callable[..., Any], options: dict[str, Any]) -> None:
    """One compiled function called on two streams in turn: each call is ordered with its stream and the call before."""
    fast = compiled(form, **options)
    streams = [torch.npu.Stream(), torch.npu.Stream()]
    x = vector(1, 2)

    def program() -> list[torch.Tensor]:
        results = []
        for stream in streams:
            stream.wait_stream(torch.npu.default_stream())
            with torch.npu.stream(stream):
                y = x * 1
                # What `default_stream` names inside `native_wait_stream` must know of y as well.
                torch.npu.default_stream().wait_stream(stream)
                results.append(fast(y)[0])
            torch.npu.default_stream().wait_stream(stream)
        return results

    twice(program, [plain(x.cpu())[0].tolist()] * 2)


def test_a_held_result_survives_later_calls_on_any_stream() -> None:
    """A result that another stream still reads, and that is held, is not overwritten by the next calls."""
    fast, side, x = compiled(Tagged()), torch.npu.Stream(), vector(1, 2)

    def program() -> list[torch.Tensor]:
        first = fast(x)[0]
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            double = first * 2
        for number in range(3):
            fast(x + number)
        torch.npu.current_stream().wait_stream(side)
        return [first, double]

    want = plain(x.cpu())[0]
    twice(program, [want.tolist(), (want * 2).tolist()])


def test_a_dropped_result_may_be_read_on_with_clone_output() -> None:
    """With `clone_output=True` a result comes from the allocator, and `record_stream` protects it as in eager mode."""
    fast, side, x = compiled(Tagged(), clone_output=True), torch.npu.Stream(), vector(1, 2)

    def program() -> list[torch.Tensor]:
        first = fast(x)[0]
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            double = first * 2
        first.record_stream(side)
        del first
        for number in range(3):
            fast(x + number)
        torch.npu.current_stream().wait_stream(side)
        return [double]

    twice(program, [(plain(x.cpu())[0] * 2).tolist()])


def test_two_streams_that_became_one() -> None:
    """Called on the very stream that it uses as a side stream, the function keeps the order of that one stream."""
    side = torch.npu.Stream()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with torch.npu.stream(side):
            z = x * 2
        y = y.clone()
        torch.npu.current_stream().wait_stream(side)
        return y + z

    fast, x = compiled(function), vector(1, 2)
    fast(x)  # compiled where the two are two

    def program() -> list[torch.Tensor]:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = fast(x)
        torch.npu.current_stream().wait_stream(side)
        return [y]

    twice(program, [[4, 7]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.npu.set_stream, "write `with torch.npu.stream\\(s\\):` instead"),
        (lambda stream: stream.query(), "out of the compiled function"),
    ],
    ids=["set_stream", "query"],
)
def test_what_has_no_meaning_inside_is_refused(wrong: Callable[..., Any], message: str) -> None:
    """Changing the caller's stream for good, and asking on the host whether a stream is done."""
    side = torch.npu.Stream()

    def function(x: torch.Tensor) -> torch.Tensor:
        wrong(side)
        return x + 1

    with pytest.raises(Exception, match=message):
        compiled(function)(vector(1))
    torch.npu.set_stream(torch.npu.default_stream())


@pytest.mark.parametrize("form", [Tagged(), native_events], ids=["tagged", "native"])
def test_training(form: Callable[..., Any]) -> None:
    """The forward graph keeps its streams when gradients are asked for; the backward graph runs after it, in order."""
    x, earlier = vector(1, 2).requires_grad_(), {graph.id for graph in npu_emulator.resources().graphs}
    with torch.enable_grad(), npu_emulator.schedule("lazy"), npu_emulator.detect_races() as races:
        first, second = compiled(form)(x)
        (first.sum() + second.sum()).backward()
        want = plain(x.detach().cpu())
        assert [first.tolist(), second.tolist()] == [tensor.tolist() for tensor in want]
        assert x.grad.tolist() == [8, 8]
    assert not races
    assert {graph.streams for graph in npu_emulator.resources().graphs if graph.id not in earlier} == {3}


GIVEN = torch.npu.Stream()


def made_here(x: torch.Tensor) -> torch.Tensor:
    """A stream that the function makes."""
    return forked_and_joined(x, torch.npu.Stream())


def given(x: torch.Tensor) -> torch.Tensor:
    """A stream of the caller's."""
    return forked_and_joined(x, GIVEN)


def forked_and_joined(x: torch.Tensor, side: torch.npu.Stream) -> torch.Tensor:
    """Work of two streams."""
    y = x + 1
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        z = y * 2
    v = y * 5
    torch.npu.current_stream().wait_stream(side)
    return z + v


@pytest.mark.parametrize("function", [made_here, given])
def test_native_streams_inside_of_the_callers_capture(function: Callable[..., Any]) -> None:
    """A capture of the caller's ends with no stream left in it, as in eager mode; the replay computes with new values."""
    fast, x, graph = compiled(function, force_eager=True), vector(1.0), torch.npu.NPUGraph()
    with torch.no_grad():
        for _ in range(2):
            fast(x)
        torch.npu.synchronize()
        with torch.npu.graph(graph):
            result = fast(x)
        x.mul_(3)
        graph.replay()
    torch.testing.assert_close(result.cpu(), (x.cpu() + 1) * 7)
