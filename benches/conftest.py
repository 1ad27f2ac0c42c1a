"""Starts the emulated device where there is no real one, as the unit tests do, and finds the benches' helpers."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import npu_emulator

sys.path.append(str(Path(__file__).parent))
with contextlib.suppress(npu_emulator.ActivationError):  # a real device is here
    npu_emulator.activate(quiet=True)
