"""Settings shared by the tests of the backend's front doors: a fresh Dynamo for each test, on a device, and shared helpers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# pytest's importlib mode puts nothing on the path.
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent)]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No test sees what another compiled; gradients are off, as in inference."""
    import torch  # not before the device has started

    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
