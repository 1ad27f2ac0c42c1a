"""What streams and events order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import torch

from npugraph_ex_conformance.fidelity.rule import (
    ASSUMED,
    HEADER,
    RUNTIME,
    TORCH,
    TORCH_NPU,
    DeviceRule,
    code,
    held,
    ones,
)

_STREAMS = f"{TORCH}: CUDA semantics, by analogy"


def _ordered(how: str) -> list[float]:
    side, x = torch.npu.Stream(), ones()
    main = torch.npu.current_stream()
    side.wait_stream(main)
    with torch.npu.stream(side):
        y = x * 3
        event = side.record_event()
    if how == "stream":
        main.wait_stream(side)
    elif how == "event":
        main.wait_event(event)
    elif how == "host-event":
        event.synchronize()
    elif how == "host-stream":
        side.synchronize()
    else:
        torch.npu.synchronize()
    return (y + 1).tolist()


def _record_again() -> float:
    """A wait for an event is for the record before it."""
    first, second, event, x = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Event(), torch.zeros(1, device="npu")
    first.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(first):
        x.add_(1)
        event.record()
    with torch.npu.stream(second):
        event.wait()
        x.mul_(10)
    first.wait_event(second.record_event())
    with torch.npu.stream(first):
        x.add_(5)
        event.record()
    torch.npu.current_stream().wait_event(event)
    return float(x.item())


def _complete() -> bool:
    event = torch.npu.current_stream().record_event()
    torch.npu.synchronize()
    return bool(event.query())


def _queue() -> float:
    x = ones()
    for factor in (2, 3, 5):
        x = x * factor + 1
    return float(x[0].item())


def _polled() -> bool:
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        ones().add_(1)
    return any(side.query() for _ in range(1_000_000))


def _times(one: bool, other: bool) -> str:
    a, b = torch.npu.Event(enable_timing=one), torch.npu.Event(enable_timing=other)
    a.record()
    b.record()
    torch.npu.synchronize()
    return held(lambda: a.elapsed_time(b))


def _time() -> bool:
    a, b = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    a.record()
    ones(1000).exp()
    b.record()
    b.synchronize()
    return bool(0 <= a.elapsed_time(b) < 60_000)


def _threads() -> list[float]:
    found: dict[int, float] = {}

    def work(number: int) -> None:
        with torch.npu.stream(torch.npu.Stream()):
            x = torch.full((16,), float(number), device="npu")
            for _ in range(20):
                x = x + 1
            found[number] = float(x[0].item())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(4)]


def _current_of_thread() -> bool:
    """A thread begins on the default stream, whatever the stream of the thread that made it."""
    found: list[bool] = []
    with torch.npu.stream(torch.npu.Stream()):
        thread = threading.Thread(target=lambda: found.append(torch.npu.current_stream() == torch.npu.default_stream()))
        thread.start()
        thread.join()
    return found[0]


def rules() -> Iterator[DeviceRule]:
    """The rules."""
    yield DeviceRule("stream.is-a-queue", "Work on a stream happens in launch order.", _STREAMS, _queue, 51.0)
    for how, what in {
        "stream": "wait_stream",
        "event": "wait_event",
        "host-event": "Event.synchronize",
        "host-stream": "Stream.synchronize",
        "device": "torch.npu.synchronize",
    }.items():
        yield DeviceRule(
            f"stream.order-{how}", f"{what} orders what comes after it behind the other stream's work.", _STREAMS,
            partial(_ordered, how), [4.0] * 4,
        )  # fmt: skip
    yield DeviceRule(
        "event.first-record", "A wait is for the record before it; a later record does not move it.", _STREAMS,
        _record_again, 15.0,
    )  # fmt: skip
    yield DeviceRule(
        "event.unrecorded-wait", "A wait for an event that was never recorded returns at once.", _STREAMS,
        lambda: code(torch.npu.Event().wait), "done",
    )  # fmt: skip
    yield DeviceRule(
        "event.unrecorded-query", "An event that was never recorded counts as complete.", _STREAMS,
        lambda: torch.npu.Event().query(), True,
    )  # fmt: skip
    yield DeviceRule(
        "event.complete", "An event is complete after a synchronisation.", _STREAMS,
        _complete, True,
    )  # fmt: skip
    yield DeviceRule(
        "event.time", "Two timing events give milliseconds that are not negative.", f"{RUNTIME}: aclrtEventElapsedTime",
        _time, True,
    )  # fmt: skip
    yield DeviceRule(
        "event.time-needs-both", "The time to an event without enable_timing is an error.",
        f"{HEADER}: 107006, event timestamp invalid", lambda: _times(one=True, other=False), "107006",
    )  # fmt: skip
    yield DeviceRule(
        "event.time-needs-first", "The time from an event without enable_timing is an error.",
        f"{HEADER}: 107006, event timestamp invalid", lambda: _times(one=False, other=True), "107006",
    )  # fmt: skip
    yield DeviceRule("stream.polling-ends", "A loop that queries a stream ends.", _STREAMS, _polled, True)
    yield DeviceRule(
        "stream.threads", "Threads that launch at once on streams of their own do not disturb one another.", _STREAMS,
        _threads, [20.0, 21.0, 22.0, 23.0],
    )  # fmt: skip
    yield DeviceRule(
        "stream.of-a-thread", "A new thread begins on the default stream.", _STREAMS, _current_of_thread, True,
    )  # fmt: skip
    yield DeviceRule(
        "stream.pool", "torch_npu deals out 32 streams in turn, and then the first again.", f"{TORCH_NPU}: NPUStream.cpp",
        lambda: len({torch.npu.Stream().npu_stream for _ in range(80)}), 32,
    )  # fmt: skip
    yield DeviceRule(
        "stream.default", "The current stream is the default one at first.", _STREAMS,
        lambda: torch.npu.current_stream() == torch.npu.default_stream(), True,
    )  # fmt: skip
    yield DeviceRule(
        "stream.default-id", "The default stream's number is 0.", _STREAMS, lambda: torch.npu.default_stream().stream_id,
        0,
    )  # fmt: skip
    yield DeviceRule(
        "stream.priority", "A stream is made whatever priority the program asks for.", ASSUMED,
        lambda: held(lambda: torch.npu.Stream(priority=-1)), "done",
    )  # fmt: skip
    yield DeviceRule(
        "stream.idle-query", "A stream without work is idle.", _STREAMS,
        lambda: (torch.npu.synchronize(), torch.npu.Stream().query())[1], True,
    )  # fmt: skip
