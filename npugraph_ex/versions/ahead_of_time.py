"""Dynamo's `aot_compile`. Nothing here adds it to a release: the record is for tests and for `docs/reference/versions.md`."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Before torch 2.12 `aot_compile` is off, and takes the functions of torch's own compilers alone.",
    since=(2, 12),
    test="tests/frontend/test_aot_compile.py",
)
