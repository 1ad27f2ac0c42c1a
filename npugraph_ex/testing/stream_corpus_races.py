"""Programs of the corpus whose mistake is a missing order between two accesses to the same bytes."""

from __future__ import annotations

from torch import fx

from npugraph_ex.testing.stream_builder import StreamBuilder
from npugraph_ex.testing.stream_programs import RAW, WAR, WAW, aten, program


@program(RAW)
def write_then_read(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream computes, the main stream reads."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
    if mended:
        b.join("s")
    z = b.call(aten.add.Tensor, y, 1)
    if not mended:
        b.join("s")
    return b.finish(z)


@program(WAR)
def read_then_write(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A side stream reads what the main stream overwrites."""
    x = b.input(8)
    buffer = b.call(aten.mul.Tensor, x, 2)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.add.Tensor, buffer, 1)
    if mended:
        b.join("s")
    b.call(aten.zero_.default, buffer)
    if not mended:
        b.join("s")
    return b.finish(buffer, y)


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


@program(RAW)
def update_then_update(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Two streams update the same memory in place; neither update may be lost."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("s")
    with b.on("s"):
        b.call(aten.mul_.Tensor, buffer, 3)
    if mended:
        b.join("s")
    b.call(aten.add_.Tensor, buffer, 1)
    if not mended:
        b.join("s")
    return b.finish(buffer)


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


@program(RAW)
def between_two_side_streams(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """One side stream reads what another computes; the main stream has no part in it."""
    x = b.input(8)
    b.fork("a", "c")
    with b.on("a"):
        y = b.call(aten.mul.Tensor, x, 3)
    if mended:
        b.order("a", "c")
    with b.on("c"):
        z = b.call(aten.add.Tensor, y, 1)
    b.join("a", "c")
    return b.finish(z)


@program(RAW)
def order_through_a_third_stream(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """An order that goes through a stream in between is an order; with its first link missing it is none."""
    x = b.input(8)
    b.fork("a", "c")
    with b.on("a"):
        y = b.call(aten.mul.Tensor, x, 3)
    if mended:
        b.order("a", "c")
    with b.on("c"):
        w = b.call(aten.sub.Tensor, x, 1)
    b.join("c")
    z = b.call(aten.add.Tensor, y, 1)
    if not mended:
        b.join("a")
    return b.finish(z, w)


@program(RAW)
def record_too_early(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The event is recorded before the work that is waited for."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        a = b.call(aten.add.Tensor, x, 7)
        early = b.record()
        y = b.call(aten.mul.Tensor, a, 3)
        late = b.record()
    b.wait(late if mended else early)
    z = b.call(aten.add.Tensor, y, 1)
    if not mended:
        b.wait(late)
    return b.finish(z)


@program(RAW)
def wait_too_late(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The wait stands after the first reader, and before the second."""
    x = b.input(8)
    b.fork("s")
    with b.on("s"):
        y = b.call(aten.mul.Tensor, x, 3)
        record = b.record()
    if mended:
        b.wait(record)
    first = b.call(aten.add.Tensor, y, 1)
    if not mended:
        b.wait(record)
    second = b.call(aten.add.Tensor, y, 2)
    return b.finish(first, second)


@program(RAW)
def wait_on_the_wrong_stream(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """Another stream than the reader's waits."""
    x = b.input(8)
    b.fork("a", "c")
    with b.on("a"):
        y = b.call(aten.mul.Tensor, x, 3)
        record = b.record()
    if mended:
        b.wait(record)
    else:
        with b.on("c"):
            b.wait(record)
    with b.on("c"):
        w = b.call(aten.sub.Tensor, x, 1)
    z = b.call(aten.add.Tensor, y, 1)
    b.join("c")
    return b.finish(z, w)


@program(RAW)
def wait_for_the_wrong_event(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The reader waits, for the event of another stream."""
    x = b.input(8)
    b.fork("a", "c")
    with b.on("a"):
        y = b.call(aten.mul.Tensor, x, 3)
        right = b.record()
    with b.on("c"):
        w = b.call(aten.sub.Tensor, x, 1)
        wrong = b.record()
    b.wait(right if mended else wrong)
    z = b.call(aten.add.Tensor, y, 1)
    b.wait(wrong if mended else right)
    return b.finish(z, w)


@program(RAW)
def one_of_two_joins(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The main stream adds the results of two streams and waits for one, or for both."""
    x = b.input(8)
    b.fork("a", "c")
    with b.on("a"):
        y = b.call(aten.mul.Tensor, x, 3)
    with b.on("c"):
        z = b.call(aten.mul.Tensor, x, 5)
    b.join("a")
    if mended:
        b.join("c")
    total = b.call(aten.add.Tensor, y, z)
    if not mended:
        b.join("c")
    return b.finish(total)


@program(WAR)
def two_readers_then_a_writer(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """The writer waits for one of two readers, or for both."""
    buffer = b.call(aten.mul.Tensor, b.input(8), 2)
    b.fork("a", "c")
    with b.on("a"):
        y = b.call(aten.add.Tensor, buffer, 1)
    with b.on("c"):
        z = b.call(aten.add.Tensor, buffer, 2)
    b.join("a")
    if mended:
        b.join("c")
    b.call(aten.zero_.default, buffer)
    if not mended:
        b.join("c")
    return b.finish(buffer, y, z)


@program(RAW, RAW)
def two_streams_read_one_event(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """One event is waited for by two streams, or by none of them."""
    x = b.input(8)
    b.fork("a", "c", "d")
    with b.on("a"):
        y = b.call(aten.mul.Tensor, x, 3)
        record = b.record()
    found: list[fx.Node] = []
    for stream in ("c", "d"):
        with b.on(stream):
            if mended:
                b.wait(record)
            found.append(b.call(aten.add.Tensor, y, len(found)))
    b.join("a", "c", "d")
    return b.finish(*found)


@program(WAR)
def double_buffer(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A producer refills a buffer that its consumer may still read."""
    x, buffer = b.input(8), b.call(aten.mul.Tensor, b.input(8), 1)
    b.fork("consumer")
    results = []
    for step in range(2):
        if step and mended:
            b.join("consumer")
        b.call(aten.copy_.default, buffer, b.call(aten.add.Tensor, x, step))
        b.order("", "consumer")
        with b.on("consumer"):
            results.append(b.call(aten.mul.Tensor, buffer, 10))
    b.join("consumer")
    return b.finish(*results)
