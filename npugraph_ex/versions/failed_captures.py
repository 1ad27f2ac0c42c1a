"""The caching allocator after the device refused to end a capture."""

# ruff: noqa: SLF001 - torch_npu has no public name for it

from __future__ import annotations

import contextlib
from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch_npu 2.10 leaves its allocator in the capture if the device refuses to end it, and every later capture fails.",
    since=(2, 13),  # 2.11 and 2.12 have the function; it finds nothing to do
    old=("torch_npu._C._npu_endAllocateCurrentStreamToPool",),
    test="tests/aclgraph/test_traps.py",
)


def leave_capture(device: int, pool: Any) -> None:
    """Make the allocator leave the memory pool of a capture that failed; newer releases have done so themselves."""
    if DIFFERENCE.older:
        import torch_npu

        with contextlib.suppress(RuntimeError):  # the allocator had left it
            torch_npu._C._npu_endAllocateCurrentStreamToPool(device, pool)
