"""What the tests of streams share: a start from nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh() -> Iterator[None]:
    """Inference, and nothing captured is left to the next test."""
    import torch  # not before the device has started

    with torch.no_grad():
        yield
    torch._dynamo.reset()
    gc.collect()
