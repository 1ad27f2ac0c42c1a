"""Hyper-connections (mHC): formulas written out in float64, and gradients against torch's autograd of them."""

from __future__ import annotations

import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError

pre, pre_backward, post, post_backward, sinkhorn, sinkhorn_backward = (
    OPERATORS[f"npu::npu_mhc_{name}"].formula
    for name in ("pre", "pre_backward", "post", "post_backward", "sinkhorn", "sinkhorn_backward")
)


def doubles(*shape: int) -> torch.Tensor:
    """Random numbers in float64, with a gradient."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def written_out(
    x: torch.Tensor, phi: torch.Tensor, alpha: torch.Tensor, bias: torch.Tensor, gamma: torch.Tensor
) -> tuple:
    """(h_in, h_post, h_res) by the document, with torch's own RMS norm."""
    n, flat = x.shape[-2], x.flatten(-2)
    normal = torch.nn.functional.rms_norm(flat, flat.shape[-1:], gamma.flatten(), 1e-6)
    parts = (normal @ phi.mT).split((n, n, n * n), -1)
    first, second, third = (
        scale * part + shift for scale, part, shift in zip(alpha, parts, bias.split((n, n, n * n)), strict=True)
    )
    h_in = torch.einsum("...n,...nd->...d", first.sigmoid() + 1e-6, x)
    return h_in, 2 * second.sigmoid(), third.unflatten(-1, (n, n))


@pytest.mark.parametrize("tokens", [(3,), (2, 3)])
def test_before_a_layer(tokens: tuple[int, ...]) -> None:
    """Results and gradients of x, phi, alpha, bias and gamma, with one and two leading dimensions."""
    inputs = (doubles(*tokens, 4, 8), doubles(24, 32), doubles(3), doubles(24), doubles(4, 8))
    expected = written_out(*inputs)
    grads = [torch.randn_like(value) for value in expected]
    x, phi, alpha, bias, gamma = (value.detach() for value in inputs)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = pre(x, phi, alpha, bias, gamma=gamma)
    for one, other in zip((h_in, h_post, h_res), expected, strict=True):
        torch.testing.assert_close(one, other)
    found = pre_backward(x, phi, alpha, *grads, inv_rms, h_mix, h_pre, h_post, gamma, grad_x_post=torch.ones_like(x))
    wanted = torch.autograd.grad(expected, inputs, grads)
    for one, other in zip(found, (wanted[0] + 1, *wanted[1:]), strict=True):
        torch.testing.assert_close(one, other)


def test_two_alphas_leave_out_the_mixing_of_streams() -> None:
    """Phi and bias then have 2n rows, and h_res is one 0."""
    x, phi, alpha, bias = (value.detach() for value in (doubles(3, 4, 8), doubles(24, 32), doubles(3), doubles(24)))
    whole, part = pre(x, phi, alpha, bias), pre(x, phi[:8], alpha[:2], bias[:8])
    assert part[2].tolist() == [0.0]
    for place in (0, 1, 3, 5):
        torch.testing.assert_close(part[place], whole[place])


def test_factors_are_rounded_to_hf32() -> None:
    """1 + 2^-11 is half way between two floats with ten bits, and goes up; 1 + 2^-12 goes down to 1."""
    x = torch.tensor([[[1 + 2**-11, 1 + 2**-12]]])
    mix = [pre(x, torch.eye(2)[[0, 1]], torch.ones(2), torch.zeros(2), inner_precise=mode)[4][0] for mode in (0, 1)]
    assert mix[0].tolist() == x[0, 0].tolist()
    assert mix[1].tolist() == [1 + 2**-10, 1.0]
    with pytest.raises(UnsupportedArgumentError, match="inner_precise=2"):
        pre(x, torch.eye(2), torch.ones(2), torch.zeros(2), inner_precise=2)


@pytest.mark.parametrize("mixed", [True, False])
def test_after_a_layer(mixed: bool) -> None:
    """Stream j gets the sum over i of h_res[i, j] x[i]; gradients are autograd's, and 0 for what was left out."""
    x, h_res, h_out, h_post = doubles(3, 4, 8), doubles(3, 4, 4), doubles(3, 8), doubles(3, 4)
    residual = torch.einsum("tij,tid->tjd", h_res, x) if mixed else x
    expected = residual + torch.einsum("tj,td->tjd", h_post, h_out)
    given = (x.detach(), h_res.detach() if mixed else None, h_out.detach(), h_post.detach())
    torch.testing.assert_close(post(*given), expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, h_res, h_out, h_post), grad, materialize_grads=True)
    for one, other in zip(post_backward(grad, *given), wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tokens", [1, 70, 20_000])
def test_sinkhorn_and_its_gradient(tokens: int) -> None:
    """Rows and columns sum to 1; the gradient from what is kept is autograd's, also where cores take tokens in several parts."""
    x = doubles(tokens, 4, 4)
    y = (x.softmax(-1) + 1e-6) / ((x.softmax(-1) + 1e-6).sum(-2, keepdim=True) + 1e-6)
    for _ in range(3):
        y = y / (y.sum(-1, keepdim=True) + 1e-6)
        y = y / (y.sum(-2, keepdim=True) + 1e-6)
    found, norm, sums = sinkhorn(x.detach(), num_iters=4, out_flag=1)
    torch.testing.assert_close(found, y)
    assert sinkhorn(x.detach(), num_iters=4)[1:] == (None, None)
    assert (norm.numel(), sums.numel()) == (8 * tokens * 4 * 8, 8 * tokens * 8)
    grad = torch.randn_like(y)
    torch.testing.assert_close(sinkhorn_backward(grad, norm, sums), torch.autograd.grad(y, x, grad)[0])


def test_training_on_the_device() -> None:
    """``backward`` of all three reaches every input."""
    import torch_npu

    x = torch.randn(3, 4, 16).half().npu().requires_grad_()
    phi, alpha, bias = (value.npu().requires_grad_() for value in (torch.randn(24, 64), torch.rand(3), torch.randn(24)))
    h_in, h_post, h_res, *_ = torch_npu.npu_mhc_pre(x, phi, alpha, bias, out_flag=1)
    mixing, *_ = torch_npu.npu_mhc_sinkhorn(h_res, num_iters=3, out_flag=1)
    torch_npu.npu_mhc_post(x, mixing, h_in, h_post).float().sum().backward()
    assert all(value.grad.cpu().abs().sum() > 0 for value in (x, phi, alpha, bias))


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (1, torch.zeros(2, 4, 8), "x dtype"),
        (1, torch.zeros(4, 8).half(), "x dim"),
        (0, torch.zeros(2, 4, 4).half(), "grad_y shape"),
        (2, torch.zeros(2, 4, 8), "h_res shape"),
        (3, torch.zeros(2, 8), "h_out dtype"),
        (4, torch.zeros(2, 4).half(), "h_post dtype"),
    ],
)
def test_gradients_refuse_what_the_device_refuses(place: int, wrong: torch.Tensor, words: str) -> None:
    """Before anything is launched, with the device's code; the right operands pass."""
    x, constraints = torch.zeros(2, 4, 8).half(), OPERATORS["npu::npu_mhc_post_backward"].constraints
    given = [x, x, torch.zeros(2, 4, 4), torch.zeros(2, 8).half(), torch.zeros(2, 4)]
    constraints(*given)
    given[place] = wrong
    with pytest.raises(RuntimeError, match=words):
        constraints(*given)
