"""Several threads call compiled functions that take streams: each call runs on its own thread's streams."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager

import pytest
import torch
from torch._dynamo import graph_bytecode_inputs

from npugraph_ex.aclgraph import side_streams


def twice(x: torch.Tensor, stream: torch.npu.Stream) -> torch.Tensor:
    """Twice ``x``, on a stream, with an event that the function makes itself."""
    event = torch.npu.Event()
    with torch.npu.stream(stream):
        y = x * 2
        event.record()
    event.wait()
    return y


@pytest.mark.parametrize("compiles", [False, True], ids=["calls", "compiles"])
def test_another_threads_call_leaves_a_calls_streams_alone(monkeypatch: pytest.MonkeyPatch, *, compiles: bool) -> None:
    """Another thread calls, or compiles, after Dynamo's code has stored this call's streams and before the graph reads them."""
    compiled = torch.compile(twice, backend="npugraph_ex", fullgraph=True)
    mine, others, x = torch.npu.Stream(), torch.npu.Stream(), torch.ones(4, device="npu")
    store, standing_for = graph_bytecode_inputs.store_user_object_weakrefs, side_streams.standing_for
    used: list[torch.npu.Stream] = []

    @torch.no_grad()  # a property of the thread
    def elsewhere() -> None:
        (torch.compile(lambda *args: twice(*args) * 3, backend="npugraph_ex") if compiles else compiled)(x, others)

    def interrupted(*objects: object) -> None:
        monkeypatch.setattr(graph_bytecode_inputs, "store_user_object_weakrefs", store)
        store(*objects)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    def noted(streams: Mapping[str, torch.npu.Stream]) -> AbstractContextManager[None]:
        used.extend(streams.values())
        return standing_for(streams)

    with torch.no_grad():
        compiled(x, mine)
        compiled(x, others)
        monkeypatch.setattr(side_streams, "standing_for", noted)
        monkeypatch.setattr(graph_bytecode_inputs, "store_user_object_weakrefs", interrupted)
        assert compiled(x, mine).tolist() == [2] * 4
    assert used == [others, mine]
