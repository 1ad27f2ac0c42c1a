"""Random numbers that are drawn again in the backward. Nothing here changes it: the record is for tests and for the docs."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Before torch 2.12 AOT keeps the generator's state of checkpointed dropout as a tensor of the CPU, not as a generator.",
    since=(2, 12),
    test="tests/aclgraph/test_training.py",
)
