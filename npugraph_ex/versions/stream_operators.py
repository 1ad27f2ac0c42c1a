"""Dynamo's operators with which the host waits for a stream, an event or the device."""

from __future__ import annotations

from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.12 traces `synchronize` of a stream, an event or the device as an operator; torch before has no such operators.",
    since=(2, 12),
    test="tests/streams/test_events.py",
)


def host_wait(name: str) -> Any:
    """The operator ``torch.ops.streams.synchronize_<name>``; where torch has none, an object that no node has as its target."""
    import torch

    return getattr(torch.ops.streams, f"synchronize_{name}", _ABSENT)


_ABSENT = object()
