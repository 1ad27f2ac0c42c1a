"""Tagged events that are written in the wrong place, twice, or for nothing: what the report says, and what is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from stream_programs import check, compiled, vector

import npugraph_ex
from npugraph_ex import ops, scope
from npugraph_ex.errors import StreamOrderWarning
from npugraph_ex.report.findings import Code

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_wait_before_its_record_is_reported() -> None:
    """A wait before its record waits for nothing; the report shows both and says what to move, and the graph runs."""
    event = ops.npu_create_tagged_event("late")

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(event)
            y = x * 2
        ops.npu_tagged_event_record(event)
        return y

    check(compiled(function), lambda x: x * 2, (vector(1, 2),), schedules=("lazy",))
    (finding,) = npugraph_ex.last_report().streams.of(Code.WAIT_WITHOUT_RECORD)
    assert "Event 'late'" in finding.message
    assert (finding.level, finding.first.stream, finding.second.stream) == ("error", "side", None)
    assert finding.missing_edge == f"a record of event 'late' before {finding.first.node}"
    wait, record = (place.source for place in (finding.first, finding.second))
    assert int(record.rpartition(":")[2]) == int(wait.rpartition(":")[2]) + 2
    assert finding.repair.startswith(f"move `ops.npu_tagged_event_record(event)` from {record} to before {wait}")


def test_a_wait_whose_record_was_forgotten_costs_an_error() -> None:
    """The wait itself is only noted, since the record may be outside; what it should have ordered is found as a race."""
    event = ops.npu_create_tagged_event("forgotten")

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            y = x * 2
        ops.npu_tagged_event_wait(event)
        return y + 1

    with pytest.warns(StreamOrderWarning, match="read-after-write"):
        compiled(function)(vector(1, 2))
    found = npugraph_ex.last_report().streams
    assert [finding.code for finding in found] == [Code.WAIT_FOR_OUTSIDE, Code.READ_AFTER_WRITE]


def test_the_repair_of_a_native_event_is_a_native_wait() -> None:
    """As the line would be written in the program: a `torch.npu.Event` has no tag that a program knows."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        done, side = torch.npu.Event(), torch.npu.Stream()
        y = x + 1
        done.record()
        z = y + 1
        done.record()
        with torch.npu.stream(side):
            side.wait_event(done)
            w = z * 2
        torch.npu.current_stream().wait_stream(side)
        return w

    x = torch.ones(8, device="npu")
    assert torch.equal(torch.compile(twice, backend="npugraph_ex")(x), twice(x))
    (finding,) = npugraph_ex.last_report().streams.of(Code.RECORDED_TWICE)
    assert "add `torch.npu.current_stream().wait_event(done)`" in finding.repair


def test_a_native_wait_before_its_record_is_a_remark() -> None:
    """It may be for what an earlier call recorded, so results are right; the line to move is named."""
    done, side = torch.npu.Event(), torch.npu.Stream()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.npu.current_stream().wait_event(done)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            z = y * 2
            done.record()
        torch.npu.current_stream().wait_stream(side)
        return z + 1

    check(compiled(function, stream_check="raise"), lambda x: (x + 1) * 2 + 1, (vector(1, 2),), (vector(3, 4),))
    (finding,) = npugraph_ex.last_report().streams
    assert (finding.code, finding.level) == (Code.WAIT_FOR_OUTSIDE, "note")
    assert finding.second is not None
    wait, record = (place.source for place in (finding.first, finding.second))
    assert int(record.rpartition(":")[2]) == int(wait.rpartition(":")[2]) + 4
    assert f"from {record} to before {wait}" in finding.repair


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
    assert "Event 'twice'" in finding.message
    lines = [int(place.source.rpartition(":")[2]) for place in (finding.first, finding.second)]
    assert lines[1] == lines[0] + 2
    assert finding.missing_edge
    assert f"before {finding.second.source} add `ops.npu_tagged_event_wait(event)`" in finding.repair


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
    idle = report.streams.of(Code.WAIT_ORDERS_NOTHING)
    assert idle
    for finding in idle:
        assert finding.first.source.startswith(__file__)
        assert finding.missing_edge.startswith("none: ")
        assert f"remove the wait at {finding.second.source}" in finding.repair


def test_a_repair_is_told_alike_everywhere() -> None:
    """Of a wait for the wrong event: the missing edge is repaired, the wait is not, and each face of the report says so."""
    ready, done = (ops.npu_create_tagged_event(name) for name in ("ready", "done"))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ops.npu_tagged_event_record(ready)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(ready)
            z = y * 3
            ops.npu_tagged_event_record(done)
        v = y * 2
        ops.npu_tagged_event_wait(ready)
        return z + v

    fast = torch.compile(function, backend="npugraph_ex", options={"stream_check": "repair"})
    given = (vector(1, 2),)
    assert fast(*given).tolist() == [10.0, 15.0]
    found = npugraph_ex.explain(function, *given, options={"stream_check": "repair"})
    told = {finding.code: finding for finding in npugraph_ex.last_report().streams}
    assert {code: finding.repaired for code, finding in told.items()} == {
        Code.READ_AFTER_WRITE: True,
        Code.WAIT_ORDERS_NOTHING: False,
    }
    levels = {code.value: finding.shown_level for code, finding in told.items()}
    assert {row[1]: row[0] for row in found.streams.rows()} == levels
    shown = str(found.summary())
    assert all(f"{level} {code}:" in shown for code, level in levels.items())
    results = json.loads(found.streams.to_sarif())["runs"][0]["results"]
    assert {one["ruleId"]: one["properties"]["repaired"] for one in results} == {
        code.value: finding.repaired for code, finding in told.items()
    }
    (idle,) = (one for one in results if one["ruleId"] == Code.WAIT_ORDERS_NOTHING)
    repair = told[Code.WAIT_ORDERS_NOTHING].repair.replace(f"{ROOT}/", "")  # SARIF's paths begin at the root
    assert repair in idle["message"]["text"]


def test_a_stream_without_work_of_its_own_is_not_drawn_into_a_capture() -> None:
    """A view costs no kernel. Its stream's record orders nothing, so the wait before it goes too, or the capture would not end."""
    begun, done = ops.npu_create_tagged_event("begun"), ops.npu_create_tagged_event("done")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ops.npu_tagged_event_record(begun)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(begun)
            z = y.view(2, 2)
            ops.npu_tagged_event_record(done)
        ops.npu_tagged_event_wait(done)
        return z * 2

    check(compiled(function, require_capture=True), lambda x: (x.view(2, 2) + 1) * 2, (vector(1, 2, 3, 4),))
    report = npugraph_ex.last_report()
    assert (report.dropped_waits, report.dropped_records) == (2, 2)
