"""Streams in all the ways in which they can be written: values under adversarial schedules, on streams that really differ."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_programs import check, compiled, vector

import npu_emulator
import npugraph_ex
from npugraph_ex import ops, scope
from npugraph_ex_conformance.models.stream_forms import STREAMS, Tagged, native_wait_stream, plain, stream_forms


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """Inference, and nothing captured is left from the test before or to the next one."""
    for run in (True, False):
        torch.compiler.reset()
        gc.collect()
        if run:
            with torch.no_grad():
                yield


FORMS = stream_forms()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_the_same_on_three_streams(form: str) -> None:
    """Captured with several sizes: values and no race under each schedule; each capture holds three streams."""
    function, options = FORMS[form]
    fast = compiled(function, dynamic=True, **options)
    check(fast, plain, (vector(1, 2, 3),), (vector(4, 5, 6),), (vector(1, 2),))
    assert npu_emulator.resources().graphs[-1].streams == STREAMS


EVENTS = {name: ops.npu_create_tagged_event(f"mixed {name}") for name in ("trunk", "left", "right")}


def beside(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One branch in a tagged scope, the other in the block of a native stream."""
    side = torch.npu.Stream()
    trunk = x + 1
    ops.npu_tagged_event_record(EVENTS["trunk"])
    side.wait_stream(torch.npu.current_stream())
    with scope.npu_stream_switch("a"):
        ops.npu_tagged_event_wait(EVENTS["trunk"])
        left = trunk * 2
        ops.npu_tagged_event_record(EVENTS["left"])
    with torch.npu.stream(side):
        right = trunk - 3
        last = right * 5
    torch.npu.current_stream().wait_stream(side)
    ops.npu_tagged_event_wait(EVENTS["left"])
    return left + right, last


def nested(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tagged scope inside the block of a native stream, used again outside; the inner one holds."""
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        trunk = x + 1
        ops.npu_tagged_event_record(EVENTS["trunk"])
        with scope.npu_stream_switch("a"):
            ops.npu_tagged_event_wait(EVENTS["trunk"])
            left = trunk * 2
        right = trunk - 3
        with scope.limit_core_num(4, 8):
            last = right * 5
    with scope.npu_stream_switch("a"):
        double = left * 1  # the same stream: no event
        ops.npu_tagged_event_record(EVENTS["left"])
    torch.npu.current_stream().wait_stream(side)
    ops.npu_tagged_event_wait(EVENTS["left"])
    return double + right, last


@pytest.mark.parametrize("mixed", [beside, nested])
def test_native_and_tagged_streams_mix(mixed: Callable[..., Any]) -> None:
    """In one graph, beside and inside each other: values and no race under each schedule, on three streams."""
    check(compiled(mixed, stream_check="raise"), plain, (vector(1, 2, 3),), (vector(4, 5, 6),))
    assert npu_emulator.resources().graphs[-1].streams == 3


def test_the_name_of_the_backend_is_enough() -> None:
    """Dynamo knows `default_stream` before it calls the backend for the first time, also where a string names it."""
    fast = torch.compile(native_wait_stream, backend="npugraph_ex", fullgraph=True)
    check(fast, plain, (vector(1, 2, 3),), schedules=("lazy",))


@pytest.mark.parametrize("form", FORMS)
def test_force_eager_honours_streams(form: str) -> None:
    """Run operator by operator, work is launched on the same streams, and memory outlives its last use on any."""
    function, options = FORMS[form]
    captured = len(npu_emulator.resources().graphs)
    fast = compiled(function, force_eager=True, **options)
    check(fast, plain, (vector(1, 2, 3),), (vector(4, 5, 6),))
    assert len(npu_emulator.resources().graphs) <= captured
    with npu_emulator.timeline() as clock:
        fast(vector(1, 2, 3))
        torch.npu.synchronize()
    assert len(streams_of(clock)) == 3


@pytest.mark.parametrize("option", ["check_numerics", "dump_tensor_data"])
def test_options_that_run_the_graph_otherwise(option: str, tmp_path: Path) -> None:
    """On the CPU, and dumped value by value, a graph runs in order; results are the same and nothing is rolled back."""
    fast = compiled(Tagged(), **{option: True, "data_dump_dir": str(tmp_path)})
    check(fast, plain, (vector(1, 2, 3),), schedules=("lazy",))
    report = npugraph_ex.last_report()
    assert all(record.outcome != "rolled back" for record in report.passes), report.table()


def streams_of(clock: Any) -> set[object]:
    """The streams on which kernels ran."""
    return {span.stream for span in clock.spans}
