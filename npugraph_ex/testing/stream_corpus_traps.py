"""Programs of the corpus after traps that shipped systems fell into: write-backs, chains, custom operators, sizes, pools."""

from __future__ import annotations

import operator

import torch
from torch import fx

from npugraph_ex.report.findings import Code
from npugraph_ex.testing.stream_builder import StreamBuilder
from npugraph_ex.testing.stream_programs import RAW, WAR, WAW, aten, program

_LIBRARY = torch.library.Library("npugraph_ex_corpus", "FRAGMENT")
_LIBRARY.define("scale_two_(Tensor(a!) x, Tensor(b!) y, Tensor factor) -> ()")


def _scale_two(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> None:
    x.mul_(factor)
    y.mul_(factor)


_LIBRARY.impl("scale_two_", _scale_two, "CompositeExplicitAutograd")


@program(WAR)
def write_back_of_a_slice(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream reads the end of an input while a part of it is written back: the last elements, or the first."""
    x, new = b.input(8), b.input(4)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.add.Tensor, b.call(aten.slice.Tensor, x, 0, 4, 8), 1)
    start = 0 if mended else 3
    b.call(aten.copy_.default, b.call(aten.slice.Tensor, x, 0, start, start + 4), new)
    b.join("s")
    return b.finish(y)


@program(WAW)
def two_write_backs(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Two streams write the same input back."""
    x, one, two = b.input(8), b.input(8), b.input(8)
    b.fork("a", "c")
    with b.on("a"):
        b.call(aten.copy_.default, x, one)
    if mended:
        b.order("a", "c")
    with b.on("c"):
        b.call(aten.copy_.default, x, two)
    b.join("a", "c")
    return b.finish(b.call(aten.add.Tensor, one, two))


@program(Code.OUTPUT_UNORDERED)
def output_that_is_a_view_of_an_input(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream writes an input, a part of which is handed out."""
    x = b.input(8)
    part = b.call(aten.slice.Tensor, x, 0, 2, 6)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, x, 3)
    if mended:
        b.join("s")
    return b.finish(part)


@program(RAW)
def concatenation_on_a_third_stream(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A stream joins what two others compute, and waits for one of them."""
    x = b.input(4)
    b.fork("a", "c", "d")
    with b.on("a"):
        one = b.call(aten.mul.Tensor, x, 3)
    with b.on("c"):
        two = b.call(aten.mul.Tensor, x, 5)
    b.order("a", "d")
    if mended:
        b.order("c", "d")
    with b.on("d"):
        whole = b.call(aten.cat.default, [one, two])
    b.join("a", "c", "d")
    return b.finish(whole)


@program(RAW)
def chain_of_four_streams(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Each of four streams goes on from the one before; one link waits for the stream before that."""
    x = b.input(8)
    streams = ("a", "c", "d", "e")
    b.fork(*streams)
    before = ""
    for number, stream in enumerate(streams):
        source = "a" if stream == "d" and not mended else before
        if source:
            b.order(source, stream)
        with b.on(stream):
            x = b.call(aten.add.Tensor, x, number + 3)
        before = stream
    b.join(*streams)
    return b.finish(x)


@program(RAW)
def ping_pong(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Two streams update one buffer in turn; once the turn is not handed over."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("a", "c")
    for turn, (stream, other) in enumerate((("a", "c"), ("c", "a"), ("a", "c"), ("c", "a"))):
        with b.on(stream):
            b.call(aten.mul_.Tensor, buffer, 3) if turn % 2 else b.call(aten.add_.Tensor, buffer, turn + 1)
        if turn in {0, 2} or (turn == 1 and mended):
            b.order(stream, other)
    b.join("c")
    return b.finish(buffer)


@program(RAW)
def forked_too_early(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream waits for the main one as it was before the value that it reads."""
    x = b.input(8)
    if not mended:
        b.fork("s")
    y = b.call(aten.mul.Tensor, x, 3)
    if mended:
        b.fork("s")
    with b.on("s"):
        z = b.call(aten.add.Tensor, y, 1)
    b.join("s")
    return b.finish(z)


@program(RAW)
def used_again_without_a_second_fork(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A stream that was forked and joined is used again for what the main stream did since."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
    b.join("s")
    z = b.call(aten.add.Tensor, y, 1)
    if mended:
        b.fork("s")
    with b.on("s"):
        w = b.call(aten.mul.Tensor, z, 5)
    b.join("s")
    return b.finish(z, w)


@program(RAW)
def a_row_of_unbind(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """One of many results that are views is written, and another, or the whole, is read."""
    buffer = b.call(aten.mul.Tensor, b.input(3, 4), 2)
    rows = b.call(aten.unbind.int, buffer)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, b.item(rows, 1), 3)
    y = b.call(aten.add.Tensor, b.item(rows, 2) if mended else buffer, 1)
    b.join("s")
    return b.finish(buffer, y)


@program(RAW)
def copy_of_a_transposed_view(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The lower rows of a matrix are written, and its transposed upper or middle rows are copied."""
    buffer = b.call(aten.mul.Tensor, b.input(4, 4), 2)
    target = b.call(aten.full_like.default, b.call(aten.slice.Tensor, b.call(aten.t.default, buffer), 1, 0, 2), 0)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 0, 2, 4), 3)
    start = 0 if mended else 1
    part = b.call(aten.slice.Tensor, b.call(aten.t.default, buffer), 1, start, start + 2)
    b.call(aten.copy_.default, target, part)
    b.join("s")
    return b.finish(buffer, target)


@program(RAW)
def sliding_windows(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Windows over a buffer, made by strides; the written element lies in one of them, or behind the last."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.sum.dim_IntList, b.call(aten.as_strided.default, buffer, [3, 3], [2, 1], 0), [1])
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 0, 7, 8), 3)
    z = b.call(aten.add.Tensor, b.call(aten.slice.Tensor, buffer, 0, 0 if mended else 7, 1 if mended else 8), 1)
    b.join("s")
    return b.finish(buffer, y, z)


@program(RAW)
def custom_operator_on_slices(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A custom operator writes two slices in place, as its schema says; the reader's slice lies between them, or not."""
    buffer, factor = b.call(aten.mul.Tensor, b.input(8), 2), b.input(1)
    b.fork("s")
    with b.on("s"):
        ends = [b.call(aten.slice.Tensor, buffer, 0, start, start + 2) for start in (0, 6)]
        b.call(torch.ops.npugraph_ex_corpus.scale_two_.default, *ends, factor)
    y = b.call(aten.add.Tensor, b.call(aten.slice.Tensor, buffer, 0, 2, 6 if mended else 7), 1)
    b.join("s")
    return b.finish(buffer, y)


@program(WAR)
def argument_of_a_custom_operator(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """What a custom operator only reads is overwritten while it runs."""
    x, factor = b.input(8), b.call(aten.mul.Tensor, b.input(1), 2)
    one, two = (b.call(aten.add.Tensor, x, number) for number in (1, 2))
    b.fork("s")
    with b.on("s"):
        b.call(torch.ops.npugraph_ex_corpus.scale_two_.default, one, two, factor)
    if mended:
        b.join("s")
    b.call(aten.fill_.Scalar, factor, 9)
    if not mended:
        b.join("s")
    return b.finish(one, two, factor)


@program(RAW)
def scattered_write(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Elements are added where an index says, so which ones is not known, and the whole is read."""
    buffer, rows = b.call(aten.mul.Tensor, b.input(4), 2), b.input(3)
    where = b.call(aten.full_like.default, rows, 1, dtype=torch.int64)
    b.fork("s")
    with b.on("s"):
        b.call(aten.index_add_.default, buffer, 0, where, rows)
    if mended:
        b.join("s")
    y = b.call(aten.sum.default, buffer)
    if not mended:
        b.join("s")
    return b.finish(buffer, y, where)


@program(RAW)
def dynamic_size(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The size is a symbol: the first half is computed on a side stream, and the whole is read."""
    x = b.input(b.symbol(8))
    buffer = b.call(aten.mul.Tensor, x, 2)
    half = b.call(operator.floordiv, b.call(aten.sym_size.int, x, 0), 2)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, b.call(aten.slice.Tensor, buffer, 0, 0, half), 3)
    if mended:
        b.join("s")
    y = b.call(aten.add.Tensor, buffer, 1)
    if not mended:
        b.join("s")
    return b.finish(y)


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
