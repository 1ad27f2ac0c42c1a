"""Drops the lines that torch_npu prints because there is no CANN: under the emulator they are meaningless.

Only the known lines are dropped; all other output passes unchanged.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

__all__ = ["keep_cann_warnings_from", "without_cann_warnings", "without_padding_warning"]

_NO_CANN = re.compile(r"^Warning ?: ASCEND_HOME_PATH environment variable is not set\.\n", re.MULTILINE)
"""The line, with the space of torch_npu 2.10 and without."""
_PADDING = "require processing for 32 padding size, with memory allocation"


@contextmanager
def without_cann_warnings() -> Iterator[None]:
    """Import torch_npu inside: its line about the missing CANN installation is not printed."""
    kept = io.StringIO()
    try:
        with redirect_stdout(kept):
            yield
    finally:
        text = _NO_CANN.sub("", kept.getvalue())
        if text:
            sys.stdout.write(text)


def keep_cann_warnings_from(loader: Any) -> None:
    """Let a loader import torch_npu as above, in a child that imports it before torch, whose import would do so."""
    execute = loader.exec_module

    def execute_without(module: ModuleType) -> None:
        with without_cann_warnings():
            execute(module)

    loader.exec_module = execute_without


@contextmanager
def without_padding_warning() -> Iterator[None]:
    """Make the first allocation inside: its line about the CANN version, printed from C++, is not printed."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        saved = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            kept.seek(0)
            lines = [line for line in kept.read().splitlines(keepends=True) if _PADDING.encode() not in line]
            for line in lines:
                os.write(2, line)
