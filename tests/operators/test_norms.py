"""Layer, group and RMS normalisation and their gradients: against torch's own functions and autograd in float64, or by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from npugraph_ex.operators import OPERATORS


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """The formula of ``npu::name`` on values whose gradients nobody wants."""
    with torch.no_grad():
        return OPERATORS[f"npu::{name}"].formula(*args, **kwargs)


def wide(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random float64 tensors that want gradients."""
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("normalised", [(8,), (4, 8)])
def test_deep_norm_and_its_gradients(normalised: tuple[int, ...]) -> None:
    """Over one and over two dimensions; the statistics are those of the scaled sum."""
    x, gx, beta, gamma = leaves = wide((3, 4, 8), (3, 4, 8), normalised, normalised)
    y = functional.layer_norm(0.5 * x + gx, normalised, gamma, beta, 1e-3)
    mean, rstd, got = run("npu_deep_norm", *leaves, alpha=0.5, epsilon=1e-3)
    torch.testing.assert_close(got, y.detach())
    over = tuple(range(3 - len(normalised), 3))
    torch.testing.assert_close(mean, (0.5 * x + gx).detach().mean(over, keepdim=True))
    dy = torch.randn_like(y)
    dx, dgx, dbeta, dgamma = torch.autograd.grad(y, (x, gx, beta, gamma), dy)
    for one, other in zip(
        run("npu_deep_norm_backward", dy, x, gx, gamma, mean, rstd, 0.5), (dx, dgx, dbeta, dgamma), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_residual_sum_and_layer_norm() -> None:
    """Values, the sum, and the gradients with one that reaches the sum itself; a missing gradient of y counts as 0."""
    x1, x2, gamma, beta = leaves = wide((3, 8), (3, 8), (8,), (8,))
    total = x1 + x2
    y = functional.layer_norm(total, (8,), gamma, beta, 1e-5)
    got, mean, rstd, x = run("npu_add_layer_norm", *leaves, additional_output=True)
    torch.testing.assert_close(got, y.detach())
    torch.testing.assert_close(x, total.detach())
    assert not run("npu_add_layer_norm", *leaves)[3].any()  # the device leaves it unwritten
    dy, dsum = torch.randn_like(y), torch.randn_like(y)
    expected = torch.autograd.grad((y, total), (x1, gamma, beta), (dy, dsum))
    dx1, dx2, dgamma, dbeta = run("npu_add_layer_norm_backward", dy, x1, x2, rstd, mean, gamma, dsum)
    for one, other in zip((dx1, dgamma, dbeta), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(dx1, dx2)
    assert torch.equal(run("npu_add_layer_norm_backward", None, x1, x2, rstd, mean, gamma, dsum)[0], dsum)


def test_layer_norm_of_inference_and_its_gradients() -> None:
    """As torch's; without a weight its gradient is that of ones."""
    x, weight, bias = wide((3, 8), (8,), (8,))
    torch.testing.assert_close(
        run("npu_layer_norm_eval", x, [8], weight, bias, 1e-3),
        functional.layer_norm(x, [8], weight, bias, 1e-3).detach(),
    )
    for gamma in (weight, None):
        y, mean, rstd = torch.native_layer_norm(x, [8], gamma, bias if gamma is not None else None, 1e-5)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        got, dweight, dbias = run("npu_layernorm_grad", dy, x, [8], mean, rstd, gamma, None)
        torch.testing.assert_close(got, dx)
        torch.testing.assert_close(dweight, (dy * (x - mean) * rstd).sum(0).detach())
        torch.testing.assert_close(dbias, dy.sum(0))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_group_norm_and_swish(scale: float) -> None:
    """Values and gradients; with scale 1 it is SiLU."""
    x, weight, bias = wide((2, 4, 3, 5), (4,), (4,))
    n = functional.group_norm(x, 2, weight, bias, 1e-5)
    y = n * torch.sigmoid(scale * n)
    got, mean, rstd = run("npu_group_norm_swish", x, 2, weight, bias, 1e-5, scale)
    torch.testing.assert_close(got, y.detach())
    torch.testing.assert_close(mean, x.detach().reshape(2, 2, -1).mean(-1))
    if scale == 1.0:
        torch.testing.assert_close(run("npu_group_norm_silu", x, weight, bias, 2)[0], y.detach())
        alone = functional.silu(functional.group_norm(x, 4, eps=1e-3)).detach()
        torch.testing.assert_close(run("npu_group_norm_silu", x, None, None, 4, 1e-3)[0], alone)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, weight, bias), dy)
    gradients = run("npu_group_norm_swish_grad", dy, x, 2, weight, bias, mean, rstd, [True] * 3, scale)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="multiple of 3"):
        run("npu_group_norm_silu", x, weight, bias, 3)


@pytest.mark.parametrize("kind", [0, 1])
def test_sequences_by_their_valid_positions(kind: int) -> None:
    """Mean and standard deviation of what is valid, by channel and by sequence, applied to all positions."""
    x, lengths = torch.randn(2, 3, 6, dtype=torch.float64), [4, 6]
    got = run("npu_normalize_batch", x, torch.tensor(lengths, dtype=torch.int32), kind)
    for row, length, result in zip(x, lengths, got, strict=True):
        valid = row[:, :length] if kind == 0 else row[:, :length].reshape(1, -1)
        std, mean = torch.std_mean(valid, dim=1, keepdim=True)
        torch.testing.assert_close(result, (row - mean) / (std + 1e-5))


def test_rms_norm_and_quantisation_by_hand() -> None:
    """(7, 1) has a root mean square of 5: normalised 1.4 and 0.2, divided by 0.1 and moved by 3; or multiplied by it."""
    x, ones, tenth = torch.tensor([[7.0, 1.0]]), torch.ones(2), torch.tensor([0.1])
    offset = torch.tensor([3], dtype=torch.int8)
    plain = run("npu_rms_norm_quant", x, ones, 0 * ones, tenth, offset, 0.0)
    assert (plain.tolist(), plain.dtype) == ([[17, 5]], torch.int8)
    assert run("npu_rms_norm_quant", x, ones[None], ones[None], tenth, offset, 0.0).tolist() == [[27, 15]]
    y, rstd = run("npu_rms_norm_quant_v2", x, ones, 10 * ones, epsilon=0.0, div_mode=False)
    assert y.tolist() == [[14, 2]]
    torch.testing.assert_close(rstd, torch.tensor([[0.2]]))
    y, _ = run("npu_rms_norm_quant_v2", x, ones, torch.tensor([0.1, 0.02]), offset=offset, beta=ones, epsilon=0.0)
    assert y.tolist() == [[27, 63]]


def test_int4_of_a_norm_is_packed() -> None:
    """Eight normalised values of one size: signs tell them apart, and 2 is the code of each magnitude."""
    x = torch.tensor([[1.0, -1.0] * 4])
    zero = torch.zeros(1, dtype=torch.int8)
    packed = run("npu_rms_norm_quant", x, torch.ones(8), torch.zeros(8), torch.tensor([0.5]), zero, 0.0, dst_dtype=16)
    assert packed.tolist() == [[0xE2E2E2E2 - 2**32]]


def test_a_norm_over_its_operands_on_the_device() -> None:
    """The first operand becomes the norm, the second the sum; the functional twin leaves both."""
    x1, x2, gamma = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    y, rstd, x = run("npu_add_rms_norm", x1, x2, gamma)
    first, second = x1.npu(), x2.npu()
    functional_results = torch.ops.npu.npu_add_rms_norm_v2_functional(first, second, gamma.npu())
    for one, other in zip(functional_results, (rstd, y, x), strict=True):
        assert torch.equal(one.cpu(), other)
    assert torch.equal(first.cpu(), x1)
    assert torch.equal(torch.ops.npu.npu_add_rms_norm_v2(first, second, gamma.npu()).cpu(), rstd)
    assert torch.equal(first.cpu(), y)
    assert torch.equal(second.cpu(), x)


def test_gradients_on_the_device() -> None:
    """``.backward()`` through the fused norms runs their backward operators."""
    x, gx, beta, gamma = (part.detach().float() for part in wide((3, 8), (3, 8), (8,), (8,)))
    reference = [part.clone().requires_grad_() for part in (x, gx, beta, gamma)]
    leaves = [part.npu().requires_grad_() for part in (x, gx, beta, gamma)]
    torch.ops.npu.npu_deep_norm(*leaves)[2].square().sum().backward()
    functional.layer_norm(
        0.3 * reference[0] + reference[1], (8,), reference[3], reference[2], 1e-6
    ).square().sum().backward()
    for one, other in zip(leaves, reference, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)
    leaves = [part.npu().requires_grad_() for part in (x.reshape(1, 3, 8), torch.ones(3), torch.zeros(3))]
    reference = [part.clone().requires_grad_() for part in (x.reshape(1, 3, 8), torch.ones(3), torch.zeros(3))]
    torch.ops.npu.npu_group_norm_swish(leaves[0], 3, *leaves[1:])[0].square().sum().backward()
    functional.silu(functional.group_norm(reference[0], 3, *reference[1:])).square().sum().backward()
    for one, other in zip(leaves, reference, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


def test_a_gamma_of_one_number_is_refused_with_what_to_write() -> None:
    """What the message says to write is right: the formula then scales each row by that number. Another size has no such hint."""
    x, gamma = torch.randn(3, 16), torch.tensor([0.5])
    formula = OPERATORS["npu::npu_rms_norm"].formula
    with pytest.raises(ValueError, match=r"gamma must have the trailing dimensions") as found:
        formula(x, gamma)
    written = str(found.value).split("`")[1]
    y, _ = formula(x, eval(written, {"gamma": gamma}))  # noqa: S307 - what the message says
    torch.testing.assert_close(y, functional.rms_norm(x, [16], eps=1e-6) * 0.5)
    with pytest.raises(ValueError, match="gamma must have") as found:
        formula(x, torch.ones(4))
    assert "`" not in str(found.value)
