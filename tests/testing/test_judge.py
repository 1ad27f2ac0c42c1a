"""The judge against cases computed by hand: it passes what is right and fails what is subtly wrong."""

from __future__ import annotations

import math

import pytest
import torch

from npugraph_ex.operators import OPERATORS
from npugraph_ex.testing import Limits, judge_floating, judge_quantised, ulp
from npugraph_ex.testing.oracle.judge import judge_exact, same_bits
from npugraph_ex.testing.oracle.spread import pooled

ULPS = [
    # value, dtype, gap to the next number, by the formats' definitions
    (1.0, torch.float16, 2.0**-10),
    (1.999, torch.float16, 2.0**-10),
    (2.0, torch.float16, 2.0**-9),
    (-3.0, torch.float16, 2.0**-9),
    (65504.0, torch.float16, 32.0),
    (0.0, torch.float16, 2.0**-24),
    (2.0**-14, torch.float16, 2.0**-24),
    (2.0**-20, torch.float16, 2.0**-24),
    (1.0, torch.bfloat16, 2.0**-7),
    (300.0, torch.bfloat16, 2.0),
    (0.0, torch.bfloat16, 2.0**-133),
    (1.0, torch.float32, 2.0**-23),
    (16777216.0, torch.float32, 2.0),
    (0.0, torch.float32, 2.0**-149),
    (1.0, torch.float64, 2.0**-52),
]


@pytest.mark.parametrize(("value", "dtype", "gap"), ULPS)
def test_ulp_is_the_gap_between_neighbours(value: float, dtype: torch.dtype, gap: float) -> None:
    """Hand-computed gaps, at powers of two, below the normal range and at the top."""
    assert ulp(torch.tensor(value, dtype=torch.float64), dtype).item() == gap


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ulp_agrees_with_every_number_of_the_format(dtype: torch.dtype) -> None:
    """For all positive finite numbers of a 16-bit format the ulp is the distance to the next one."""
    bits = torch.arange(0, 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = bits[bits.isfinite()].double()
    assert torch.equal(ulp(finite[:-1], dtype), finite[1:] - finite[:-1])


def test_ulp_of_an_integer_dtype_is_refused() -> None:
    """An error names what was asked for."""
    with pytest.raises(ValueError, match="int8"):
        ulp(torch.zeros(1), torch.int8)


@pytest.mark.parametrize(
    ("value", "true", "apart"),
    [
        (3.0625, 0.0, ": an absolute difference of 3.062, "),
        (1.0, torch.nan, ": one is NaN and the other is not"),
        (torch.nan, -torch.inf, ": one is NaN and the other is not"),
        (torch.inf, 1.0, ": one is infinite and the other is not"),
        (torch.inf, -torch.inf, ": both are infinite"),
        (1.5, 1.0, ": 64 ulp of bfloat16 apart, "),
    ],
)
def test_a_distance_is_told_in_words_that_help(value: float, true: float, apart: str) -> None:
    """Beside a reference of 0 an ulp is the least number of the format, and beside a NaN there is no distance."""
    judged = judge_floating(torch.tensor([value]).bfloat16(), torch.tensor([true], dtype=torch.float64))
    assert apart in judged.message
    finite = math.isfinite(value) and math.isfinite(true)
    assert ("permitted error" in judged.message) == finite  # it says nothing beside an infinity


def test_the_worst_integer_is_told() -> None:
    """Where it is, what it is and what it should be, as for floating-point numbers."""
    judged = judge_exact(torch.tensor([[1, 2], [3, 9]]), torch.tensor([[1.0, 3.0], [3.0, 4.0]], dtype=torch.float64))
    assert (judged.wrong, judged.index) == (2, (1, 1))
    assert (
        judged.message == "2 of 4 elements are wrong; the worst, at (1, 1), is 9, the reference 4: int64 must be exact"
    )
    assert judge_exact(torch.tensor([True]), torch.tensor([1])).ok


def test_floating_point_is_right_up_to_n_ulps() -> None:
    """With n = 4 and no eager error, four ulps pass and five fail."""
    reference = torch.ones(3, dtype=torch.float64)
    step = 2.0**-10
    assert judge_floating(torch.tensor([1.0, 1.0, 1 + 4 * step], dtype=torch.float16), reference).ok
    judged = judge_floating(torch.tensor([1.0, 1.0, 1 + 5 * step], dtype=torch.float16), reference)
    assert not judged.ok
    assert judged.index == (2,)
    assert judged.worst_ulp == 5.0


def test_eager_modes_error_is_permitted_k_times() -> None:
    """Eager mode is 3 ulps off: 12 ulps pass with k = 4, 13 fail."""
    step = 2.0**-10
    reference = torch.ones(2, dtype=torch.float64)
    eager = torch.tensor([1 + 3 * step, 1.0], dtype=torch.float16)
    assert judge_floating(torch.tensor([1 + 12 * step, 1.0], dtype=torch.float16), reference, eager=eager).ok
    assert not judge_floating(torch.tensor([1 + 13 * step, 1.0], dtype=torch.float16), reference, eager=eager).ok
    assert not judge_floating(torch.tensor([1.0, 1 + 12 * step], dtype=torch.float16), reference, eager=eager).ok


def test_not_a_number_is_right_only_where_it_belongs() -> None:
    """NaN for NaN passes; NaN for a number and a number for NaN fail, and are the worst element."""
    nan = float("nan")
    reference = torch.tensor([nan, 1.0], dtype=torch.float64)
    assert judge_floating(torch.tensor([nan, 1.0]), reference).ok
    assert judge_floating(torch.tensor([nan, nan]), reference).wrong == 1
    assert judge_floating(torch.tensor([0.0, 1.0]), reference).wrong == 1


def test_infinity_is_right_beyond_the_range() -> None:
    """70000 is infinite in float16; 60000 is not, and the sign counts."""
    infinity = torch.tensor([float("inf")], dtype=torch.float16)
    assert judge_floating(infinity, torch.tensor([70000.0], dtype=torch.float64)).ok
    assert not judge_floating(infinity, torch.tensor([60000.0], dtype=torch.float64)).ok
    assert not judge_floating(-infinity, torch.tensor([70000.0], dtype=torch.float64)).ok


def test_a_tie_may_fall_either_way_within_the_permitted_error() -> None:
    """2.5 +- 0.01: both 2 and 3 pass; 2.4 +- 0.01 is 2 and nothing else."""
    spread = torch.full((1,), 0.0025, dtype=torch.float64)  # times k = 4 is 0.01
    near = torch.tensor([2.505], dtype=torch.float64)
    for value in (2, 3):
        assert judge_quantised(torch.tensor([value], dtype=torch.int8), near, spread=spread).ok
    far = torch.tensor([2.4], dtype=torch.float64)
    assert judge_quantised(torch.tensor([2], dtype=torch.int8), far, spread=spread).ok
    assert not judge_quantised(torch.tensor([3], dtype=torch.int8), far, spread=spread).ok


def test_half_a_step_is_never_excused_where_an_integer_is_the_right_one() -> None:
    """Whatever is permitted, as long as eager mode's roundings move the value by less than half a step."""
    spread = torch.full((1,), 0.49, dtype=torch.float64)  # times k = 4 is almost two steps
    for value, wrong in ((2.49, 4), (2.0, 3)):
        quotient = torch.tensor([value], dtype=torch.float64)
        assert not judge_quantised(torch.tensor([wrong], dtype=torch.int8), quotient, spread=spread).ok


def test_steps_below_eager_modes_roundings_are_judged_as_floating_point_is() -> None:
    """A step of 0.001 under values of which one ulp is 0.002: -41.45 +- 7.6 may be quantised to -34, and not to -33."""
    spread = torch.full((1,), 1.9, dtype=torch.float64)  # times k = 4 is 7.6
    value = torch.tensor([-41.45], dtype=torch.float64)
    for right in (-40, -34, -49):
        assert judge_quantised(torch.tensor([right], dtype=torch.int8), value, spread=spread).ok
    for wrong in (-33, -50, 40):
        assert not judge_quantised(torch.tensor([wrong], dtype=torch.int8), value, spread=spread).ok


def test_saturation_is_exact() -> None:
    """500 is 127 and -500 is -128; one less is wrong; NaN is 0."""
    value = torch.tensor([500.0, -500.0, float("nan")], dtype=torch.float64)
    assert judge_quantised(torch.tensor([127, -128, 0], dtype=torch.int8), value).ok
    assert judge_quantised(torch.tensor([126, -127, 1], dtype=torch.int8), value).wrong == 3


def _data(dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x1, x2 = (torch.randn(64, 128, generator=generator).mul(scale).to(dtype) for _ in range(2))
    gamma, smooth = (torch.randn(128, generator=generator).abs().add(0.5).to(dtype) for _ in range(2))
    return x1, x2, gamma, smooth


def _judged(candidate: tuple[torch.Tensor, ...], data: tuple[torch.Tensor, ...]) -> bool:
    """Whether y1 and scale1 of a candidate pass, given the float64 truth of the same inputs."""
    wide = [tensor.double() for tensor in data]
    truth = OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].before_rounding(*wide[:3], smooth_scale1=wide[3])
    spread = pooled(truth[0], truth[0].abs() * 2.0**-12)
    quantised = judge_quantised(candidate[0], truth[0], spread=spread)
    scale = judge_floating(candidate[3], truth[3], spread=truth[3] * 2.0**-12)
    return quantised.ok and scale.ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.001, 30.0])
def test_the_right_kernel_passes(dtype: torch.dtype, scale: float) -> None:
    """The float32 kernel is within the limits of the float64 reference."""
    data = _data(dtype, scale)
    kernel = OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].formula
    assert _judged(kernel(*data[:3], smooth_scale1=data[3]), data)


def _epsilon_dropped(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].formula(*data[:3], smooth_scale1=data[3], epsilon=0.0)


def _smoothing_dropped(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].formula(*data[:3])


def _rounded(data: tuple[torch.Tensor, ...], rounding: object) -> tuple[torch.Tensor, ...]:
    exact = OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].before_rounding(*data[:3], smooth_scale1=data[3])
    return (rounding(exact[0]).to(torch.int8), *exact[1:])  # type: ignore[operator]


def _truncated(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return _rounded(data, lambda q: q.clamp(-128, 127).trunc())


def _rounded_up(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return _rounded(data, lambda q: q.clamp(-128, 127).ceil().clamp(max=127))


def _saturated_early(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return _rounded(data, lambda q: q.round().clamp(-126, 126))


def _divided_by_128(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    right = OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].formula(*data[:3], smooth_scale1=data[3])
    return (*right[:3], right[3] * 127 / 128, right[4])


@pytest.mark.parametrize(
    "wrong", [_epsilon_dropped, _smoothing_dropped, _truncated, _rounded_up, _saturated_early, _divided_by_128]
)
def test_a_subtly_wrong_kernel_fails(wrong: object) -> None:
    """Epsilon or smoothing dropped, wrong rounding, wrong saturation, wrong divisor: none passes."""
    data = _data(torch.float16, 0.001)
    assert not _judged(wrong(data), data)  # type: ignore[operator]


def test_limits_that_excuse_everything_are_refused() -> None:
    """Half a step would excuse every rounding."""
    with pytest.raises(ValueError, match="tie"):
        Limits(tie=0.5)


def test_same_bits_tells_zeros_apart_and_nans_not() -> None:
    """-0.0 is not 0.0; NaN is NaN; dtype and shape count."""
    assert same_bits(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1]), torch.tensor([1.0]))
    negated = torch.tensor([1.0, -2.0])._neg_view()
    assert same_bits(negated, torch.tensor([-1.0, 2.0]))
    assert not same_bits(torch.tensor([1.0, -2.0]), negated)
    assert not same_bits(torch.tensor([1.0]), torch.tensor([[1.0]]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_same_bits_knows_float8(dtype: torch.dtype) -> None:
    """Formats for which torch has few kernels are told apart as the others are."""
    values = torch.tensor([float("nan"), -0.0, 1.5])
    assert same_bits(values.to(dtype), (-values).abs().neg().mul(torch.tensor([1.0, 1.0, -1.0])).to(dtype))
    assert not same_bits(values.to(dtype), values.abs().to(dtype))
    assert not same_bits(values.to(dtype), torch.tensor([0.0, -0.0, 1.5]).to(dtype))


def test_shapes_must_agree() -> None:
    """Broadcasting would hide a wrong shape."""
    with pytest.raises(ValueError, match="one shape"):
        judge_floating(torch.ones(2), torch.ones(1, dtype=torch.float64))
