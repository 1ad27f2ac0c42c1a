"""Tags, events and streams belong to a graph: they are given back, never meet another model's, and wrong ones are refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_programs import SCHEDULES, compiled, vector

import npu_emulator
from npugraph_ex import ops, scope
from npugraph_ex.aclgraph import side_streams
from npugraph_ex.errors import ScopeError
from npugraph_ex_conformance.models.stream_forms import Tagged, plain

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.slow
def test_streams_are_given_back() -> None:
    """vllm-ascend#9564: many captured graphs that come and go leave no stream and no event behind on the device."""

    def compile_and_drop() -> tuple[int, int, int, int]:
        fast = compiled(Tagged())
        for size in (2, 3, 4):
            fast(torch.ones(size, device="npu"))
        alive = len(npu_emulator.resources().graphs)
        torch.npu.synchronize()
        del fast
        torch.compiler.reset()
        gc.collect()
        used = npu_emulator.resources()
        return alive, len(used.graphs), used.streams_used, used.events_used

    compile_and_drop()  # what an earlier test's pool still holds goes with the next graphs
    alive, left, *used = compile_and_drop()
    assert alive == left + 3
    assert compile_and_drop() == (alive, left, *used)


def test_tags_of_two_models_never_meet() -> None:
    """Two models with the same tags and event tags run interleaved, each right, on streams of their own."""
    first, second = compiled(Tagged()), torch.compile(Tagged(), backend="npugraph_ex", fullgraph=True)
    x = vector(1, 2)
    for schedule in SCHEDULES:
        with npu_emulator.detect_races() as races, npu_emulator.schedule(schedule):
            results = [fast(x + number) for number, fast in enumerate((first, second, first, second))]
            for number, got in enumerate(results):
                for have, want in zip(got, plain(x.cpu() + number), strict=True):
                    assert torch.equal(have.cpu(), want), schedule
        assert not races, schedule


def test_one_tag_for_two_events_of_a_graph_is_refused() -> None:
    """The message names the tag and says what to do."""
    pair = [ops.npu_create_tagged_event("same"), ops.npu_create_tagged_event("same")]

    def function(x: torch.Tensor) -> torch.Tensor:
        for event in pair:
            ops.npu_tagged_event_record(event)
        with scope.npu_stream_switch("side"):
            return x * 2

    with pytest.raises(Exception, match=r"tag 'same'.*npu_create_tagged_event"):
        compiled(function)(vector(1))


def test_an_event_made_inside_is_refused_with_fullgraph_alone() -> None:
    """The message says where to make it; without `fullgraph` the graph ends there, and the values are right."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        event = ops.npu_create_tagged_event("late")
        ops.npu_tagged_event_record(event)
        return y * 2

    with pytest.raises(Exception, match="make the event 'late' outside of the compiled function"):
        compiled(function)(vector(1))
    assert torch.compile(function, backend="npugraph_ex")(vector(1, 2)).tolist() == [4.0, 6.0]


def test_one_tag_with_two_priorities_is_refused() -> None:
    """One tag is one stream, and a stream has one priority."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side", -1):
            x = x + 1
        with scope.npu_stream_switch("side", 0):
            return x * 2

    with pytest.raises(Exception, match=r"'side' .* priorities -1 and 0"):
        compiled(function)(vector(1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: scope.npu_stream_switch(""), "stream_tag takes a str .*; got ''"),
        (lambda: scope.npu_stream_switch("a", "high"), "stream_priority takes an int; got 'high'"),
        (lambda: ops.npu_create_tagged_event(7), "tag takes a str .*; got 7"),
        (lambda: ops.npu_tagged_event_record("66"), "takes an event from npu_create_tagged_event; got '66'"),
        (lambda: ops.npu_tagged_event_wait(None), "npu_create_tagged_event; got None"),
        (lambda: ops.npu_record_tagged_stream(vector(1), 3), "a str; got 3"),
    ],
)
def test_wrong_arguments_are_refused(wrong: Callable[[], Any], message: str) -> None:
    """Each message names the argument, what is allowed and what came."""
    with pytest.raises(ScopeError, match=message):
        wrong()


def test_limits_and_priorities_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core limit in a stream scope limits that stream and inherits the caller's; a priority is the stream's own."""
    drawn: dict[torch.npu.Stream, int] = {}
    draw = side_streams.draw

    def noting(priority: int, taken: set[Any]) -> torch.npu.Stream:
        stream = draw(priority, taken)
        drawn[stream] = priority
        return stream

    monkeypatch.setattr(side_streams, "draw", noting)
    priorities: dict[str, int] = {}
    seen: dict[str, tuple[int, int]] = {}
    library = torch.library.Library("nge_stream_look", "DEF")
    library.define("look(Tensor x, str place) -> Tensor")
    torch.library.register_fake("nge_stream_look::look", lambda x, _: torch.empty_like(x), lib=library)

    def note_limits(x: torch.Tensor, place: str) -> torch.Tensor:
        limits = torch.npu.get_stream_limit(torch.npu.current_stream())
        seen[place] = (limits["cube_core_num"], limits["vector_core_num"])
        priorities[place] = drawn[torch.npu.current_stream()]
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
    assert priorities == {"side": -1, "limited": -1, "again": -1, "around": 0}
    assert seen == {"side": (24, 20), "limited": (4, 20), "again": (24, 20), "around": (2, 2)}


def test_a_stream_whose_work_is_dead_code_may_be_named_as_a_user() -> None:
    """What it was to read needs to live no longer; the graph is captured, and other streams keep theirs."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        with scope.npu_stream_switch("alive"):
            z = x * 3
            ops.npu_record_tagged_stream(z, "dead")
        with scope.npu_stream_switch("dead"):
            y + z
        ops.npu_record_tagged_stream(y, "dead")
        return y + 1, z

    x = torch.ones(3, device="npu")
    for options in ({"require_capture": True}, {"force_eager": True}):
        results = torch.compile(program, backend="npugraph_ex", options={**options, "stream_check": "off"})(x)
        assert [result.tolist() for result in results] == [[3.0] * 3] * 2
        torch.compiler.reset()


@pytest.mark.parametrize("came", ["'66'", "None", "a value of type Event"])
@pytest.mark.parametrize(
    "function", [ops.npu_tagged_event_record, ops.npu_tagged_event_wait], ids=lambda it: it.__name__
)
def test_what_is_no_tagged_event_is_refused_while_compiling(function: Callable[[object], None], came: str) -> None:
    """With and without `fullgraph`: the error has the function, what came, and what to write."""
    given = {"'66'": "66", "None": None}.get(came, torch.npu.Event())

    def step(x: torch.Tensor) -> torch.Tensor:
        function(given)
        return x + 1

    for fullgraph, kind in ((True, torch._dynamo.exc.Unsupported), (False, ScopeError)):
        torch._dynamo.reset()
        with pytest.raises(kind) as found:
            torch.compile(step, backend="npugraph_ex", fullgraph=fullgraph)(torch.ones(4, device="npu"))
        said = str(found.value)
        assert f"{function.__name__} takes an event from npu_create_tagged_event" in said
        assert f"got {came}. Write `event = npu_create_tagged_event(" in said


@pytest.mark.parametrize("function", [scope.npu_stream_switch, scope.deterministic, ops.npu_create_tagged_event])
def test_a_wrong_argument_is_named_while_compiling(function: Callable[[object], object]) -> None:
    """Dynamo cannot trace an exception with an address; its own error has the text."""

    def step(x: torch.Tensor) -> torch.Tensor:
        function(None)
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"{function.__name__}: \w+ takes .*got None") as found:
        torch.compile(step, backend="npugraph_ex", fullgraph=True)(torch.ones(4, device="npu"))
    assert "__new__" not in str(found.value)
