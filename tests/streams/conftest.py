"""Lets the tests of this folder import ``stream_programs``, and starts each of those that ask for it from nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# pytest's importlib mode puts nothing on the path.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def fresh() -> Iterator[None]:
    """Inference, and nothing captured is left to the next test."""
    import torch  # not before the device has started

    with torch.no_grad():
        yield
    torch._dynamo.reset()
    gc.collect()
