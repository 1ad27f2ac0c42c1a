"""Complex values in the first call, which AOT makes under a dispatch mode of its own."""

from __future__ import annotations

import pytest
import torch
from device_helpers import NPU, check


@pytest.mark.parametrize("eager", [True, False], ids=["operator by operator", "captured"])
def test_adjoints_inside_an_operator(eager: bool) -> None:
    """The first call's pseudoinverse is eager mode's, as the second's is."""
    torch.manual_seed(0)
    values = torch.randn(2, 4, 3, dtype=torch.complex64, device=NPU)
    check(torch.linalg.pinv, [(value,) for value in values], force_eager=eager)
