"""The public corpus of stream graphs: each program with its mistake and mended, and what the stream check must say.

`stream_corpus_races` has programs whose mistake is a missing order, `stream_corpus_bytes` those where it depends on which
bytes are touched, `stream_corpus_shapes` those where it is a fork, a join, an event or the life of memory,
`stream_corpus_traps` those after mistakes of shipped systems, and `stream_corpus_spellings` those written with scopes and
tags. This module has what they share, and the two examples of the documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Protocol

import torch
from torch import fx

from npugraph_ex.report.findings import Code
from npugraph_ex.testing.arguments import check_fields, checked
from npugraph_ex.testing.stream_builder import StreamBuilder

aten = torch.ops.aten

RAW, WAR, WAW = Code.READ_AFTER_WRITE, Code.WRITE_AFTER_READ, Code.WRITE_AFTER_WRITE


class Write(Protocol):
    """Writes a program into a builder, with its mistake or mended."""

    def __call__(self, b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
        """Write it."""
        ...


@dataclass(frozen=True)
class StreamProgram:
    """One program of the corpus.

    Attributes:
        name: of the function that writes it.
        write: that function; its docstring says what the program is about.
        codes: what the check must find in the program with its mistake: these and no other.
        notes: what it must find in both.
    """

    name: str
    write: Write
    codes: tuple[Code, ...]
    notes: tuple[Code, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def graph(self, *, mended: bool) -> fx.GraphModule:
        """Build the program."""
        return self.write(StreamBuilder(), mended=mended)

    def inputs(self) -> list[torch.Tensor]:
        """CPU inputs for the graph: 1, 2, 3 …, each input with other numbers."""
        return counting_inputs(self.graph(mended=True))


def counting_inputs(gm: fx.GraphModule) -> list[torch.Tensor]:
    """CPU inputs for a graph: 1, 2, 3 …, each input with other numbers; a symbolic size is its example."""
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    shapes = [[size if isinstance(size, int) else size.node.hint for size in fake.shape] for fake in fakes]
    return [
        torch.arange(1, prod(shape) + 1, dtype=torch.int32).reshape(shape) + 100 * number
        for number, shape in enumerate(shapes)
    ]


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
    for part in ("races", "bytes", "shapes", "traps", "spellings"):
        import_module(f"npugraph_ex.testing.stream_corpus_{part}")
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
