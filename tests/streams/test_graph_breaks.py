"""Streams and events around a graph break: values and order are those of eager mode, and nothing false is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_programs import check, compiled, vector

import npu_emulator
import npugraph_ex
from npugraph_ex import ops, scope
from npugraph_ex.report.findings import Code
from npugraph_ex.versions import broken_blocks
from npugraph_ex_conformance.models.stream_forms import Tagged, plain

SIDE = torch.npu.Stream()
READY = torch.npu.Event()


pytestmark = pytest.mark.usefixtures("fresh")


def broken(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
    """The function under this backend, named by its string, where graph breaks are allowed."""
    torch.compiler.reset()
    return torch.compile(function, backend="npugraph_ex", options=options)


def native_block(x: torch.Tensor) -> torch.Tensor:
    """A break inside the block of a native stream, which then also holds work before and after it."""
    y = x + 1
    SIDE.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(SIDE):
        z = y * 2
        torch._dynamo.graph_break()
        z = z - y
    v = y * 5
    torch.npu.current_stream().wait_stream(SIDE)
    return z + v


def native_event(x: torch.Tensor) -> torch.Tensor:
    """An event recorded before the break and awaited after it, on another stream."""
    y = x + 1
    READY.record()
    torch._dynamo.graph_break()
    with torch.npu.stream(SIDE):
        READY.wait()
        z = y * 2
    v = y * 5
    torch.npu.current_stream().wait_stream(SIDE)
    return z - y + v


def native_set_and_back(x: torch.Tensor) -> torch.Tensor:
    """The stream is set for good between two breaks, and put back between two more."""
    y = x + 1
    before = torch.npu.current_stream()
    SIDE.wait_stream(before)
    torch._dynamo.graph_break()
    torch.npu.set_stream(SIDE)
    torch._dynamo.graph_break()
    z = y * 2
    torch._dynamo.graph_break()
    torch.npu.set_stream(before)
    torch._dynamo.graph_break()
    torch.npu.current_stream().wait_stream(SIDE)
    return z + y


@pytest.mark.parametrize(
    ("function", "meaning"),
    [
        pytest.param(
            native_block,
            lambda x: (x + 1) * 6,
            marks=pytest.mark.skipif(not broken_blocks.DIFFERENCE.older, reason=broken_blocks.DIFFERENCE.what),
        ),
        (native_event, lambda x: (x + 1) * 6),
        (native_set_and_back, lambda x: (x + 1) * 3),
    ],
)
def test_native_streams_across_a_break(function: Callable[..., Any], meaning: Callable[..., Any]) -> None:
    """Each piece runs on the stream on which eager mode runs it, in that order, and the caller's stream is as before."""
    x, main = vector(1, 2), torch.npu.current_stream()
    earlier = {graph.id for graph in npu_emulator.resources().graphs}
    assert torch.equal(function(x).cpu(), meaning(x.cpu()))
    fast = broken(function, stream_check="raise")
    check(fast, meaning, (x,), (vector(5, -6),))
    assert torch.npu.current_stream() == main
    with npu_emulator.timeline() as clock:
        fast(x)
        torch.npu.synchronize()
    inside = max(graph.streams for graph in npu_emulator.resources().graphs if graph.id not in earlier)
    outside = {span.stream for span in clock.spans if ", graph" not in span.stream}  # replays have lanes of their own
    assert max(inside, len(outside)) == 2


def test_a_tagged_event_across_a_break() -> None:
    """The wait is no error: the report says that the event comes from outside, and the calls are in order anyway."""
    event = ops.npu_create_tagged_event("across")

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("one"):
            y = x + 1
            ops.npu_tagged_event_record(event)
        torch._dynamo.graph_break()
        with scope.npu_stream_switch("two"):
            ops.npu_tagged_event_wait(event)
            return y * 2

    check(broken(function, stream_check="raise"), lambda x: (x + 1) * 2, (vector(1, 2),), (vector(5, -6),))
    (finding,) = npugraph_ex.last_report().streams
    assert (finding.code, finding.level, finding.first.stream) == (Code.WAIT_FOR_OUTSIDE, "note", "two")
    assert "a graph break" in finding.message
    assert finding.first.source.startswith(__file__)
    assert finding.missing_edge
    assert "add `ops.npu_tagged_event_record(event)`" in finding.repair


def test_a_break_inside_a_tagged_scope() -> None:
    """The function runs in eager mode, in the order in which it is written; values are right."""
    model = Tagged()

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("a"):
            y = x * 2
            torch._dynamo.graph_break()
            y = y + 1
        return model(y)[0]

    check(broken(function), lambda x: plain(x * 2 + 1)[0], (vector(1, 2),))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(function)(vector(1))
