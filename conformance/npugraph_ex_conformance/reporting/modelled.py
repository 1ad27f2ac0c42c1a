"""One call of a case on the emulated device's modelled clock: in eager mode, and as a replay."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

import npu_emulator
import npugraph_ex
from npu_emulator.clock.timeline import Span
from npugraph_ex.testing.generator.inputs import make_inputs
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.case import Case

_GRAPH = re.compile(r", graph \d+(?=, )")


def modelled_spans(case: Case) -> tuple[list[Span], list[Span]]:
    """What the device does for one call of the program: in eager mode, and as a replay of the captured graph."""
    sizes = case.sizes[0]
    first, second, third = (make_inputs(case.inputs, sizes=sizes, call=call) for call in range(3))
    with npu_emulator.timeline() as clock:
        case.function()(*first)
        torch.npu.synchronize()
        clock.refresh()
        eager = _from_zero(clock.spans)
    graph = tracing.trace(case.function(), case.inputs, sizes, dynamic=False, functional=case.functional)
    with npu_emulator.timeline() as clock:
        replay = npugraph_ex.compile_fx(graph, None, dict(case.options))
        replay(*second)
        torch.npu.synchronize()
        clock.refresh()
        captured = len(clock.spans)
        replay(*third)
        torch.npu.synchronize()
        clock.refresh()
        replayed = _from_zero(clock.spans[captured:])
    return eager, replayed


def _from_zero(spans: Sequence[Span]) -> list[Span]:
    """The same from time zero; a graph's lanes without its number, which is another in each run."""
    start = min((span.start for span in spans), default=0.0)
    return [span._replace(stream=_GRAPH.sub("", span.stream), start=span.start - start) for span in spans]
