"""One call of a case on the emulated device's modelled clock: in eager mode, and as a replay."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch

import npu_emulator
import npugraph_ex
from npugraph_ex.testing.generator.inputs import make_inputs
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex_conformance.reporting.charts import ChartSpan

_GRAPH = re.compile(r", graph \d+(?=, )")


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """A piece of work on a stream; times in modelled microseconds from the beginning of the call."""

    name: str
    stream: str
    start: float
    duration: float


def modelled_spans(case: Case) -> tuple[list[DeviceWork], list[DeviceWork]]:
    """What the device does for one call of the program: in eager mode, and as a replay of the captured graph."""
    sizes = case.sizes[0]
    first, second, third = (make_inputs(case.inputs, sizes=sizes, call=call) for call in range(3))
    with npu_emulator.timeline() as clock:
        case.function()(*first)
        torch.npu.synchronize()
        clock.launched()
        eager = _from_zero(clock.spans)
    graph = tracing.trace(case.function(), case.inputs, sizes, dynamic=False, functional=case.functional)
    with npu_emulator.timeline() as clock:
        replay = npugraph_ex.compile_fx(graph, None, dict(case.options))
        replay(*second)
        torch.npu.synchronize()
        clock.launched()
        captured = len(clock.spans)
        replay(*third)
        torch.npu.synchronize()
        clock.launched()
        replayed = _from_zero(clock.spans[captured:])
    return eager, replayed


def _from_zero(spans: Sequence[ChartSpan]) -> list[DeviceWork]:
    """The same from time zero; a graph's lanes without its number, which is another in each run."""
    work = [DeviceWork(span.name, _GRAPH.sub("", span.stream), span.start, span.duration) for span in spans]
    start = min((span.start for span in work), default=0.0)
    return [dataclasses.replace(span, start=span.start - start) for span in work]
