"""Dynamo's source of the module `torch`."""

from __future__ import annotations

from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.11 has one class of sources for all imported modules; torch 2.10 has a class for the module torch alone.",
    since=(2, 11),
    new=("torch._dynamo.source.ImportSource",),
    old=("torch._dynamo.source.TorchSource",),
    test="tests/frontend/test_current_device.py",
)


def torch_source() -> Any:
    """The source of the module `torch`."""
    if DIFFERENCE.older:
        from torch._dynamo.source import TorchSource  # type: ignore[attr-defined,unused-ignore] # of 2.10

        return TorchSource()
    from torch._dynamo.source import ImportSource

    return ImportSource("torch")
