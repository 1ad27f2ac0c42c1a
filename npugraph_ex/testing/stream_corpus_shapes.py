"""Programs of the corpus whose mistake is a fork, a join, an event, or the life of memory."""

from __future__ import annotations

from torch import fx

from npugraph_ex.report.findings import Code
from npugraph_ex.testing.stream_builder import StreamBuilder
from npugraph_ex.testing.stream_programs import aten, program


@program(Code.NEVER_FORKED)
def never_forked(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream reads an input, and does not wait for it to be there."""
    x = b.input(8)
    if mended:
        b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
    b.join("s")
    return b.finish(y)


@program(Code.NEVER_FORKED, Code.WAIT_ORDERS_NOTHING)
def forked_from_a_stream_that_was_not(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A fork of a fork is one; a fork of a stream that waited for nothing is none."""
    x = b.input(8)
    if mended:
        b.fork("a")
    b.order("a", "c")
    with b.on("c"):
        y = b.call(aten.mul.Tensor, x, 3)
    b.join("c")
    return b.finish(y)


@program(Code.OUTPUT_UNORDERED)
def output_of_a_side_stream(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """An output is computed on a side stream, and nobody waits for it."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
    if mended:
        b.join("s")
    return b.finish(y)


@program(Code.OUTPUT_UNORDERED)
def view_of_a_side_stream(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """An output is a view of what a side stream computes."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
    part = b.call(aten.slice.Tensor, y, 0, 2, 6)
    if mended:
        b.join("s")
    return b.finish(part)


@program(Code.OUTPUT_UNORDERED)
def join_before_the_last_work(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The main stream waits for a side stream's first result; its second is an output too."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
    b.join("s")
    with b.on("s"):
        z = b.call(aten.add.Tensor, x, 3)
    if mended:
        b.join("s")
    return b.finish(y, z)


@program(Code.WRITE_BACK_UNORDERED)
def write_back(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream writes an input, and nobody waits for it."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        b.call(aten.add_.Tensor, x, 1)
    if mended:
        b.join("s")
    return b.finish(b.call(aten.mul.Tensor, b.call(aten.full_like.default, x, 2), 3))


@program(Code.WRITE_BACK_UNORDERED)
def write_back_after_the_join(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The copy into an input stands behind the join of its stream."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.add.Tensor, x, 1)
    b.join("s")
    with b.on("s"):
        b.call(aten.copy_.default, x, y)
    if mended:
        b.join("s")
    return b.finish(b.call(aten.add.Tensor, y, 5))


@program(Code.NEVER_JOINED)
def never_joined(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream's last work, whose result nobody needs, is not over when the graph ends."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
    b.join("s")
    if not mended:
        with b.on("s"):
            b.call(aten.add.Tensor, x, 3)
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
def freed_while_the_main_stream_reads(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream's memory is used again on that stream while the main stream may still read it."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 2)
    b.join("s")
    z = b.call(aten.add.Tensor, y, 1)
    if mended:
        b.fork("s")
    with b.on("s"):
        w = b.call(aten.mul.Tensor, x, 5)
    b.join("s")
    return b.finish(z, w)


@program(Code.MEMORY_REUSED)
def freed_after_a_view_was_read(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A view keeps its memory alive until its own last use, and no longer."""
    x = b.input(8)
    y = b.call(aten.mul.Tensor, x, 2)
    part = b.call(aten.slice.Tensor, y, 0, 2, 6)
    b.fork("s")
    with b.on("s"):
        z = b.call(aten.add.Tensor, part, 1)
    if mended:
        b.join("s")
    w = b.call(aten.mul.Tensor, x, 5)
    if not mended:
        b.join("s")
    return b.finish(z, w)


@program(Code.MEMORY_REUSED)
def alive_until_the_join(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A later use keeps memory from being handed out while a side stream reads it."""
    x = b.input(8)
    y = b.call(aten.mul.Tensor, x, 2)
    b.fork("s")
    with b.on("s"):
        z = b.call(aten.add.Tensor, y, 1)
    w = b.call(aten.mul.Tensor, x, 5)
    v = b.call(aten.mul.Tensor, x, 7)
    b.join("s")
    outputs = [z, w, v]
    if mended:
        outputs.append(b.call(aten.sub.Tensor, y, 1))
    return b.finish(*outputs)


@program(Code.READ_AFTER_WRITE, notes=(Code.WAIT_ORDERS_NOTHING,))
def wait_that_orders_nothing(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A second wait for the same event, where the wait for another one was meant."""
    x = b.input(8)
    b.fork("a", "c")
    with b.on("a"):
        y = b.call(aten.mul.Tensor, x, 3)
        first = b.record()
    with b.on("c"):
        z = b.call(aten.mul.Tensor, x, 5)
        second = b.record()
    b.wait(first)
    b.wait(first)
    if mended:
        b.wait(second)
    total = b.call(aten.add.Tensor, y, z)
    if not mended:
        b.wait(second)
    return b.finish(total)


@program(Code.NEVER_JOINED, Code.WAIT_ORDERS_NOTHING)
def wait_at_the_end_of_a_stream(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A stream waits and then has nothing to do: nobody is ordered, and the capture is left open."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
    b.join("s")
    z = b.call(aten.add.Tensor, y, 1)
    if not mended:
        b.order("", "s")
    return b.finish(z)
