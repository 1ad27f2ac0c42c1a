"""A graph break among native streams. Nothing here mends it: the record is for tests and for `docs/reference/versions.md`."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="From torch 2.14 on, a graph break in the block of a native stream leaves that stream current, also with torch's `eager`.",
    since=(2, 14),
    test="tests/streams/test_graph_breaks.py",
)
