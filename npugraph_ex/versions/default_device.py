"""The default device in a compiled function. Nothing here mends it: tests and `docs/reference/versions.md` have the record."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Before torch 2.12 a factory in a compiled function ignores torch's default device, also with torch's own `aot_eager`.",
    since=(2, 12),
    test="tests/frontend/test_current_device.py",
)
