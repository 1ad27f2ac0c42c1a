"""RMS normalisation with a weight counted from one: by hand, against torch in float64, and on the device."""

from __future__ import annotations

import pytest
import torch

from npugraph_ex.operators import OPERATORS

gemma = OPERATORS["npu::npu_gemma_rms_norm"].formula


def test_by_hand() -> None:
    """The mean square of (3, 4) is 12.5; with as much for epsilon the root is 5. A weight of 0 leaves the row as it is."""
    y, rstd = gemma(torch.tensor([[3.0, 4.0]]), torch.tensor([0.0, 1.0]), 12.5)
    torch.testing.assert_close(y, torch.tensor([[0.6, 1.6]]))
    torch.testing.assert_close(rstd, torch.tensor([[0.2]]))


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8)])
def test_against_torch(shape: tuple[int, ...]) -> None:
    """Torch's own norm with a weight of 1 + gamma, over the last dimension and over all but the first, in float64."""
    x = torch.randn(shape, dtype=torch.float64)
    for normalised in {x.shape[-1:], x.shape[1:] or x.shape}:
        gamma = torch.randn(normalised, dtype=torch.float64)
        expected = torch.nn.functional.rms_norm(x, normalised, 1 + gamma, eps=1e-6)
        torch.testing.assert_close(gemma(x, gamma)[0], expected)


def test_one_is_added_before_anything_is_rounded() -> None:
    """In float16 the result is the float64 value rounded once; with 1 + gamma rounded to float16 first it would be another."""
    torch.manual_seed(0)
    x, gamma = torch.randn(8, 64).half(), (torch.randn(64) / 64).half()
    once, twice = (
        torch.nn.functional.rms_norm(x.double(), (64,), weight, eps=1e-6).half()
        for weight in (1 + gamma.double(), (1 + gamma).double())
    )
    assert torch.equal(gemma(x, gamma)[0], once)
    assert not torch.equal(once, twice)


def test_on_the_device() -> None:
    """The kernel of the emulated device is the formula, to the bit."""
    x, gamma = torch.randn(3, 16).bfloat16(), torch.randn(16).bfloat16()
    for one, other in zip(
        torch.ops.npu.npu_gemma_rms_norm(x.npu(), gamma.npu(), 1e-5), gemma(x, gamma, 1e-5), strict=True
    ):
        assert torch.equal(one.cpu(), other)
