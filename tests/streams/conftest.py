"""What the tests of streams share: a start from nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import npu_emulator


@pytest.fixture(autouse=True)
def _captures_are_known() -> Iterator[None]:
    """A block of `detect_races` looks into replays of what its test captured before it, too."""
    if not npu_emulator.is_active():
        yield
        return
    with npu_emulator._captures_noted():
        yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """Inference, and nothing captured is left to the next test."""
    import torch  # not before the device has started

    with torch.no_grad():
        yield
    torch.compiler.reset()
    gc.collect()
