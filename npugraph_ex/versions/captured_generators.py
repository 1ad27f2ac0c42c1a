"""A captured draw from a generator of the program's own. Nothing here mends it: the record is for tests and for the docs."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="In torch_npu 2.10 a captured draw does not register its generator; one registered in inference mode replays only in it.",
    since=(2, 11),
    test="tests/emulator/test_generator_states.py",
)
