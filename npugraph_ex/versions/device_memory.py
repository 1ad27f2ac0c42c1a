"""The statistics of device memory that do not name a kind of device."""

from __future__ import annotations

from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch_npu 2.13 gives its memory statistics to `torch.accelerator`; before, `torch.npu` alone has them.",
    since=(2, 13),
    test="tests/testing",
)


def device_memory() -> Any:
    """The module with `memory_allocated`, `memory_reserved`, `memory_stats` and `empty_cache` of the current device."""
    import torch

    return torch.npu if DIFFERENCE.older else torch.accelerator  # type: ignore[attr-defined]
