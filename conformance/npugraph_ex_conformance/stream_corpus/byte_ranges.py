"""Stream graphs whose mistake depends on which bytes are touched, and on how long memory lives."""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.report.findings import Code
from npugraph_ex.testing.streams.builder import StreamBuilder
from npugraph_ex_conformance.stream_corpus.programs import RAW, aten, program

_LIBRARY = torch.library.Library("npugraph_ex_corpus", "FRAGMENT")
_LIBRARY.define("scale_(Tensor(a!) x, int factor) -> ()")


def _scale(x: torch.Tensor, factor: int) -> None:
    x.mul_(factor)


_LIBRARY.impl("scale_", _scale, "CompositeExplicitAutograd")


@program(RAW)
def interleaved_views(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Every second element against every third, or the even ones against the odd."""
    buffer = b.call(aten.mul.Tensor, b.input(12), 2)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 0, 0, 12, 2), 3)
    other = (1, 12, 2) if mended else (0, 12, 3)
    b.call(aten.add_.Tensor, b.call(aten.slice.Tensor, buffer, 0, *other), 1)
    b.join("s")
    return b.finish(buffer)


@program(RAW)
def out_variant(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """An operator computes into a slice of a buffer; the reader's slice overlaps, or does not."""
    x = b.input(4)
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("s")
    with b.on("s"):
        b.call(aten.add.out, x, x, out=b.call(aten.slice.Tensor, buffer, 0, 0, 4))
    y = b.call(aten.add.Tensor, b.call(aten.slice.Tensor, buffer, 0, 4 if mended else 3, 8), 1)
    b.join("s")
    return b.finish(buffer, y)


@program(RAW)
def custom_operator(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A custom operator writes its argument, as its schema says, and returns nothing."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("s")
    with b.on("s"):
        b.call(torch.ops.npugraph_ex_corpus.scale_.default, buffer, 3)
    if mended:
        b.join("s")
    y = b.call(aten.add.Tensor, buffer, 1)
    if not mended:
        b.join("s")
    return b.finish(y)


@program(RAW)
def many_tensors_at_once(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A list operator updates several tensors; one of them is read."""
    x = b.input(8)
    buffers = [b.call(aten.mul.Tensor, x, factor) for factor in (2, 3)]
    b.fork("s")
    with b.on("s"):
        b.call(aten._foreach_mul_.Scalar, buffers, 5)
    if mended:
        b.join("s")
    y = b.call(aten.add.Tensor, buffers[1], 1)
    if not mended:
        b.join("s")
    return b.finish(buffers[0], y)


@program(RAW)
def indexed_write(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Rows are written by index, so which ones is not known."""
    buffer, rows = b.call(aten.mul.Tensor, b.input(4, 2), 2), b.input(1, 2)
    where = b.call(aten.full_like.default, b.call(aten.select.int, rows, 1, 0), 2, dtype=torch.int64)
    b.fork("s")
    with b.on("s"):
        b.call(aten.index_put_.default, buffer, [where], rows)
    if mended:
        b.join("s")
    y = b.call(aten.add.Tensor, buffer, 1)
    if not mended:
        b.join("s")
    return b.finish(y, where)


@program(RAW)
def parts_of_a_concatenation(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Two streams compute the halves of a buffer, which the main stream reads as a whole."""
    x = b.input(4)
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("a", "c")
    with b.on("a"):
        b.call(aten.mul.out, x, x, out=b.call(aten.slice.Tensor, buffer, 0, 0, 4))
    with b.on("c"):
        b.call(aten.add.out, x, x, out=b.call(aten.slice.Tensor, buffer, 0, 4, 8))
    b.join("a")
    if mended:
        b.join("c")
    y = b.call(aten.sum.default, buffer)
    if not mended:
        b.join("c")
    return b.finish(y)


@program(Code.MEMORY_REUSED)
def freed_while_a_side_stream_reads(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The main stream frees what a side stream reads, and is given the same memory again."""
    x = b.input(8)
    y = b.call(aten.mul.Tensor, x, 2)
    b.fork("s")
    with b.on("s"):
        z = b.call(aten.add.Tensor, y, 1)
    if mended:
        b.uses("s", y)
    w = b.call(aten.mul.Tensor, x, 5)
    b.join("s")
    return b.finish(z, w)


@program(Code.MEMORY_REUSED)
def dynamic_size_freed(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Memory of a size that is a symbol is freed and used again while a side stream reads it."""
    x = b.input(b.symbol(8))
    y = b.call(aten.mul.Tensor, x, 2)
    b.fork("s")
    with b.on("s"):
        z = b.call(aten.add.Tensor, y, 1)
    if mended:
        b.join("s")
    w = b.call(aten.mul.Tensor, x, 5)
    if not mended:
        b.join("s")
    return b.finish(z, w)


@program(Code.MEMORY_REUSED)
def memory_of_another_size_class(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The next allocation is from the same pool as the freed block, or from the one for large blocks."""
    x = b.input(8)
    y = b.call(aten.mul.Tensor, x, 2)
    b.fork("s")
    with b.on("s"):
        z = b.call(aten.add.Tensor, y, 1)
    w = b.call(aten.new_full.default, x, [300_000 if mended else 8], 5)
    part = b.call(aten.slice.Tensor, w, 0, 0, 8)
    b.join("s")
    return b.finish(z, part)
