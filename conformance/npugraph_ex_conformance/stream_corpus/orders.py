"""Stream graphs whose mistake is a missing order, fork or join, in every way of writing streams."""

from __future__ import annotations

from torch import fx

from npugraph_ex.report.findings import Code
from npugraph_ex.testing.streams.builder import StreamBuilder
from npugraph_ex_conformance.stream_corpus.programs import RAW, WAR, WAW, aten, program


@program(WAR)
def input_overwritten(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream reads an input that the main stream writes back."""
    x, new = b.input(8), b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.add.Tensor, x, 1)
    if mended:
        b.join("s")
    b.call(aten.copy_.default, x, new)
    if not mended:
        b.join("s")
    return b.finish(y)


@program(WAW)
def write_then_write(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Two streams fill the same memory."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("s")
    with b.on("s"):
        b.call(aten.fill_.Scalar, buffer, 3)
    if mended:
        b.join("s")
    b.call(aten.fill_.Scalar, buffer, 5)
    if not mended:
        b.join("s")
    return b.finish(buffer)


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


@program(RAW)
def event_recorded_again(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A wait is for the latest record before it: of both values, or of the first only."""
    x = b.input(8)
    b.tagged_record("start")
    with b.scope("s"):
        b.tagged_wait("start")
        y = b.call(aten.mul.Tensor, x, 3)
        b.tagged_record("ready")
        z = b.call(aten.add.Tensor, y, 1)
        if mended:
            b.tagged_record("ready")
    b.tagged_wait("ready")
    w = b.call(aten.mul.Tensor, z, 5)
    if not mended:
        with b.scope("s"):
            b.tagged_record("ready")
        b.tagged_wait("ready")
    return b.finish(w)


@program(RAW)
def wait_before_its_record(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The wait stands where its event was not recorded yet, and so waits for nothing."""
    x = b.input(8)
    b.tagged_record("start")
    if not mended:
        b.tagged_wait("ready")
    with b.scope("s"):
        b.tagged_wait("start")
        y = b.call(aten.mul.Tensor, x, 3)
        b.tagged_record("ready")
    if mended:
        b.tagged_wait("ready")
    z = b.call(aten.add.Tensor, y, 1)
    if not mended:
        b.tagged_wait("ready")
    return b.finish(z)


@program(RAW)
def wait_for_the_wrong_tensor(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A wait on tensors waits for what computes them, and for nothing after it on their stream."""
    x = b.input(8)
    b.tagged_record("start")
    with b.scope("s"):
        b.tagged_wait("start")
        first = b.call(aten.mul.Tensor, x, 3)
        second = b.call(aten.add.Tensor, x, 1)
    b.wait(second if mended else first)
    y = b.call(aten.mul.Tensor, second, 5)
    if not mended:
        b.wait(second)
    return b.finish(first, y)


@program(WAR)
def native_and_tagged_streams(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A stream object of the program's reads what a tagged stream overwrites; an event of either kind orders them."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.tagged_record("start")
    with b.scope("torch.npu.Stream 1"):
        b.tagged_wait("start")
        y = b.call(aten.add.Tensor, buffer, 1)
        b.tagged_record("torch.npu.Event 1")
    with b.scope("side"):
        b.tagged_wait("torch.npu.Event 1" if mended else "start")
        b.call(aten.mul_.Tensor, buffer, 3)
        b.tagged_record("end")
    for tag in ("torch.npu.Event 1", "end"):
        b.tagged_wait(tag)
    return b.finish(buffer, y)


@program(RAW)
def nested_scopes(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A scope inside another one is another stream; the outer one reads what the inner one computes."""
    x = b.input(8)
    b.tagged_record("start")
    with b.scope("outer"):
        b.tagged_wait("start")
        y = b.call(aten.mul.Tensor, x, 3)
        b.tagged_record("outer")
        with b.scope("inner"):
            b.tagged_wait("outer")
            z = b.call(aten.add.Tensor, y, 1)
            b.tagged_record("inner")
        if mended:
            b.tagged_wait("inner")
        w = b.call(aten.mul.Tensor, z, 5)
        if not mended:
            b.tagged_wait("inner")
        b.tagged_record("end")
    b.tagged_wait("end")
    return b.finish(w)


@program(RAW)
def limited_stream(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A core limit around a part of a stream's work is no stream of its own and orders nothing."""
    x = b.input(8)
    b.tagged_record("start")
    with b.scope("s"):
        b.tagged_wait("start")
        with b.limit(4, 8):
            y = b.call(aten.mul.Tensor, x, 3)
            b.tagged_record("ready")
            z = b.call(aten.add.Tensor, y, 1)
        b.tagged_record("end")
    b.tagged_wait("end" if mended else "ready")
    w = b.call(aten.mul.Tensor, z, 5)
    if not mended:
        b.tagged_wait("end")
    return b.finish(w)
