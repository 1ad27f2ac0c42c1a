"""Generators and captures. Nothing here mends it: the record is for tests and for the docs."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Before torch_npu 2.12 a replay writes the state of every generator, and a captured draw does not register its own.",
    since=(2, 12),
    test="tests/emulator/test_generator_states.py",
)
