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
norm_cast = KERNELS["npu::npu_add_rms_norm_cast"]
quantize = KERNELS["npu::npu_quantize"]
norm_quant = KERNELS["npu::npu_add_rms_norm_quant"]
transposed_product = KERNELS["npu::npu_transpose_batchmatmul"]


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


@pytest.mark.parametrize("gamma", [(4,), (3, 4)], ids=str)
def test_gradients_of_rms_norm_are_those_of_its_formula(gamma: tuple[int, ...]) -> None:
    """Autograd through the forward formula in float64; by hand, a row (3, 4) whose gradient is itself."""
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), gamma))
    y, rstd = rms_norm(x, weight, 1e-2)
    gradient = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, weight), gradient)
    actual = KERNELS["npu::npu_rms_norm_backward"](gradient, x.detach(), weight.detach(), rstd.detach())
    torch.testing.assert_close(actual, expected)
    # rstd 1/5 and x^ = (0.6, 0.8): mean(dy x^) = 2.5, dx = (3 - 1.5, 4 - 2) / 5, dgamma = (1.8, 3.2)
    row = torch.tensor([[3.0, 4.0]])
    dx, dgamma = KERNELS["npu::npu_rms_norm_backward"](row, row, torch.ones(2), torch.tensor([[0.2]]))
    torch.testing.assert_close(dx, torch.tensor([[0.3, 0.4]]))
    torch.testing.assert_close(dgamma, torch.tensor([1.8, 3.2]))


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


def test_quantize_divides_or_multiplies() -> None:
    """``div_mode`` is True by default: (4, 6) by scales (2, 4) is (2, 1.5) or (8, 24)."""
    x, scales = torch.tensor([[4.0, 6.0]]), torch.tensor([2.0, 4.0])
    assert quantize(x, scales, None, torch.qint8).tolist() == [[2, 2]]
    assert quantize(x, scales, None, torch.qint8, -1, False).tolist() == [[8, 24]]


def test_zero_points_are_added_before_rounding() -> None:
    """0.5 rounds to 0, 0.5 + 1 to 2: rounding first would give 1. The sum saturates at 127 and -128."""
    x = torch.tensor([[0.5, 0.5, 127.0, -128.0]])
    points = torch.tensor([0, 1, 1, -1], dtype=torch.int32)
    assert quantize(x, torch.ones(4), points, 12, -1).tolist() == [[0, 2, 127, -128]]


def test_quantize_saturates_to_its_output() -> None:
    """uint8 from 0 to 255; int32 at its ends, which float32 cannot hold."""
    x = torch.tensor([[-3.0, 300.0, 3e9, -3e9]])
    assert quantize(x, torch.ones(1), None, torch.quint8, -1).tolist() == [[0, 255, 255, 0]]
    assert quantize(x, torch.ones(1), None, torch.int32, -1).tolist() == [[-3, 300, 2**31 - 1, -(2**31)]]


def test_quantisation_axis() -> None:
    """Dividing, the axis is any dimension; multiplying, -2 is the last but one and all above are the last."""
    x, scales = torch.ones(2, 2, 2), torch.tensor([1.0, 2.0])
    along = [quantize(x, 1 / scales, None, torch.int8, axis).tolist() for axis in (0, 1, 2)]
    assert along == [quantize(x, 1 / scales, None, torch.int8, axis).tolist() for axis in (-3, -2, -1)]
    assert along[0][0] == [[1, 1], [1, 1]]
    assert along[1][0] == [[1, 1], [2, 2]]
    assert along[2][0] == [[1, 2], [1, 2]]
    for axis in (-1, 0, 1, 2):
        assert quantize(x, scales, None, torch.int8, axis, False).tolist() == along[2]
    assert quantize(x, scales, None, torch.int8, -2, False).tolist() == along[1]


def test_quantize_refuses_what_does_not_fit() -> None:
    """An axis outside the input, scales of another size, axis -3 when multiplying."""
    x = torch.ones(2, 3, 4)
    for arguments, word in (
        ((torch.ones(4), None, 1, 3), "axis"),
        ((torch.ones(4), None, 1, -3, False), "axis"),
        ((torch.ones(4), None, 1, 1), "scales must hold one element or 3"),
        ((torch.ones(4), torch.ones(3), 1, -1), "zero_points must hold one element or 4"),
    ):
        with pytest.raises(ValueError, match=word):
            quantize(x, *arguments)


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


def test_before_rounding_of_static_quantisation() -> None:
    """The quotient with its zero point, as a judge needs it to see a tie."""
    x, points = torch.tensor([[1.0, 4.0]]), torch.tensor([1, 1], dtype=torch.int32)
    quotient = before_rounding["npu::npu_quantize"](x, torch.full((2,), 2.0), points, 1)
    assert quotient.tolist() == [[1.5, 3.0]]
    first, _, _ = before_rounding["npu::npu_add_rms_norm_quant"](
        x, x * 0, torch.ones(2), torch.ones(2), points, epsilon=8.5 * 0
    )
    torch.testing.assert_close(first, x / math.sqrt(8.5) + 1)


@pytest.mark.parametrize("left", [True, False])
def test_swiglu_and_quantisation_equal_their_parts(left: bool) -> None:
    """In float64; with ``activate_left`` the first half is the gate, as in npu_swiglu, else the second."""
    x = torch.randn(6, 32, dtype=torch.float64)
    gate_first = x if left else torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    expected, expected_scale = dynamic_quant(swiglu(gate_first))
    out, scale = KERNELS["npu::npu_swiglu_quant"](x, activate_left=left, quant_mode=1)
    assert_equal(out, expected)
    assert_equal(scale, expected_scale)


def test_swiglu_quant_by_hand() -> None:
    """Gates (0, ln 3) of sigmoids 1/2 and 3/4, values (8, 4): products 0 and 3 ln 3, so scale 3 ln 3 / 127, codes 0, 127."""
    gate, value = [0.0, math.log(3.0)], [8.0, 4.0]
    for left, row in ((True, gate + value), (False, value + gate)):
        out, scale = KERNELS["npu::npu_swiglu_quant"](torch.tensor([row]), activate_left=left, quant_mode=1)
        assert out.tolist() == [[0, 127]]
        torch.testing.assert_close(scale, torch.tensor([3 * math.log(3.0) / 127]))
    # Equal gates, values 3 and -4: three quarters of -127 the other way are 95.25.
    row = torch.tensor([[math.log(3.0), math.log(3.0), 3.0, -4.0]])
    out, _ = KERNELS["npu::npu_swiglu_quant"](row, activate_left=True, quant_mode=1)
    assert out.tolist() == [[95, -127]]


def test_transposed_product_by_hand() -> None:
    """Two batches of 1x1 products land side by side; the first operand may come as (M, B, K)."""
    x1, x2 = torch.tensor([[[2.0]], [[3.0]]]), torch.tensor([[[5.0]], [[7.0]]])
    assert transposed_product(x1, x2).tolist() == [[[10.0], [21.0]]]
    assert transposed_product(x1.transpose(0, 1), x2, perm_x1=[1, 0, 2]).tolist() == [[[10.0], [21.0]]]
    assert transposed_product(x1, x2.transpose(1, 2), perm_x2=[0, 2, 1]).tolist() == [[[10.0], [21.0]]]


def test_batches_are_dealt_out_to_groups() -> None:
    """Four batches in two groups: (2, M, 2 * N), the first two batches in the first group."""
    x1, x2 = torch.ones(4, 1, 1), torch.arange(8.0).view(4, 1, 2)
    out = transposed_product(x1, x2, batch_split_factor=2)
    assert out.tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_transposed_product_refuses_other_permutations() -> None:
    """The documentation allows few; and a factor must divide the batches."""
    x = torch.ones(4, 4, 4)
    for kwargs in ({"perm_x1": [2, 1, 0]}, {"perm_y": [0, 1, 2]}, {"batch_split_factor": 3}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            transposed_product(x, x, **kwargs)


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
        (lambda x: quantize(x, x[0], None, 16), "dtype"),
        (lambda x: quantize(x, x[0], None, 3, -1, False), "dtype"),
        (lambda x: norm_quant(x, x, x[0], x[0], None, dst_type=16), "dst_type"),
        (lambda x: transposed_product(x[None], x[None], bias=x), "bias"),
        (KERNELS["npu::npu_swiglu_quant"], "quant_mode"),
        (lambda x: KERNELS["npu::npu_swiglu_quant"](x, quant_mode=1, smooth_scales=x[0]), "smooth_scales"),
        (lambda x: transposed_product(x[None], x[None], scale=x), "scale"),
    ],
)
def test_uncovered_values_are_named(call: object, argument: str) -> None:
    """No silent wrong number: the error names the argument."""
    with pytest.raises(UnsupportedArgumentError, match=rf"\b{argument}="):
        call(torch.ones(4, 4))  # type: ignore[operator]
