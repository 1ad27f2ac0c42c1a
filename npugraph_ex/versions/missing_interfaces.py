"""What torch_npu 2.10 lacks beside operators. Nothing here mends it: the record is for tests and for the docs."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch_npu 2.10 has no ExternalStream, no npurt and no groups of HCCL calls, and reports some errors without CANN's text.",
    since=(2, 11),
    test="tests/emulator/test_priorities.py",
)
