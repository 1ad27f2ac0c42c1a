"""What the quantising operators compute, by hand or in float64: rounding, saturation, axes, what is fused in front."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch_npu

from npugraph_ex.operators import OPERATORS

rms_norm = OPERATORS["npu::npu_rms_norm"].formula
add_rms_norm = OPERATORS["npu::npu_add_rms_norm"].formula
dynamic_quant = OPERATORS["npu::npu_dynamic_quant"].formula
swiglu_quant = OPERATORS["npu::npu_swiglu_quant"].formula
asymmetric = OPERATORS["npu::npu_dynamic_quant_asymmetric"].formula
fused = OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].formula
swiglu = OPERATORS["npu::npu_swiglu"].formula
quantize = OPERATORS["npu::npu_quantize"].formula
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


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
    quotient, scale = OPERATORS["npu::npu_dynamic_quant"].before_rounding(x)
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


def test_before_rounding_of_static_quantisation() -> None:
    """The quotient with its zero point, as a judge needs it to see a tie."""
    x, points = torch.tensor([[1.0, 4.0]]), torch.tensor([1, 1], dtype=torch.int32)
    quotient = OPERATORS["npu::npu_quantize"].before_rounding(x, torch.full((2,), 2.0), points, 1)
    assert quotient.tolist() == [[1.5, 3.0]]
    first, _, _ = OPERATORS["npu::npu_add_rms_norm_quant"].before_rounding(
        x, x * 0, torch.ones(2), torch.ones(2), points, epsilon=8.5 * 0
    )
    torch.testing.assert_close(first, x / math.sqrt(8.5) + 1)


@pytest.mark.parametrize("left", [True, False])
def test_swiglu_and_quantisation_equal_their_parts(left: bool) -> None:
    """In float64; with ``activate_left`` the first half is the gate, as in npu_swiglu, else the second. The scale multiplies."""
    x = torch.randn(6, 32, dtype=torch.float64)
    gate_first = x if left else torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    expected, expected_scale = dynamic_quant(swiglu(gate_first))
    out, scale = OPERATORS["npu::npu_swiglu_quant"].formula(x, activate_left=left, quant_mode=1)
    assert_equal(out, expected)
    torch.testing.assert_close(1 / scale, expected_scale)


def test_swiglu_quant_to_int4() -> None:
    """Far from 0 SiLU is the identity: 100, 200, -50 and 700 become 1, 2, -0.5 and 7, two in a byte, on the device too."""
    x = torch.tensor([[100.0] * 4 + [1.0, 2.0, -0.5, 7.0]])
    dynamic = {"activate_left": True, "quant_mode": 1, "dst_type": torch.quint4x2}
    out, scale = swiglu_quant(x, **dynamic)
    assert (out.view(torch.uint8).tolist(), out.dtype, scale.item()) == (
        [[0x21, 0x70]],
        torch.int8,
        pytest.approx(0.01),
    )
    assert torch.equal(torch_npu.npu_swiglu_quant(x.npu(), **dynamic)[0].cpu(), out)
    fixed = swiglu_quant(x, offsets=torch.ones(1, 4), smooth_scales=torch.zeros(1, 4), dst_type=16)[0]
    assert fixed.view(torch.uint8).tolist() == [[0x11, 0x11]]
    with pytest.raises(RuntimeError, match="multiple of 4"):
        swiglu_quant(x[:, :6], dst_type=torch.quint4x2)


def test_swiglu_quant_by_hand() -> None:
    """Gates (0, ln 3) of sigmoids 1/2 and 3/4, values (8, 4): products 0 and 3 ln 3, so scale 127 / (3 ln 3), codes 0, 127."""
    gate, value = [0.0, math.log(3.0)], [8.0, 4.0]
    for left, row in ((True, gate + value), (False, value + gate)):
        out, scale = OPERATORS["npu::npu_swiglu_quant"].formula(torch.tensor([row]), activate_left=left, quant_mode=1)
        assert out.tolist() == [[0, 127]]
        torch.testing.assert_close(scale, torch.tensor([127 / (3 * math.log(3.0))]))
    # Equal gates, values 3 and -4: three quarters of -127 the other way are 95.25.
    row = torch.tensor([[math.log(3.0), math.log(3.0), 3.0, -4.0]])
    out, _ = OPERATORS["npu::npu_swiglu_quant"].formula(row, activate_left=True, quant_mode=1)
    assert out.tolist() == [[95, -127]]


def test_swiglu_quant_of_groups_by_hand() -> None:
    """Gate ln 3, values 4 and 2: products 3 ln 3 and 1.5 ln 3. Groups of 1, 0 and 2 rows, by ends and by counts."""
    product = 3 * math.log(3.0)
    rows = torch.tensor([[math.log(3.0), math.log(3.0), 4.0, 2.0]]).repeat(4, 1)
    smooth = torch.tensor([[1.0, 2.0], [9.0, 9.0], [1.0, 6.0]])
    for kind, index in ((0, [1, 1, 3]), (1, [1, 0, 2])):
        groups = {"group_index": torch.tensor(index, dtype=torch.int32), "group_list_type": kind, "activate_left": True}
        out, scale = swiglu_quant(rows, smooth_scales=smooth, quant_mode=1, **groups)
        assert out.tolist() == [[127, 127], [42, 127], [42, 127], [0, 0]]
        torch.testing.assert_close(scale, torch.tensor([127 / product, 127 / 3 / product, 127 / 3 / product, 0.0]))
        steps = torch.tensor([1.0, 9.0, 2.0]) / product
        out, scale = swiglu_quant(rows, smooth_scales=10 * steps, offsets=torch.tensor([1.0, 9.0, 0.0]), **groups)
        assert out.tolist() == [[11, 6], [20, 10], [20, 10], [0, 0]]
        assert scale.tolist() == [0.0] * 4


def test_one_scale_for_a_tensor_and_one_for_a_column() -> None:
    """By hand: the largest element of all, or of each column along the last but one dimension, is 127."""
    x = torch.tensor([[[1.0, -4.0], [2.0, 8.0]]])
    y, scale = dynamic_quant(x, quant_mode="pertensor")
    assert_equal(scale, torch.tensor([8.0 / 127]))
    assert y.tolist() == [[[16, -64], [32, 127]]]
    y, scale = dynamic_quant(x, quant_mode="perchannel")
    assert_equal(scale, torch.tensor([[2.0 / 127, 8.0 / 127]]))
    assert y.tolist() == [[[64, -64], [127, 127]]]
    smoothed = dynamic_quant(x, smooth_scales=torch.tensor([2.0, 0.5]), quant_mode="perchannel")  # one for each row
    assert [part.tolist() for part in smoothed] == [
        [[[127, -127], [64, 64]]],
        [[pytest.approx(2 / 127), pytest.approx(8 / 127)]],
    ]
    with pytest.raises(RuntimeError, match="161002"):
        dynamic_quant(x, smooth_scales=torch.ones(3), quant_mode="perchannel")


def test_a_mixtures_tokens_take_their_experts_smoothing() -> None:
    """Tokens up to group_index[e] take row e; an expert without tokens is passed over; each is as if it were alone."""
    x, smooth = torch.randn(5, 8), torch.rand(4, 8) + 0.5
    y, scale = dynamic_quant(x, smooth_scales=smooth, group_index=torch.tensor([2, 2, 3, 5], dtype=torch.int32))
    for token, expert in enumerate((0, 0, 2, 3, 3)):
        alone, its_scale = dynamic_quant(x[token : token + 1], smooth_scales=smooth[expert])
        assert_equal(y[token : token + 1], alone)
        assert_equal(scale[token : token + 1], its_scale)
    with pytest.raises(ValueError, match="rise to the number of tokens, 5"):
        dynamic_quant(x, smooth_scales=smooth, group_index=torch.tensor([2, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"smooth_scales must be \[E, N\]"):
        dynamic_quant(x, smooth_scales=smooth[0], group_index=torch.tensor([2, 5]))


@pytest.mark.parametrize("quant_mode", ["pertoken", "pertensor"])
def test_int4_is_eight_to_a_word(quant_mode: str) -> None:
    """Each nibble, the first the lowest, is round(x / scale) with 7 for the largest element."""
    x = torch.randn(3, 2, 16)
    x[0, 0, 7] = -9.0
    y, scale = dynamic_quant(x, dst_type=16, quant_mode=quant_mode)
    assert (y.dtype, y.shape) == (torch.int32, (3, 2, 2))
    most = x.abs().amax(-1) if quant_mode == "pertoken" else x.abs().amax().reshape(1)
    assert_equal(scale, most / 7)
    wanted = (x / (scale.unsqueeze(-1) if quant_mode == "pertoken" else scale)).round()
    nibbles = [(y.to(torch.int64) >> shift) & 15 for shift in range(0, 32, 4)]
    found = torch.stack(nibbles, -1).flatten(-2)
    assert_equal(torch.where(found > 7, found - 16, found).float(), wanted)
    assert wanted.min() == -7


def test_asymmetric_quantisation_by_hand() -> None:
    """From -55 to 200 the step is 1 and the offset -73; columns and the whole alike; int4 from -8 to 7 has step 1, offset 0."""
    x = torch.tensor([[200.0, -55.0, 0.5], [1.0, 1.0, 1.0]])
    y, scale, offset = asymmetric(x)
    assert y.tolist() == [[127, -128, -72], [0, 0, 0]]  # -72.5 is a tie; a row without extent has no step
    assert (scale.tolist(), offset[0].item()) == ([1.0, 0.0], -73.0)
    y, scale, offset = asymmetric(x, quant_mode="pertensor")
    assert (y[0].tolist(), scale.tolist(), offset.tolist()) == ([127, -128, -72], [1.0], [-73.0])
    y, scale, offset = asymmetric(torch.tensor([[255.0], [0.0], [51.0]]), quant_mode="perchannel")
    assert (y.flatten().tolist(), scale.tolist(), offset.tolist()) == ([127, -128, -77], [1.0], [-128.0])
    y, scale, offset = asymmetric(torch.arange(-8.0, 8.0).reshape(1, 16), dst_type=16)
    assert y.tolist() == [[-0x01234568, 0x76543210]]
    assert (scale.tolist(), offset.tolist()) == ([1.0], [0.0])


def test_dynamic_quantisation_to_floats_of_eight_bits() -> None:
    """The largest element becomes the largest number of the type: 448 or 57344."""
    for dtype, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        y, scale = dynamic_quant(torch.tensor([[8.0, -4.0, 1.0]]), dst_type=dtype)
        assert (y.dtype, y.float().tolist()) == (dtype, [[largest, -largest / 2, largest / 8]])
        torch.testing.assert_close(scale, torch.tensor([8 / largest]))
