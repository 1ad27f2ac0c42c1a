"""An LSTM over a packed sequence. Nothing here mends it: the record is for tests and for the docs."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="In torch_npu 2.10 `nn.LSTM` takes the result over a packed sequence for a padded one and flattens it.",
    since=(2, 11),
    test="tests/emulator/test_modules.py",
)
