"""Dynamo's table of the streams and events that a graph mentions by number."""

from __future__ import annotations

import weakref

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.12 has a function that replaces an object of the table; before, the table itself is written.",
    since=(2, 12),
    new=("torch._dynamo.graph_bytecode_inputs.set_external_object_by_index",),
    test="tests/streams/test_around_the_call.py",
)


def replace_traced_object(number: int, value: object) -> None:
    """Set the object that a Dynamo number means during one call."""
    from torch._dynamo import graph_bytecode_inputs as table

    if DIFFERENCE.older:
        table.keep_alive.append(value)
        table.index_to_external_object_weakref[number] = weakref.ref(value)
    else:
        table.set_external_object_by_index(number, value)
