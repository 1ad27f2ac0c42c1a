"""Convolutions, statistics of batch norm and softmax of windows, against torch's own functions in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch.nn import functional

from npugraph_ex.operators import OPERATORS


def formula(name: str) -> Callable:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


def doubles(*shape: int) -> torch.Tensor:
    """Random numbers in float64, with a gradient."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


ALL = [True] * 3
PLAIN = ("npu_conv2d", "npu_convolution", "npu_conv3d")


@pytest.mark.parametrize("name", PLAIN)
def test_convolutions_and_their_gradients(name: str) -> None:
    """With stride, padding, dilation and groups."""
    spatial = 3 if name == "npu_conv3d" else 2
    x, weight, bias = doubles(2, 4, *(5, 6, 7)[:spatial]), doubles(6, 2, *(3, 2, 3)[:spatial]), doubles(6)
    how = [[1, 2, 2][:spatial], [1, 0, 1][:spatial], [2, 1, 1][:spatial], 2]
    expected = getattr(functional, f"conv{spatial}d")(x, weight, bias, *how)
    torch.testing.assert_close(formula(name)(x.detach(), weight.detach(), bias.detach(), *how), expected)
    grad = torch.randn_like(expected)
    found = formula(f"{name}_backward")(x.detach(), grad, weight.detach(), *how, ALL)
    for one, other in zip(found, torch.autograd.grad(expected, (x, weight, bias), grad), strict=True):
        torch.testing.assert_close(one, other)
    assert formula(f"{name}_backward")(x.detach(), grad, weight.detach(), *how, [True, True, False])[2] is None


@pytest.mark.parametrize("name", ["npu_conv_transpose2d", "npu_convolution_transpose", "npu_conv_transpose3d"])
def test_transposed_convolutions_and_their_gradients(name: str) -> None:
    """With output padding and groups; of three dimensions there is the gradient alone."""
    spatial = 3 if "3d" in name else 2
    x, weight, bias = doubles(2, 4, *(3, 4, 2)[:spatial]), doubles(4, 3, *(3, 2, 3)[:spatial]), doubles(6)
    stride, padding, extra, dilation = ([2] * spatial, [1, 0, 1][:spatial], [1, 0, 1][:spatial], [1, 2, 1][:spatial])
    forward = getattr(functional, f"conv_transpose{spatial}d")
    expected = forward(x, weight, bias, stride, padding, extra, 2, dilation)
    how = (padding, extra, stride, dilation, 2)
    if spatial == 2:
        torch.testing.assert_close(formula(name)(x.detach(), weight.detach(), bias.detach(), *how), expected)
    grad = torch.randn_like(expected)
    found = formula(f"{name}_backward")(x.detach(), grad, weight.detach(), *how, ALL)
    for one, other in zip(found, torch.autograd.grad(expected, (x, weight, bias), grad), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_the_slow_and_depthwise_ones() -> None:
    """Dilated, transposed, and of each channel alone."""
    x, weight, bias = doubles(2, 4, 6, 5), doubles(3, 4, 3, 2), doubles(3)
    expected = functional.conv2d(x, weight, bias, dilation=(2, 1))
    grad = torch.randn_like(expected)
    given = (grad, x.detach(), weight.detach(), [3, 2], [1, 1], [0, 0])
    found = formula("slow_conv_dilated2d_backward")(*given, [2, 1], ALL)
    for one, other in zip(found, torch.autograd.grad(expected, (x, weight, bias), grad), strict=True):
        torch.testing.assert_close(one, other)

    each = doubles(4, 1, 3, 2)
    expected = functional.conv2d(x, each, groups=4)
    grad = torch.randn_like(expected)
    given = (grad, x.detach(), each.detach(), [3, 2], [1, 1], [0, 0], [1, 1], [True, True])
    for one, other in zip(
        formula("_conv_depthwise2d_backward")(*given), torch.autograd.grad(expected, (x, each), grad), strict=True
    ):
        torch.testing.assert_close(one, other)

    back = doubles(4, 3, 3, 2)
    expected = functional.conv_transpose2d(x, back, bias, 2, 1, 1)
    grad = torch.randn_like(expected)
    given = (grad, x.detach(), back.detach(), [3, 2], [2, 2], [1, 1], [1, 1], [1, 1], ALL)
    found = formula("slow_conv_transpose2d_backward")(*given)
    for one, other in zip(found, torch.autograd.grad(expected, (x, back, bias), grad), strict=True):
        torch.testing.assert_close(one, other)


def test_training_and_out_on_the_device() -> None:
    """``backward`` of the operator with a gradient, and the variant that writes to what is given."""
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    given = [value.npu().requires_grad_() for value in (x, weight)]
    own = [value.clone().requires_grad_() for value in (x, weight)]
    how = ([1, 1], [1, 1], [1, 1], 1)
    torch_npu.npu_convolution(*given, None, *how).sum().backward()
    functional.conv2d(*own, None, *how).sum().backward()
    for one, other in zip(given, own, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    out = torch.zeros(1, 3, 4, 4).npu()
    torch.ops.npu.npu_conv2d.out(x.npu(), weight.npu(), None, *how, out=out)
    torch.testing.assert_close(out.cpu(), functional.conv2d(x, weight, None, *how))


def test_statistics_of_several_devices_are_those_of_all_samples() -> None:
    """Two devices' sums together give torch's batch norm of both inputs at once, and move the running statistics as it does."""
    parts = [torch.randn(count, 3, 4, dtype=torch.float64) for count in (2, 5)]
    sums, squares = (
        torch.stack(values) for values in zip(*(formula("batch_norm_reduce")(p, 0.0) for p in parts), strict=True)
    )
    whole = torch.cat(parts)
    running = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    counts = torch.tensor([8.0, 20.0])
    mean, invstd = formula("batch_norm_gather_stats_update")(whole, sums, squares, *running, 0.25, 1e-5, counts)
    normal = (whole - mean.view(3, 1)) * invstd.view(3, 1)
    torch.testing.assert_close(normal, functional.batch_norm(whole, None, None, training=True))
    torch.testing.assert_close(running[0], 0.25 * whole.mean((0, 2)))
    torch.testing.assert_close(running[1], 0.75 + 0.25 * whole.var((0, 2), correction=0))
    with pytest.raises(RuntimeError, match="must more than 1"):
        formula("batch_norm_reduce")(torch.ones(3), 0.0)


def test_softmax_of_windows() -> None:
    """The mask is each window's, the bias each head's, with windows in a dimension of their own or among the batches."""
    x, mask, bias = torch.randn(2, 3, 4, 5, 6), torch.randn(3, 5, 6), torch.randn(4, 5, 6)
    expected = torch.softmax(0.5 * x + mask[:, None] + bias, -1)
    run = formula("npu_masked_softmax_with_rel_pos_bias")
    torch.testing.assert_close(run(x, mask, bias, 0.5), expected)
    torch.testing.assert_close(run(x.flatten(0, 1), mask, bias, 0.5), expected.flatten(0, 1))
    torch.testing.assert_close(run(x, None, bias), torch.softmax(x + bias, -1))
