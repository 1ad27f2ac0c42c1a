"""The bundled `torchair`, whose import needs CANN in old releases. The record is for tests and for the docs."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="`import torchair` of torch_npu 2.10 loads CANN's libfmk_parser.so, which the emulated device does not play.",
    since=(2, 11),
    test="tests/fusion/test_printed_examples.py",
)
