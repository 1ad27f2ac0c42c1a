"""Settings shared by the tests of the backend's front doors: a fresh Dynamo for each test, on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No test sees what another compiled; gradients are off, as in inference."""
    import torch  # not before the device has started

    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()
