"""What the norms compute, by hand or in float64: alone, with an addition before, with a cast or a static quantisation after."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from npugraph_ex.operators import OPERATORS

rms_norm = OPERATORS["npu::npu_rms_norm"].formula
add_rms_norm = OPERATORS["npu::npu_add_rms_norm"].formula
dynamic_quant = OPERATORS["npu::npu_dynamic_quant"].formula
norm_cast = OPERATORS["npu::npu_add_rms_norm_cast"].formula
quantize = OPERATORS["npu::npu_quantize"].formula
norm_quant = OPERATORS["npu::npu_add_rms_norm_quant"].formula
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_by_hand(dtype: torch.dtype) -> None:
    """A row (3, 4) with epsilon 12.5 has mean square 12.5, hence rstd 1/5."""
    y, rstd = rms_norm(torch.tensor([[3.0, 4.0]], dtype=dtype), torch.tensor([1.0, 10.0], dtype=dtype), 12.5)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    torch.testing.assert_close(rstd, torch.tensor([[0.2]], dtype=wide))
    torch.testing.assert_close(y, torch.tensor([[0.6, 8.0]], dtype=dtype))


@pytest.mark.parametrize("gamma", [(4,), (3, 4)], ids=str)
def test_gradients_of_rms_norm_are_those_of_its_formula(gamma: tuple[int, ...]) -> None:
    """Autograd through the forward formula in float64; by hand, a row (3, 4) whose gradient is itself."""
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), gamma))
    y, rstd = rms_norm(x, weight, 1e-2)
    gradient = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, weight), gradient)
    actual = OPERATORS["npu::npu_rms_norm_backward"].formula(gradient, x.detach(), weight.detach(), rstd.detach())
    torch.testing.assert_close(actual, expected)
    # rstd 1/5 and x^ = (0.6, 0.8): mean(dy x^) = 2.5, dx = (3 - 1.5, 4 - 2) / 5, dgamma = (1.8, 3.2)
    row = torch.tensor([[3.0, 4.0]])
    dx, dgamma = OPERATORS["npu::npu_rms_norm_backward"].formula(row, row, torch.ones(2), torch.tensor([[0.2]]))
    torch.testing.assert_close(dx, torch.tensor([[0.3, 0.4]]))
    torch.testing.assert_close(dgamma, torch.tensor([1.8, 3.2]))


def test_epsilon_is_inside_the_root() -> None:
    """A row of zeros gives rstd 1/sqrt(epsilon), not 1/epsilon."""
    _, rstd = rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-4)
    torch.testing.assert_close(rstd, torch.tensor([[100.0]]))


def test_a_row_of_zeros_has_the_roots_reciprocal() -> None:
    """The reciprocal root of 1e-6 is 1000 in float32, to the bit."""
    zeros = torch.zeros(2, 8).half()
    assert OPERATORS["npu::npu_rms_norm"].formula(zeros, torch.ones(8).half())[1].tolist() == [[1000.0]] * 2


def test_norm_over_several_dimensions() -> None:
    """A two-dimensional gamma averages over both of its dimensions."""
    x = torch.tensor([[[1.0, 1.0], [1.0, 5.0]]])
    _, rstd = rms_norm(x, torch.ones(2, 2), 0.0)
    torch.testing.assert_close(rstd, torch.full((1, 1, 1), 1 / math.sqrt(7.0)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_add_rms_norm_is_add_then_rms_norm(dtype: torch.dtype) -> None:
    """Bit-equal, because the rounded sum is what is normalised; the spec's example rule relies on it."""
    x1, x2, gamma = (torch.randn(shape).to(dtype) for shape in ((5, 32), (5, 32), (32,)))
    y, rstd, x = add_rms_norm(x1, x2, gamma)
    expected_y, expected_rstd = rms_norm(x1 + x2, gamma)
    assert_equal(x, x1 + x2)
    assert_equal(y, expected_y)
    assert_equal(rstd, expected_rstd)


def test_half_precision_is_computed_in_float32() -> None:
    """300 squared overflows float16, yet the norm of a row of 300s is 1."""
    y, _ = rms_norm(torch.full((1, 8), 300.0, dtype=torch.float16), torch.ones(8, dtype=torch.float16))
    assert_equal(y, torch.ones(1, 8, dtype=torch.float16))


def test_float64_is_not_narrowed() -> None:
    """A difference far below float32's resolution survives in y, rstd and scale."""
    x = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    y, rstd = rms_norm(x, torch.ones(2, dtype=torch.float64), 0.0)
    assert rstd.dtype == torch.float64
    assert 0 < float(y[0, 1] - y[0, 0]) < 1e-11
    _, scale = dynamic_quant(x)
    assert_equal(scale, x[:, 1] / 127)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_norm_and_cast_is_the_norm_twice(dtype: torch.dtype) -> None:
    """y1 is y2 in float32, no more digits; y2, rstd and x are those of npu_add_rms_norm, to the bit."""
    x1, x2, gamma = (torch.randn(shape).to(dtype) for shape in ((5, 32), (5, 32), (32,)))
    y1, y2, rstd, x = norm_cast(x1, x2, gamma, 1e-3)
    for actual, expected in zip((y2, rstd, x), add_rms_norm(x1, x2, gamma, 1e-3), strict=True):
        assert_equal(actual, expected)
    assert_equal(y1, y2.to(torch.float64 if dtype == torch.float64 else torch.float32))


def test_norm_and_cast_by_hand() -> None:
    """The row (1, 2) + (2, 2) with epsilon 12.5 has rstd 1/5."""
    y1, y2, rstd, x = norm_cast(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor([1.0, 10.0]), 12.5)
    assert_equal(x, torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(rstd, torch.tensor([[0.2]]))
    torch.testing.assert_close(y2, torch.tensor([[0.6, 8.0]]))
    assert_equal(y1, y2)


def test_bfloat16_norm_and_cast_normalises_the_unrounded_sum() -> None:
    """256 + 1 is no bfloat16; its norm is that of 257, although the residual handed out is 256."""
    x1, x2 = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 0.0]]).bfloat16()
    _, _, rstd, x = norm_cast(x1, x2, torch.ones(2).bfloat16())
    assert x.tolist() == [[256.0, 1.0]]
    torch.testing.assert_close(rstd.item(), math.sqrt(2 / (257**2 + 1)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("div_mode", [True, False])
@pytest.mark.parametrize("offset", [True, False])
def test_norm_and_static_quantisation_equal_their_parts(div_mode: bool, offset: bool) -> None:
    """In float64, and in float16 because its published kernel rounds sum and norm as the parts do."""
    for dtype in (torch.float64, torch.float16):
        x1, x2 = (torch.randn(7, 32).to(dtype) for _ in range(2))
        gamma, scales = torch.rand(32).to(dtype), torch.rand(32) * 4 + 0.5
        points = torch.randint(-5, 5, (32,), dtype=torch.int32) if offset else None
        y, _, x = add_rms_norm(x1, x2, gamma, 1e-5)
        first, second, x_out = norm_quant(x1, x2, gamma, scales, points, epsilon=1e-5, div_mode=div_mode)
        assert_equal(first, quantize(y, scales, points, torch.int8, -1, div_mode))
        assert_equal(x_out, x)
        assert not second.any()


def test_norm_with_bias_and_two_quantisations_by_hand() -> None:
    """The row (3, 4) normalised to (0.6, 0.8) times gamma 10, plus 1, is (7, 9); halved and doubled."""
    one = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]])
    first, second, x = norm_quant(
        *one, torch.full((2,), 10.0), torch.full((2,), 2.0), torch.tensor([1, 2], dtype=torch.int32),
        torch.ones(2), torch.full((2,), 0.5), epsilon=12.5,
    )  # fmt: skip
    assert x.tolist() == [[3.0, 4.0]]
    assert first.tolist() == [[4, 6]]  # 7 / 2 + 1 = 4.5 and 9 / 2 + 2 = 6.5, to even
    assert second.tolist() == [[14, 18]]


def test_documented_constraints_of_norm_and_static_quantisation() -> None:
    """Another axis than -1, and second zero points without second scales."""
    x, one = torch.ones(1, 2), torch.ones(2)
    with pytest.raises(ValueError, match="axis must be -1"):
        norm_quant(x, x, one, one, None, axis=0)
    with pytest.raises(ValueError, match="zero_points2 needs scales2"):
        norm_quant(x, x, one, one, None, None, None, one)
