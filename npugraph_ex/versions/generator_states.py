"""Random numbers that are drawn again in the backward. Nothing here changes it: the record is for tests and for the docs."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Before torch 2.13 AOT keeps the generator's state of checkpointed dropout as a tensor of the CPU, and 2.12 fails at it.",
    since=(2, 13),
    test="tests/aclgraph/test_training.py",
)


def draws_again() -> bool:
    """Whether AOT can compile checkpointed dropout on the device: torch 2.12 takes it for one of no device, in `aot_eager` too."""
    import torch
    from torch._prims.rng_prims import get_device

    return not DIFFERENCE.older or get_device((torch.empty(0, device="npu"),), {}) is not None
