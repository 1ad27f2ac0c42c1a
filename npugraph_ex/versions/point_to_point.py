"""Sending and receiving in a compiled function. Nothing here adds it to a release: the record is for tests and for the docs."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.12 has operators for `isend`, `irecv` and `batch_isend_irecv`.",
    since=(2, 12),
    test="tests/aclgraph/test_collectives.py",
)
