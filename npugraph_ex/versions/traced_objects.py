"""Dynamo's table of the streams and events that a graph mentions by number, and the current stream of a call in it."""

from __future__ import annotations

import weakref
from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.12 gives the current stream the number 0; before, it has any number, or several, or none.",
    since=(2, 12),
    new=(
        "torch._dynamo.graph_bytecode_inputs.set_external_object_by_index",
        "torch._dynamo.graph_bytecode_inputs.CURRENT_STREAM_INDEX",
    ),
    test="tests/streams/test_around_the_call.py",
)


def traced_current_stream() -> Any:
    """The current stream of the call that is being compiled."""
    from torch._dynamo import graph_bytecode_inputs as table

    if DIFFERENCE.older:
        import torch

        return torch.npu.current_stream()  # type: ignore[attr-defined]
    return table.get_external_object_by_index(table.CURRENT_STREAM_INDEX)


def current_stream_numbers() -> tuple[int, ...]:
    """The numbers of the current stream in the graph that is being compiled."""
    from torch._dynamo import graph_bytecode_inputs as table
    from torch._dynamo.source import CurrentStreamSource

    if not DIFFERENCE.older:
        return (table.CURRENT_STREAM_INDEX,)
    makers = table.index_to_bytecode_constructor.items()
    sources = {number: [cell.cell_contents for cell in make.__closure__ or ()] for number, make in makers}
    return tuple(n for n, found in sources.items() if any(isinstance(source, CurrentStreamSource) for source in found))


def replace_traced_object(number: int, value: object) -> None:
    """Set the object that a Dynamo number means during one call."""
    from torch._dynamo import graph_bytecode_inputs as table

    if DIFFERENCE.older:
        table.keep_alive.append(value)
        table.index_to_external_object_weakref[number] = weakref.ref(value)
    else:
        table.set_external_object_by_index(number, value)
