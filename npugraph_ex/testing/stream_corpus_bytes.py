"""Programs of the corpus whose mistake depends on which bytes a node touches: views, in-place and out variants, schemas."""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.testing.stream_builder import StreamBuilder
from npugraph_ex.testing.stream_programs import RAW, aten, program

_LIBRARY = torch.library.Library("npugraph_ex_corpus", "FRAGMENT")
_LIBRARY.define("scale_(Tensor(a!) x, int factor) -> ()")


def _scale(x: torch.Tensor, factor: int) -> None:
    x.mul_(factor)


_LIBRARY.impl("scale_", _scale, "CompositeExplicitAutograd")


@program(RAW)
def overlapping_slices(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Two slices that share two elements, or none."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 0, 0, 4 if mended else 6), 3)
    b.call(aten.add_.Tensor, b.call(aten.slice.Tensor, buffer, 0, 4, 8), 1)
    b.join("s")
    return b.finish(buffer)


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
def column_blocks(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Two blocks of columns span the same bytes; they may share a column."""
    buffer = b.call(aten.mul.Tensor, b.input(4, 6), 2)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 1, 0, 3), 3)
    b.call(aten.add_.Tensor, b.call(aten.slice.Tensor, buffer, 1, 3 if mended else 2, 6), 1)
    b.join("s")
    return b.finish(buffer)


@program(RAW)
def middle_blocks(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Blocks of the middle dimension of a cube."""
    buffer = b.call(aten.mul.Tensor, b.input(2, 6, 2), 2)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 1, 0, 3), 3)
    b.call(aten.add_.Tensor, b.call(aten.slice.Tensor, buffer, 1, 3 if mended else 2, 6), 1)
    b.join("s")
    return b.finish(buffer)


@program(RAW)
def row_against_column(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A row and a column of a matrix meet in one element."""
    buffer = b.call(aten.mul.Tensor, b.input(4, 4), 2)
    b.fork("s")
    with b.on("s"):
        column = b.call(aten.select.int, b.call(aten.t.default, buffer), 0, 1)
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, column, 0, 1 if mended else 0, 4), 3)
    b.call(aten.add_.Tensor, b.call(aten.select.int, buffer, 0, 0), 1)
    b.join("s")
    return b.finish(buffer)


@program(RAW)
def a_view_of_a_view(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A write through one chain of views is read through another."""
    buffer = b.call(aten.mul.Tensor, b.input(2, 8), 2)
    b.fork("s")
    with b.on("s"):
        flat = b.call(aten.view.default, buffer, [16])
        b.call(aten.mul_.Tensor, b.call(aten.unsqueeze.default, flat, 0), 3)
    if mended:
        b.join("s")
    y = b.call(aten.add.Tensor, b.call(aten.expand.default, b.call(aten.select.int, buffer, 0, 1), [3, 8]), 1)
    if not mended:
        b.join("s")
    return b.finish(y)


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
def split_parts(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """One part of a split is written, another or the same is read."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    parts = b.call(aten.split.Tensor, buffer, 4)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, b.item(parts, 0), 3)
    y = b.call(aten.add.Tensor, b.item(parts, 1 if mended else 0), 1)
    b.join("s")
    return b.finish(buffer, y)


@program(RAW)
def several_results(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The second result of an operator is read on another stream."""
    x = b.input(4, 4)
    b.fork("s")
    with b.on("s"):
        found = b.call(aten.max.dim, x, 1)
    if mended:
        b.join("s")
    y = b.call(aten.add.Tensor, b.item(found, 1), 1)
    if not mended:
        b.join("s")
    return b.finish(b.item(found, 0), y)


@program(RAW)
def result_of_an_in_place_operator(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """What an in-place operator returns is the memory that it wrote."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("s")
    with b.on("s"):
        same = b.call(aten.add_.Tensor, buffer, 1)
    if mended:
        b.join("s")
    b.call(aten.mul_.Tensor, same, 3)
    if not mended:
        b.join("s")
    return b.finish(buffer)


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
