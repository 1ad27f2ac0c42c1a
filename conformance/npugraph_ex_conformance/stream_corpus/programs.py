"""The corpus of stream graphs: each with its mistake and mended, and what the stream check must say of both.

It keeps what documents a trap, or what random graphs do not draw: custom operators, list operators, writes by index, symbolic
sizes, core limits, and every way of writing streams. All else is left to the random graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import fx

from npugraph_ex.report.findings import Code
from npugraph_ex.testing.streams.builder import StreamBuilder
from npugraph_ex.testing.streams.programs import StreamProgram, Write

aten = torch.ops.aten

RAW, WAR, WAW = Code.READ_AFTER_WRITE, Code.WRITE_AFTER_READ, Code.WRITE_AFTER_WRITE

_CORPUS: dict[str, StreamProgram] = {}


def program(*codes: Code, notes: tuple[Code, ...] = ()) -> Callable[[Write], Write]:
    """Add a program to the corpus, with what the check must find in its racy form."""

    def add(write: Write) -> Write:
        name = str(getattr(write, "__name__", write))
        _CORPUS[name] = StreamProgram(name, write, codes, notes)
        return write

    return add


def stream_corpus() -> tuple[StreamProgram, ...]:
    """All programs of the corpus."""
    for part in ("orders", "byte_ranges"):
        import_module(f"{__package__}.{part}")
    return tuple(_CORPUS.values())


@program(RAW)
def custom_pass_example(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The example of custom passes: `add` reads what `abs` computes, and the wait stands only before `sub`."""
    x = b.input(3, 3)
    b.fork("stream_1")
    with b.on("stream_1"):
        mm = b.call(aten.mm.default, x, x)
        absolute = b.call(aten.abs.default, mm)
        record = b.record()
    if mended:
        b.wait(record)
    add = b.call(aten.add.Tensor, absolute, 1)
    if not mended:
        b.wait(record)
    return b.finish(add, b.call(aten.sub.Tensor, x, mm))


@program(RAW)
def tagged_events_example(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The example of tagged events is clean as printed; here its third stream also reads the product, and may not wait."""
    in1, in2, in3, in4 = (b.input(4, 4) for _ in range(4))
    add_result = b.call(aten.add.Tensor, in1, in2)
    event1 = b.record()
    with b.on("1"):
        b.wait(event1)
        mm_result = b.call(aten.mm.default, in3, in4)
        event2 = b.record()
        extra = b.call(aten.add.Tensor, in3, in4)
    b.uses("1", extra)
    mm1 = b.call(aten.mm.default, in3, in4)
    c = b.call(aten.full_like.default, in1, 1)
    b.call(aten.add_.Tensor, c, 2)
    with b.on("2"):
        b.wait(event2 if mended else event1)
        add2 = b.call(aten.add.Tensor, in3, mm_result)
    b.join("1", "2")
    return b.finish(add_result, mm_result, mm1, add2, c)
