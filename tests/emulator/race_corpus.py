"""Small programs, each with a race and mended, for the detector and the schedules to agree about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Outputs = list[torch.Tensor]
CORPUS: dict[str, Callable[[bool], Outputs]] = {}


def program(function: Callable[[bool], Outputs]) -> Callable[[bool], Outputs]:
    """Add a program to the corpus; its argument says whether its race is mended."""
    CORPUS[function.__name__] = function
    return function


def main() -> Any:
    """Return the current stream."""
    return torch.npu.current_stream()


def side() -> Any:
    """Return a new stream that has waited for the current one, and on which no capture runs: the pool hands out each again."""
    taken = {main(), torch.npu.graph.default_capture_stream}
    stream = next(stream for stream in iter(torch.npu.Stream, None) if stream not in taken)
    stream.wait_stream(main())
    return stream


def on(stream: Any) -> Any:
    """Launch on a stream."""
    return torch.npu.stream(stream)


def numbers(*size: int) -> torch.Tensor:
    """Return 1, 2, 3 ... on the device."""
    return (torch.arange(torch.Size(size).numel(), device="npu") + 1).reshape(size)


@program
def write_then_read(mended: bool) -> Outputs:
    """A side stream writes, the main stream reads."""
    x, s = numbers(8), side()
    with on(s):
        x.mul_(3)
    if mended:
        main().wait_stream(s)
    return [x + 1]


@program
def read_then_write(mended: bool) -> Outputs:
    """A side stream reads what the main stream overwrites."""
    x, s = numbers(8), side()
    with on(s):
        y = x + 1
    if mended:
        main().wait_stream(s)
    x.zero_()
    return [x, y]


@program
def write_then_write(mended: bool) -> Outputs:
    """Two streams write the same memory."""
    x, s = numbers(8), side()
    with on(s):
        x.fill_(3)
    if mended:
        main().wait_stream(s)
    x.mul_(2)
    return [x]


@program
def overlapping_slices(mended: bool) -> Outputs:
    """Two slices that share two elements, or none."""
    x, s = numbers(8), side()
    with on(s):
        x[: 4 if mended else 6].mul_(3)
    x[4:].add_(1)
    return [x]


@program
def interleaved_views(mended: bool) -> Outputs:
    """Every second against every third element, or even against odd ones."""
    x, s = numbers(12), side()
    with on(s):
        x[::2].mul_(3)
    (x[1::2] if mended else x[::3]).add_(1)
    return [x]


@program
def column_blocks(mended: bool) -> Outputs:
    """Two column blocks of a matrix span the same addresses; they may share a column."""
    x, s = numbers(4, 6), side()
    with on(s):
        x[:, :3].mul_(3)
    x[:, 3 if mended else 2 :].add_(1)
    return [x]


@program
def row_against_column(mended: bool) -> Outputs:
    """A row and a column meet in one element."""
    x, s = numbers(4, 4), side()
    with on(s):
        x.t()[1][1 if mended else 0 :].mul_(3)
    x[0].add_(1)
    return [x]


@program
def expanded_input(mended: bool) -> Outputs:
    """A broadcast view reads one element many times while another stream changes it."""
    x, s = numbers(4), side()
    with on(s):
        x[1 if mended else 0].mul_(5)
    return [x[:1].expand(6) + 1, x]


@program
def event_recorded_too_early(mended: bool) -> Outputs:
    """The event is recorded before the write that it should cover."""
    x, s = numbers(8), side()
    with on(s):
        event = None if mended else s.record_event()
        x.mul_(3)
        event = event or s.record_event()
    main().wait_event(event)
    return [x + 1]


@program
def event_recorded_again(mended: bool) -> Outputs:
    """A wait covers the record before it, not the next one."""
    x, s, event = numbers(8), side(), torch.npu.Event()
    with on(s):
        x.mul_(3)
        event.record()
    main().wait_event(event)
    with on(s):
        x.add_(1)
        event.record()
    if mended:
        main().wait_event(event)
    return [x * 2]


@program
def event_waited_before_recorded(mended: bool) -> Outputs:
    """Waiting for an event that nobody has recorded yet orders nothing."""
    x, s, event = numbers(8), side(), torch.npu.Event()
    if not mended:
        main().wait_event(event)
    with on(s):
        x.mul_(3)
        event.record()
    if mended:
        main().wait_event(event)
    return [x + 1]


@program
def event_of_the_wrong_stream(mended: bool) -> Outputs:
    """The event is recorded on the stream that waits."""
    x, s = numbers(8), side()
    with on(s):
        x.mul_(3)
    main().wait_event((s if mended else main()).record_event())
    return [x + 1]


@program
def memory_reused(mended: bool) -> Outputs:
    """Memory that a side stream still reads is freed and handed out again; `record_stream` forbids it."""
    torch.npu.empty_cache()  # so that no other free block fits better
    x, s = torch.ones(1 << 18, device="npu"), side()
    with on(s):
        y = x + 1
    if mended:
        x.record_stream(s)
    del x
    z = torch.full((1 << 18,), 7.0, device="npu")
    main().wait_stream(s)
    return [y[:4], z[:4]]


@program
def chain_with_a_missing_link(mended: bool) -> Outputs:
    """Three streams in a row, the last link missing."""
    x, a, b = numbers(8), side(), side()
    with on(a):
        x.mul_(3)
    b.wait_stream(a)
    with on(b):
        x.add_(1)
    if mended:
        main().wait_stream(b)
    return [x * 2]


@program
def order_through_a_third_stream(mended: bool) -> Outputs:
    """An order that goes through a stream in between is an order."""
    x, a, b = numbers(8), side(), side()
    with on(a):
        x.mul_(3)
    if mended:
        b.wait_stream(a)
    main().wait_stream(b)
    return [x + 1]


@program
def two_readers_then_a_writer(mended: bool) -> Outputs:
    """The writer waits for one of two readers, or for both."""
    x, a, b = numbers(8), side(), side()
    with on(a):
        y = x + 1
    with on(b):
        z = x + 2
    main().wait_stream(a)
    if mended:
        main().wait_stream(b)
    x.zero_()
    return [x, y, z]


@program
def lanes_of_a_graph(mended: bool) -> Outputs:
    """Two lanes of one captured graph touch the same memory."""
    x, s, graph = numbers(8), side(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        s.wait_stream(main())
        with on(s):
            x.mul_(3)
        if mended:
            main().wait_stream(s)
        x.add_(1)
        main().wait_stream(s)
    graph.replay()
    return [x]


@program
def memory_reused_in_a_graph(mended: bool) -> Outputs:
    """Inside a capture a freed intermediate is handed out while another lane may still read it."""
    # A pool of its own in which the intermediate's block is the only one that fits, whatever this process did before.
    x, s, graph = numbers(1 << 18), side(), torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool=torch.npu.graph_pool_handle()):
        a = x + 1
        address = a.data_ptr()
        s.wait_stream(main())
        with on(s):
            b = a * 2
        if mended:
            main().wait_stream(s)
        del a
        c = x * 7
        assert c.data_ptr() == address, "the allocator did not hand the block out again; this program shows nothing"
        main().wait_stream(s)
    graph.replay()
    return [b[:4], c[:4]]


@program
def replay_against_eager(mended: bool) -> Outputs:
    """The input of a replay on another stream is overwritten."""
    x, graph = numbers(8), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x + 1
    s = side()
    with on(s):
        graph.replay()
    if mended:
        main().wait_stream(s)
    x.zero_()
    return [x, y]


@program
def replays_on_two_streams(mended: bool) -> Outputs:
    """One graph that works in place is replayed on two streams."""
    x, graph = numbers(8), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.mul_(2)
        x.add_(1)
    a, b = side(), side()
    with on(a):
        graph.replay()
    if mended:
        b.wait_stream(a)
    with on(b):
        graph.replay()
    return [x]


@program
def output_of_a_replay(mended: bool) -> Outputs:
    """A replay's output is read on a stream that did not wait for it."""
    x, graph = numbers(8), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x + 1
    y.zero_()
    s = side()
    with on(s):
        graph.replay()
    if mended:
        main().wait_stream(s)
    return [y * 2]


@program
def host_read(mended: bool) -> Outputs:
    """A copy to the host waits for its own stream only."""
    x, s, reader = numbers(8), side(), side()
    with on(s):
        x.mul_(3)
    if mended:
        reader.wait_stream(s)
    with on(reader):
        return [x.cpu()]


@program
def scalar_read(mended: bool) -> Outputs:
    """`item()` waits for its own stream only."""
    x, s = numbers(1), side()
    with on(s):
        x.mul_(3)
    if mended:
        s.synchronize()
    return [torch.tensor(x.item())]


@program
def host_waits_for_the_wrong_stream(mended: bool) -> Outputs:
    """Synchronising one stream says nothing about another."""
    x, s = numbers(8), side()
    with on(s):
        x.mul_(3)
    (s if mended else main()).synchronize()
    return [x + 1]


@program
def polled_event(mended: bool) -> Outputs:
    """An event that answered a query has happened."""
    x, s = numbers(8), side()
    with on(s):
        x.mul_(3)
        event = s.record_event()
    while mended and not event.query():
        s.query()
    return [x + 1]


@program
def pinned_buffer(mended: bool) -> Outputs:
    """Two streams copy to one pinned buffer."""
    x, s, host = numbers(8), side(), torch.zeros(8, dtype=torch.int64).pin_memory()
    y = x * 10
    with on(s):
        host.copy_(x, non_blocking=True)
    if mended:
        main().wait_stream(s)
    host.copy_(y, non_blocking=True)
    return [host]


@program
def uploaded_batch(mended: bool) -> Outputs:
    """A copy to the device that blocks the host is over when it returns; one that does not orders its own stream alone."""
    x, s = torch.empty(8, dtype=torch.int64, device="npu"), side()
    host = torch.arange(8).pin_memory()
    with on(s):
        x.copy_(host, non_blocking=not mended)
    return [x + 1]


@program
def made_from_a_list(mended: bool) -> Outputs:
    """`torch.tensor` copies from the host, and blocks it; `torch.full` fills on the device."""
    s = side()
    with on(s):
        x = torch.tensor([7] * 8, device="npu") if mended else torch.full((8,), 7, device="npu")
    return [x + 1]


@program
def event_of_the_allocator(mended: bool) -> Outputs:
    """What the allocator learns at its next allocation orders nothing for the program."""
    x, y, s = numbers(8), numbers(8), side()
    y.record_stream(s)
    with on(s):
        x.add_(y)
    del y
    if mended:
        main().wait_stream(s)
    return [x * 2]


@program
def external_event_waited_before_recorded(mended: bool) -> Outputs:
    """A wait for an external event ends with a record that is launched after it."""
    x, a, b, event = numbers(8), side(), side(), torch.npu.ExternalEvent()
    event.wait(b)
    event.reset(b)
    with on(b):
        y = x + 1
    if not mended:
        event.record(a)
    with on(a):
        x.mul_(3)
    if mended:
        event.record(a)
    main().wait_stream(a)
    main().wait_stream(b)
    return [x, y]


@program
def graph_waits_for_an_external_event(mended: bool) -> Outputs:
    """A captured wait orders what its graph does after it, and nothing before."""
    x, s, graph, event = numbers(8), side(), torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    y = torch.zeros_like(x)
    with torch.npu.graph(graph):
        if not mended:
            y.add_(x)
        event.wait(main())
        event.reset(main())
        if mended:
            y.add_(x)
    with on(s):
        graph.replay()
    x.mul_(3)
    event.record(main())
    main().wait_stream(s)
    return [x, y]


@program
def graph_records_for_a_graph(mended: bool) -> Outputs:
    """A graph waits inside for what another one, replayed later, records inside."""
    x, a, b, event = numbers(8), side(), side(), torch.npu.ExternalEvent()
    y, records, waits = torch.zeros_like(x), torch.npu.NPUGraph(), torch.npu.NPUGraph()
    with torch.npu.graph(records):
        if not mended:
            event.record(main())
        x.mul_(3)
        if mended:
            event.record(main())
    with torch.npu.graph(waits):
        event.wait(main())
        event.reset(main())
        y.add_(x)
    a.wait_stream(main())
    b.wait_stream(main())
    with on(b):
        waits.replay()
    with on(a):
        records.replay()
    main().wait_stream(a)
    main().wait_stream(b)
    return [x, y]


@program
def foreach_update(mended: bool) -> Outputs:
    """A multi-tensor update on a side stream, read on the main one."""
    xs, s = [numbers(4), numbers(3)], side()
    with on(s):
        torch._foreach_mul_(xs, 3)
    if mended:
        main().wait_stream(s)
    return [xs[1] + 1]
