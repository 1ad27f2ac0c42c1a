"""Gradients of torch's own functions that are operators of the device: against torch's autograd in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError


def formula(name: str) -> Callable:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


def check(
    name: str, forward: Callable, x: torch.Tensor, *arguments: object, before: tuple = (), **kwargs: object
) -> None:
    """The operator's answer for a random gradient of ``forward(x)`` is autograd's."""
    given = x.clone().requires_grad_()
    out = forward(given)
    grad = torch.randn_like(out)
    found = formula(name)(grad, *before, *arguments, **kwargs)
    torch.testing.assert_close(found, torch.autograd.grad(out, given, grad)[0])


def doubles(*shape: int) -> torch.Tensor:
    """Random numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_and_copies(dim: int) -> None:
    """Elements taken several times add up, and so do copies, as many of each or of each its own number, or none."""
    x, index = doubles(3, 4, 2), torch.randint(2, (2, 3, 2))
    check("npu_gather_backward", lambda t: t.gather(dim, index), x, [3, 4, 2], dim, index, False)
    check("repeat_interleave_backward_int", lambda t: t.repeat_interleave(3, dim), x, x, 3, dim)
    counts = torch.arange(x.shape[dim])
    check("repeat_interleave_backward_tensor", lambda t: t.repeat_interleave(counts, dim), x, x, counts, dim)


def test_copies_of_the_flat_input() -> None:
    """Without a dimension; one number may stand for all."""
    x = doubles(3, 2)
    check("repeat_interleave_backward_int", lambda t: t.repeat_interleave(2), x, x, 2)
    two = torch.tensor([2])
    check("repeat_interleave_backward_tensor", lambda t: t.repeat_interleave(two), x, x, two)


def test_copies_are_summed_in_float32() -> None:
    """A thousand times 1 in bfloat16, which has no number between 256 and 258."""
    grad, x = torch.ones(1001).bfloat16(), torch.zeros(1).bfloat16()
    wanted = torch.tensor([1001.0]).bfloat16()
    assert torch.equal(formula("repeat_interleave_backward_int")(grad, x, 1001), wanted)
    assert torch.equal(formula("repeat_interleave_backward_tensor")(grad, x, torch.tensor([1001])), wanted)
    assert torch.equal(formula("npu_gather_backward")(grad, [1], 0, torch.zeros(1001).long(), False), wanted)


def test_sparse_gradients_are_not_covered() -> None:
    """The argument is named."""
    with pytest.raises(UnsupportedArgumentError, match="sparse_grad=True"):
        formula("npu_gather_backward")(torch.ones(1), [1], 0, torch.zeros(1).long(), True)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("dim", [0, -1])
def test_renorm(p: float, dim: int) -> None:
    """Slices with a norm above and below the limit."""
    x = doubles(4, 3, 5) * torch.tensor([0.01, 1, 2, 3]).view(4, 1, 1)
    check("npu_renorm_backward", lambda t: torch.renorm(t, p, dim, 1.5), x, p, dim, 1.5, before=(x,))


@pytest.mark.parametrize(("scale", "norm"), [(0, "backward"), (1, "ortho"), (2, "forward")])
def test_fourier_transforms(scale: int, norm: str) -> None:
    """Even and odd sizes, one dimension and two, halves and whole spectra."""
    for size in (6, 7):
        x = doubles(3, size)
        check("fft_r2c_backward", lambda t: torch.fft.rfftn(t, None, (0, 1), norm), x, [0, 1], scale, True, size)
        check("fft_r2c_backward", lambda t: torch._fft_r2c(t, [1], scale, False), x, [1], scale, False, size)
        half = torch.fft.rfft(x)
        back = {"backward": "forward", "forward": "backward", "ortho": "ortho"}[norm]
        check("fft_c2r_backward", lambda t: torch.fft.irfft(t, size, -1, back), half, [1], scale)  # noqa: B023


@pytest.mark.parametrize("normalized", [True, False])
def test_short_time_transforms(normalized: bool) -> None:
    """With a window shorter than the transform, in the middle of it; of complex values, whose spectrum is complex unasked."""
    x, window = doubles(2, 20), torch.rand(6, dtype=torch.float64)
    run = lambda t: torch.stft(  # noqa: E731
        t, 8, 4, 6, window, center=False, normalized=normalized, return_complex=True
    )
    check("stft_backward", run, x, x, 8, 4, 6, window, normalized, None, True)
    x = torch.complex(x, doubles(2, 20))
    check("stft_backward", lambda t: torch.stft(t, 8, 4, 6, window, center=False), x, x, 8, 4, 6, window)


def test_memory_of_gradients() -> None:
    """Contiguous also for a transposed input, as op-plugin allocates; that of a loss has the target's dtype."""
    x, grad, counts = torch.randn(4, 3).half().t(), torch.randn(3, 4).half(), torch.tensor([1, 1, 2])
    loss = formula("npu_binary_cross_entropy_with_logits_backward")(grad, x, torch.rand(3, 4), None, None, 0)
    copies = formula("repeat_interleave_backward_tensor")(torch.ones(4, 4).half(), x, counts, 0)
    renormed = formula("npu_renorm_backward")(grad.t().contiguous().t(), x, 2.0, 0, 1.0)
    assert [one.dtype for one in (loss, copies, renormed)] == [torch.float32, torch.float16, torch.float16]
    assert all(one.is_contiguous() and one.shape == x.shape for one in (loss, copies, renormed))
