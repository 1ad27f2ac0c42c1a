"""Programs of the corpus as users write them: scopes, nested and with priorities, tagged events, waits on tensors, all mixed."""

from __future__ import annotations

from torch import fx

from npugraph_ex.testing.stream_builder import StreamBuilder
from npugraph_ex.testing.stream_programs import RAW, WAR, aten, program


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
def urgent_stream(b: StreamBuilder, *, mended: bool) -> fx.GraphModule:
    """A stream of higher priority reads what one of lower priority computes: priority is no order."""
    x = b.input(8)
    b.tagged_record("start")
    with b.scope("patient", priority=0):
        b.tagged_wait("start")
        y = b.call(aten.mul.Tensor, x, 3)
        b.tagged_record("ready")
    with b.scope("urgent", priority=-1):
        b.tagged_wait("ready" if mended else "start")
        z = b.call(aten.add.Tensor, y, 1)
        b.tagged_record("end")
    for tag in ("ready", "end"):
        b.tagged_wait(tag)
    return b.finish(z)


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
