"""A stream graph with a mistake, and its correct form: what the check must find, and inputs to run it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import fx

from npugraph_ex.report.findings import Code
from npugraph_ex.testing.arguments import check_fields, checked
from npugraph_ex.testing.streams.builder import StreamBuilder


class Write(Protocol):
    """Writes a program into a builder, with its mistake or mended."""

    def __call__(self, b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
        """Write it."""
        ...


@dataclass(frozen=True)
class StreamProgram:
    """One stream graph.

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
