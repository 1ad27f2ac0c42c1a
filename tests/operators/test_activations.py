"""Activations, their gradients and their quantised forms: against torch's own functions in float64, or worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError


def formula(name: str) -> Callable[..., torch.Tensor]:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """The documented form."""
    return x / (1 + torch.exp(-1.702 * x))


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of the last dimension."""
    return x.chunk(2, dim=-1)


FORWARD = {
    "npu_gelu": functional.gelu,
    "npu_gelu_mul": lambda x: functional.gelu(halves(x)[0]) * halves(x)[1],
    "npu_fast_gelu": fast_gelu,
    "fast_gelu": fast_gelu,
    "npu_silu": functional.silu,
    "npu_mish": functional.mish,
    "npu_swiglu": lambda x: functional.silu(halves(x)[0]) * halves(x)[1],
}
BACKWARD = {
    "npu_gelu": lambda g, x, _: formula("npu_gelu_backward")(g, x),
    "npu_fast_gelu": lambda g, x, _: formula("npu_fast_gelu_backward")(g, x),
    "npu_silu": formula("npu_silu_backward"),
    "npu_mish": lambda g, x, _: formula("npu_mish_backward")(g, x),
    "npu_swiglu": lambda g, x, _: formula("npu_swiglu_backward")(g, x),
}


@pytest.mark.parametrize("name", FORWARD)
def test_values_are_torchs(name: str) -> None:
    """In float64 to its last digits; in float16 the float64 value rounded once, but for the few that float32 rounds otherwise."""
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(formula(name)(x), FORWARD[name](x))
    half = x.half()
    torch.testing.assert_close(formula(name)(half), FORWARD[name](half.double()).half(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gelu_of_infinity_is_infinity_on_every_processor(dtype: torch.dtype, approximate: str) -> None:
    """The device's operators and the formula; torch's own on the CPU gives NaN where it takes oneDNN."""
    x = torch.full((20,), math.inf, dtype=dtype)
    on_device = x.npu()
    results = [
        functional.gelu(on_device, approximate=approximate),
        torch.ops.aten.gelu_(on_device.clone(), approximate=approximate),
        torch.ops.aten.gelu.out(on_device, approximate=approximate, out=torch.empty_like(on_device)),
        torch.ops.npu.npu_gelu(on_device, approximate=approximate),
        formula("npu_gelu")(x, approximate=approximate),
    ]
    assert all(torch.equal(result.cpu(), x) for result in results)


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_autograds(name: str) -> None:
    """The backward operator gives what autograd finds for torch's own composition, in float64."""
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    y = FORWARD[name](x)
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(BACKWARD[name](g, x.detach(), y.detach()), expected)


def test_tanh_is_another_gelu() -> None:
    """Both words for the approximation, forward and backward, and no third."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    y = functional.gelu(x, approximate="tanh")
    (expected,) = torch.autograd.grad(y.sum(), x)
    ones = torch.ones_like(x)
    torch.testing.assert_close(formula("npu_gelu")(x.detach(), approximate="tanh"), y.detach())
    torch.testing.assert_close(formula("npu_gelu_backward")(ones, x.detach(), approximate="tanh"), expected)
    for name, arguments in (("npu_gelu", (x,)), ("npu_gelu_backward", (ones, x)), ("npu_gelu_mul", (x,))):
        with pytest.raises(UnsupportedArgumentError, match="approximate='fast'"):
            formula(name)(*arguments, approximate="fast")


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(("approximate", "kind"), [(0, "none"), (1, "tanh")])
def test_geglu(left: bool, dim: int, approximate: int, kind: str) -> None:
    """Either half activated, along either dimension, both approximations, and the gradient, all in float64."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    first, second = x.chunk(2, dim=dim)
    active, other = (first, second) if left else (second, first)
    activated = functional.gelu(active, approximate=kind)
    y, gelu = formula("npu_geglu")(x.detach(), dim, approximate, left)
    torch.testing.assert_close(y, (activated * other).detach())
    torch.testing.assert_close(gelu, activated.detach())
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(activated * other, x, g)
    torch.testing.assert_close(formula("npu_geglu_grad")(g, x.detach(), gelu, dim, approximate, left), expected)


def test_clipped_swiglu_by_hand() -> None:
    """Gates 9 and ln 3 / 2, cut off at 1; values 5, cut off at 1, and -0.5; alpha 2; bias 1. The group has one row of two."""
    rows = torch.tensor([[9.0, 5.0, math.log(3) / 2, -0.5]]).repeat(2, 1)
    first = 1 / (1 + math.exp(-2)) * (1 + 1)
    second = math.log(3) / 2 * 0.75 * 0.5
    limits = {"alpha": 2.0, "limit": 1.0, "bias": 1.0}
    y = formula("npu_clipped_swiglu")(rows, group_index=torch.tensor([1, 0]), **limits)
    torch.testing.assert_close(y, torch.tensor([[first, second], [0.0, 0.0]]))
    apart = torch.stack((rows[:, ::2], rows[:, 1::2]), dim=1)  # [2, 2, 2]: the same halves, along dimension 1
    y = formula("npu_clipped_swiglu")(apart, dim=1, interleaved=False, **limits)
    torch.testing.assert_close(y, torch.tensor([[[first, second]]]).repeat(2, 1, 1))


def test_gelu_and_quantisation() -> None:
    """Far from 0 GELU is the identity or 0, so the codes are known: 40 of 40 is 127, 20 is 63.5 and rounds to even."""
    x = torch.tensor([[40.0, 20.0, -40.0]])
    y, scale = formula("npu_gelu_quant")(x)
    assert y.tolist() == [[127, 64, 0]]
    torch.testing.assert_close(scale, torch.tensor([40 / 127]))
    _, smoothed = formula("npu_gelu_quant")(x, input_scale=torch.tensor([1.0, 4.0, 1.0]))
    torch.testing.assert_close(smoothed, torch.tensor([80 / 127]))
    y, none = formula("npu_gelu_quant")(
        x, input_scale=torch.tensor([0.5]), input_offset=torch.tensor([1.5]), quant_mode="static"
    )
    assert (y.tolist(), none) == ([[22, 12, 2]], None)
    y, scale = formula("npu_gelu_quant")(x, dst_type=torch.float8_e4m3fn)
    assert (y.float().tolist(), scale.tolist()) == ([[448.0, 224.0, 0.0]], [pytest.approx(40 / 448)])


def test_products_scaled_back_by_hand() -> None:
    """(3 + 1) * 0.5 * 2 with a whole bias, 3 * 0.5 * 2 + 1 with a floating one; the default output is float16."""
    x, weight, row = torch.tensor([[3]], dtype=torch.int32), torch.tensor([0.5]), torch.tensor([2.0])
    whole = formula("npu_dequant_bias")(x, weight, row, torch.tensor([1], dtype=torch.int32))
    floating = formula("npu_dequant_bias")(x, weight, row, torch.tensor([1.0]), output_dtype=torch.bfloat16)
    assert (whole.item(), whole.dtype, floating.item(), floating.dtype) == (4.0, torch.float16, 4.0, torch.bfloat16)
    assert formula("npu_dequant_bias")(x, weight, None, torch.tensor([1.0])).item() == 2.5


def test_in_place_and_gradients_on_the_device() -> None:
    """``npu_silu_`` changes its argument, and ``.backward()`` of activations runs the backward operators."""
    x = torch.randn(3, 8)
    changed = x.npu()
    assert torch.ops.npu.npu_silu_(changed) is changed
    torch.testing.assert_close(changed.cpu(), functional.silu(x))
    for name, composition in FORWARD.items():
        if name in BACKWARD:
            leaf, reference = x.npu().requires_grad_(), x.clone().requires_grad_()
            getattr(torch.ops.npu, name)(leaf).sum().backward()
            composition(reference).sum().backward()
            torch.testing.assert_close(leaf.grad.cpu(), reference.grad, rtol=1e-5, atol=1e-6)
