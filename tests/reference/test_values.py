"""The references give the values of the documented formulas, computed here by hand or in float64."""

from __future__ import annotations

import math

import pytest
import torch

from npugraph_ex.reference import KERNELS, UnsupportedArgumentError, before_rounding

rms_norm = KERNELS["npu::npu_rms_norm"]
add_rms_norm = KERNELS["npu::npu_add_rms_norm"]
dynamic_quant = KERNELS["npu::npu_dynamic_quant"]
fused = KERNELS["npu::npu_add_rms_norm_dynamic_quant"]
quant_matmul = KERNELS["npu::npu_quant_matmul"]
swiglu = KERNELS["npu::npu_swiglu"]
rotary_mul = KERNELS["npu::npu_rotary_mul"]
dtype_cast = KERNELS["npu::npu_dtype_cast"]


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit-equal values and equal dtype."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_by_hand(dtype: torch.dtype) -> None:
    """A row (3, 4) with epsilon 12.5 has mean square 12.5, hence rstd 1/5."""
    y, rstd = rms_norm(torch.tensor([[3.0, 4.0]], dtype=dtype), torch.tensor([1.0, 10.0], dtype=dtype), 12.5)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    torch.testing.assert_close(rstd, torch.tensor([[0.2]], dtype=wide))
    torch.testing.assert_close(y, torch.tensor([[0.6, 8.0]], dtype=dtype))


def test_epsilon_is_inside_the_root() -> None:
    """A row of zeros gives rstd 1/sqrt(epsilon), not 1/epsilon."""
    _, rstd = rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-4)
    torch.testing.assert_close(rstd, torch.tensor([[100.0]]))


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


def test_dynamic_quant_by_hand() -> None:
    """Scale is the row's largest magnitude over 127; that element becomes ±127."""
    y, scale = dynamic_quant(torch.tensor([[127.0, -63.4, 1.0], [0.0, -254.0, 2.0]]))
    assert_equal(scale, torch.tensor([1.0, 2.0]))
    assert_equal(y, torch.tensor([[127, -63, 1], [0, -127, 1]], dtype=torch.int8))


def test_ties_round_to_even() -> None:
    """0.5, 1.5, 2.5 and their negatives go to 0, 2, 2."""
    y, _ = dynamic_quant(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]]))
    assert y.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_a_row_of_zeros_quantises_to_zeros() -> None:
    """Its scale is 0 and its quotient 0/0, which converts to 0."""
    y, scale = dynamic_quant(torch.zeros(2, 4, dtype=torch.float16))
    assert not y.any()
    assert not scale.any()


def test_smooth_scales_act_before_the_maximum() -> None:
    """The row (1, 2) smoothed by (4, 1) has its maximum at the first element."""
    y, scale = dynamic_quant(torch.tensor([[1.0, 2.0]]), smooth_scales=torch.tensor([4.0, 1.0]))
    torch.testing.assert_close(scale, torch.tensor([4.0 / 127]))
    assert y.tolist() == [[127, 64]]


def test_before_rounding_is_the_quotient() -> None:
    """Rounded, it gives the operator's own output."""
    x = torch.randn(6, 16)
    quotient, scale = before_rounding["npu::npu_dynamic_quant"](x)
    torch.testing.assert_close(quotient * scale.unsqueeze(-1), x)
    assert_equal(dynamic_quant(x)[0], quotient.round().to(torch.int8))


def test_fused_operator_equals_its_parts_in_float64() -> None:
    """With no rounding in between, the fused operator and the chain are the same function."""
    x1, x2 = (torch.randn(7, 32, dtype=torch.float64) for _ in range(2))
    gamma, smooth = (torch.rand(32, dtype=torch.float64) for _ in range(2))
    y, _, x = add_rms_norm(x1, x2, gamma, 1e-5)
    expected, expected_scale = dynamic_quant(y, smooth_scales=smooth)
    y1, y2, x_out, scale1, scale2 = fused(x1, x2, gamma, smooth_scale1=smooth, epsilon=1e-5)
    assert_equal(y1, expected)
    assert_equal(scale1, expected_scale)
    assert_equal(x_out, x)
    assert y2.shape == scale2.shape == (0,)


def test_fused_operator_does_not_round_in_between() -> None:
    """In float16 its scale is that of the float32 norm, not of the float16 one."""
    x1, x2, gamma = (torch.randn(shape).half() for shape in ((64, 32), (64, 32), (32,)))
    wide = (x1.double() + x2.double()), gamma.double()
    exact = dynamic_quant(rms_norm(*wide)[0])[1]
    scale = fused(x1, x2, gamma)[3]
    chained = dynamic_quant(add_rms_norm(x1, x2, gamma)[0])[1]
    torch.testing.assert_close(scale.double(), exact, rtol=1e-6, atol=0)
    assert float((chained.double() / exact - 1).abs().max()) > 1e-5


def test_two_quantisations_and_beta() -> None:
    """The second output is smoothed by the second vector; beta is added before both."""
    x, one = torch.tensor([[1.0, 1.0]]), torch.ones(2)
    y1, y2, _, scale1, scale2 = fused(
        x, x, one, smooth_scale1=one, smooth_scale2=torch.tensor([1.0, 2.0]), beta=torch.tensor([0.0, 2.0]), epsilon=0.0
    )
    torch.testing.assert_close(scale1 * 127, torch.tensor([3.0]))
    torch.testing.assert_close(scale2 * 127, torch.tensor([6.0]))
    assert y1.tolist() == [[42, 127]]
    assert y2.tolist() == [[21, 127]]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"smooth_scale2": torch.ones(2)},
        {"output_mask": [False, False]},
        {"smooth_scale1": torch.ones(2), "output_mask": [False, True]},
    ],
)
def test_documented_constraints_of_the_fused_operator(kwargs: dict[str, object]) -> None:
    """Combinations that the documentation forbids raise and name the argument."""
    with pytest.raises(ValueError, match="output_mask"):
        fused(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2), **kwargs)


def test_quant_matmul_by_hand() -> None:
    """(1, 2) @ (3, 4) = 11; an int32 bias is added before the scales, a floating one after."""
    x1, x2 = torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3], [4]], dtype=torch.int8)
    scale, token = torch.tensor([0.5]), torch.tensor([10.0])
    wide = {"output_dtype": torch.float32, "pertoken_scale": token}
    assert quant_matmul(x1, x2, scale, **wide).tolist() == [[55.0]]
    assert quant_matmul(x1, x2, scale, bias=torch.tensor([1], dtype=torch.int32), **wide).tolist() == [[60.0]]
    assert quant_matmul(x1, x2, scale, bias=torch.tensor([1.0]), **wide).tolist() == [[56.0]]
    assert quant_matmul(x1, x2, scale, offset=torch.tensor([3.0])).tolist() == [[8]]


def test_quant_matmul_saturates_and_rounds_to_even() -> None:
    """The int8 output of 12.5 is 12 and that of 20000 is 127."""
    x1, x2 = torch.tensor([[100], [5]], dtype=torch.int8), torch.tensor([[100, 5]], dtype=torch.int8)
    out = quant_matmul(x1, x2, torch.tensor([2.0, 0.5]))
    assert out.tolist() == [[127, 127], [127, 12]]
    quotient = before_rounding["npu::npu_quant_matmul"](x1, x2, torch.tensor([2.0, 0.5]))
    assert quotient.tolist() == [[20000.0, 250.0], [1000.0, 12.5]]


def test_quant_matmul_is_exact_where_float32_is_not() -> None:
    """16,385 products of 127 * 127 do not fit float32's 24 bits but are added exactly."""
    n = 16385
    x1, x2 = torch.full((1, n), 127, dtype=torch.int8), torch.full((n, 1), 127, dtype=torch.int8)
    out = quant_matmul(x1, x2, torch.ones(1, dtype=torch.float64), output_dtype=torch.float32)
    assert out.item() == n * 127 * 127


def test_swiglu_by_hand() -> None:
    """The first half is the gate."""
    out = swiglu(torch.tensor([[0.0, 1.0, 3.0, 5.0]]))
    torch.testing.assert_close(out, torch.tensor([[0.0, 5 / (1 + math.exp(-1))]]))


def test_rotary_mul_by_hand() -> None:
    """With cosine 0 and sine 1, ``half`` swaps halves and ``interleave`` swaps neighbours."""
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    zero, one = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    assert rotary_mul(x, zero, one).flatten().tolist() == [-3, -4, 1, 2]
    assert rotary_mul(x, zero, one, "interleave").flatten().tolist() == [-2, 1, -4, 3]
    turn = torch.eye(4).flip(0)
    assert rotary_mul(x, zero, one, "half", turn).flatten().tolist() == [4, 3, 2, 1]


def test_dtype_cast_accepts_codes_and_dtypes() -> None:
    """Code 3 is int32; conversion to an integer truncates."""
    x = torch.tensor([1.9, -1.9])
    assert_equal(dtype_cast(x, 3), torch.tensor([1, -1], dtype=torch.int32))
    assert_equal(dtype_cast(x, torch.int32), torch.tensor([1, -1], dtype=torch.int32))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda x: dynamic_quant(x, group_index=torch.ones(1)), "group_index"),
        (lambda x: dynamic_quant(x, dst_type=16), "dst_type"),
        (lambda x: dynamic_quant(x, quant_mode="pertensor"), "quant_mode"),
        (lambda x: dynamic_quant(x, dst_type_max=15.0), "dst_type_max"),
        (lambda x: fused(x, x, x[0], y_dtype=16), "y_dtype"),
        (lambda x: quant_matmul(x.to(torch.int32), x.to(torch.int8), x[0]), "x1"),
        (lambda x: quant_matmul(x.to(torch.int8), x.to(torch.int8), x[0].long()), "scale"),
        (lambda x: quant_matmul(x.to(torch.int8), x.to(torch.int8), x[0], output_dtype=3), "output_dtype"),
        (lambda x: quant_matmul(x.to(torch.int8), x.to(torch.int8), x[0], group_sizes=[1]), "group_sizes"),
        (lambda x: rotary_mul(x[None, None], x, x, "quarter"), "rotary_mode"),
        (lambda x: dtype_cast(x, 296), "dtype"),
    ],
)
def test_uncovered_values_are_named(call: object, argument: str) -> None:
    """No silent wrong number: the error names the argument."""
    with pytest.raises(UnsupportedArgumentError, match=rf"\b{argument}="):
        call(torch.ones(4, 4))  # type: ignore[operator]
