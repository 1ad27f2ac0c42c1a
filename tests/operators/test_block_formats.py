"""MX formats: 4-bit and 8-bit elements with a power of two for each block, against numbers worked out by hand."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError
from npugraph_ex.operators._microscaling import E1M2, E2M1, Element, pack, unpack

FP4, FP8 = 296, 24
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula(*args, **kwargs)


def row(*first: float, size: int = 64) -> torch.Tensor:
    """A row with these numbers, and zeros behind them."""
    return torch.nn.functional.pad(torch.tensor([first]), (0, size - len(first)))


def numbers(packed: torch.Tensor, count: int) -> list[float]:
    """The first 4-bit numbers of a packed row."""
    return unpack(packed, E2M1, torch.float32)[0, :count].tolist()


@pytest.mark.parametrize(("element", "values"), [(E2M1, E2M1_VALUES), (E1M2, [code / 4 for code in range(8)])])
def test_four_bit_elements_there_and_back(element: Element, values: list[float]) -> None:
    """Every code, the first of two in the lower bits, with its sign in the highest."""
    signed = torch.tensor([*values, *(-value for value in values)])
    packed = pack(signed, element)
    assert packed.tolist() == [low | (low + 1) << 4 for low in range(0, 16, 2)]
    assert torch.equal(unpack(packed, element, torch.float32), signed)


@pytest.mark.parametrize(
    ("round_mode", "expected"),
    [
        ("rint", [6.0, 4.0, 2.0, 2.0, 0.0, -1.0, -4.0, 0.0]),
        ("round", [6.0, 6.0, 3.0, 2.0, 0.5, -1.0, -6.0, 0.0]),
        ("floor", [6.0, 4.0, 2.0, 1.5, 0.0, -1.0, -6.0, -0.5]),
    ],
)
def test_ties_between_four_bit_elements(round_mode: str, expected: list[float]) -> None:
    """Halfway: to the even code, away from zero, down. The block's largest number is 6, so its scale is 1."""
    x = row(6.0, 5.0, 2.5, 1.75, 0.25, -0.75, -5.0, -0.125)
    y, scale = run("npu_dynamic_mx_quant", x, dst_type=FP4, round_mode=round_mode)
    assert (numbers(y, 8), scale.tolist()) == (expected, [[[127, 0]]])


@pytest.mark.parametrize(
    ("x", "scale", "first", "how"),
    [
        (7.0, 127, 6.0, {"dst_type": FP4}),
        (7.0, 128, 4.0, {"dst_type": FP4, "scale_alg": 2}),
        (6.0, 127, 6.0, {"dst_type": FP4, "scale_alg": 2}),
        (7.0, 127, 6.0, {"dst_type": FP4, "scale_alg": 2, "dst_type_max": 7.0}),
        (12.5, 128, 6.0, {"dst_type": FP4, "scale_alg": 2, "dst_type_max": 12.0}),
        (1.5, 127, 1.5, {"dst_type": 297}),
        (480.0, 127, 448.0, {"dst_type": FP8}),
        (480.0, 128, 240.0, {"dst_type": FP8, "scale_alg": 1}),
        (448.0, 127, 448.0, {"dst_type": FP8, "scale_alg": 1}),
        (1.0, 127, 1.0, {"dst_type": FP8, "scale_alg": 1, "max_low_bound": 448.0}),
    ],
)
def test_scales_of_a_block(x: float, scale: int, first: float, how: dict[str, Any]) -> None:
    """Floor of the exponent saturates, ceiling does not; a bound for the largest number; other largest numbers."""
    y, scales = run("npu_dynamic_mx_quant", row(x), **how)
    values = y.float() if how["dst_type"] == FP8 else unpack(y, E1M2 if how["dst_type"] == 297 else E2M1, torch.float32)
    assert (scales.tolist(), values[0, 0].item()) == ([[[scale, 0]]], first)


def test_a_rotation_before_the_blocks() -> None:
    """By one matrix or one for each piece, in three dimensions; rounded to bfloat16, cut off at half its largest; 4-bit ties."""
    x, turn = row(511.9, 3.0).reshape(1, 1, 64), torch.eye(32).flip(0)
    y, scale = run("npu_rotate_quant", x, turn, dst_dtype=291)
    assert (y[0, 0, 30:32].tolist(), scale.view(torch.uint8).tolist()) == ([192.0, 32768.0], [[[[121, 0]]]])
    cut, _ = run("npu_rotate_quant", x, torch.stack([torch.eye(32), turn]), alpha=torch.tensor([0.5]), dst_dtype=24)
    assert cut[0, 0, :2].tolist() == [256.0, 3.0]
    ties = row(6.0, 5.0, 2.5, 1.75)
    y, scale = run(
        "npu_rotate_quant", ties, torch.eye(64), dst_dtype=FP4, round_mode="round", scale_alg=2, dst_type_max=6.0
    )
    assert (numbers(y, 4), scale.dtype) == ([6.0, 6.0, 3.0, 2.0], torch.float8_e8m0fnu)
    for wrong in ({"round_mode": "floor"}, {"dst_dtype": 24, "scale_alg": 2}, {"transpose_y": True}, {"axis": 0}):
        with pytest.raises(RuntimeError, match=f"npu_rotate_quant: .*{[*wrong][-1]}.* should be"):
            run("npu_rotate_quant", ties, turn, **wrong)


@pytest.mark.parametrize(("mode", "second"), [(None, 2.0), (1, 3.0), (2, 2.0), (3, 3.0), (4, 2.0)])
def test_activation_to_four_bits(mode: int | None, second: float) -> None:
    """6 and the tie 2.5, by each rounding; the columns of another dimension, quantised statically."""
    swiglu = OPERATORS["npu::npu_dequant_swiglu_quant"].formula
    x = torch.tensor([[100.0, 100.0, 6.0, 2.5]])
    y, scale = swiglu(x, activate_left=True, quant_mode=1, dst_type=FP4, round_mode=mode)
    assert (numbers(y, 2), scale.tolist()) == ([6.0, second], [100.0])
    y, _ = swiglu(x.reshape(2, 2).flip(0), quant_scale=torch.tensor([100.0, 50.0]), activate_dim=0)
    assert y.tolist() == [[6, 5]]
    with pytest.raises(RuntimeError, match="activate_dim should be"):
        swiglu(x.reshape(2, 2), quant_mode=1, activate_dim=0)


def test_refusals_of_a_block() -> None:
    """What the device refuses, with its code."""
    for wrong in (
        {"dst_type": FP8, "round_mode": "floor"},
        {"dst_type": FP8, "scale_alg": 2},
        {"dst_type": 297, "scale_alg": 2},
        {"dst_type": FP4, "dst_type_max": 6.0},
        {"dst_type": FP4, "scale_alg": 2, "dst_type_max": 13.0},
        {"dst_type": FP4, "block_size": 48},
    ):
        with pytest.raises(RuntimeError, match="161002"):
            run("npu_dynamic_mx_quant", row(1.0), **wrong)
    with pytest.raises(RuntimeError, match="even"):
        run("npu_dynamic_mx_quant", torch.ones(2, 3))


def test_two_axes_squares_and_groups() -> None:
    """Each is the plain operator on a part: the transposed matrix, one square at a time, the rows of one group."""
    x = (torch.randn(70, 66) * torch.exp2(torch.randint(-9, 9, (70, 66)))).half()
    y1, s1, y2, s2 = run("npu_dynamic_mx_quant_with_dual_axis", x, dst_type=FP8)
    for (y, s), of in (((y1, s1), x), ((y2.t(), s2.transpose(0, 1)), x.t())):
        plain, scales = run("npu_dynamic_mx_quant", of, dst_type=FP8)
        assert torch.equal(y.view(torch.uint8), plain.view(torch.uint8))
        assert torch.equal(s.reshape(len(of), -1), scales.flatten(1))
    y, of_rows, of_columns = run("npu_dynamic_block_mx_quant", x, dst_type=FP8)
    assert (of_rows.shape, of_columns.shape) == ((70, 2, 2), (2, 66, 2))
    by_row, by_column = of_rows.flatten(1), of_columns.transpose(1, 2).flatten(0, 1)
    for i, rows in enumerate(x.split(32)):
        for j, square in enumerate(rows.split(32, 1)):
            exponent = int(square.abs().max().double().log2().floor()) - 8
            part = y[32 * i : 32 * i + 32, 32 * j : 32 * j + 32].double() * 2.0**exponent
            assert (part - square.double()).abs().max() <= square.abs().max().double() / 8
            assert set(by_row[32 * i : 32 * i + 32, j].tolist()) == {exponent + 127}
            assert set(by_column[i, 32 * j : 32 * j + 32].tolist()) == {exponent + 127}
    ends = torch.tensor([5, 5, 70], dtype=torch.int32)
    y, scale = run("npu_grouped_dynamic_mx_quant", x, ends, dst_type=FP8)
    assert scale.shape == (70 // 64 + 3, 66, 2)
    for start, end, first in ((0, 5, 0), (5, 70, 2)):
        plain, scales = run("npu_dynamic_mx_quant", x[start:end], axis=0, dst_type=FP8)
        assert torch.equal(y[start:end].view(torch.uint8), plain.view(torch.uint8))
        assert torch.equal(scale[first : first + len(scales)], scales)
    assert not scale[1].any()
    with pytest.raises(RuntimeError, match="161002"):
        run("npu_grouped_dynamic_mx_quant", x, ends[:2])


def test_activated_and_quantised() -> None:
    """SwiGLU of both halves, in either order, and of pairs that are cut off; then the plain operators."""
    x = (8 * torch.randn(70, 128)).double()
    left, right = x.chunk(2, -1)
    a, b = x[:, 0::2].clamp(max=3.0), x[:, 1::2].clamp(-3.0, 3.0)
    mode = {"swiglu_mode": 1, "clamp_limit": 3.0, "glu_alpha": 0.5, "glu_bias": 2.0}
    silu = torch.nn.functional.silu
    for how, expected in (
        ({}, silu(right) * left),
        ({"activate_left": True}, silu(left) * right),
        (mode, a / (1 + torch.exp(-0.5 * a)) * (b + 2.0)),
    ):
        found = run("npu_swiglu_mx_quant", x, dst_type=FP4, axis=-2, **how)
        assert all(map(torch.equal, found, run("npu_dynamic_mx_quant", expected, axis=-2)))
    ends = torch.tensor([5, 70])
    y1, s1, y2, s2 = run("npu_swiglu_mx_quant_with_dual_axis", x, group_index=ends)
    bits = [part.view(torch.uint8) for part in (y1, s1, y2, s2)]
    row = run("npu_dynamic_mx_quant", silu(left) * right, dst_type=FP8, scale_alg=1)
    column = run("npu_grouped_dynamic_mx_quant", silu(left) * right, ends, dst_type=FP8, scale_alg=1)
    assert all(torch.equal(one, other.view(torch.uint8)) for one, other in zip(bits, (*row, *column), strict=True))


@pytest.mark.parametrize("left", [True, False])
def test_the_gradient_of_the_activation_quantised_along_both_axes(left: bool) -> None:
    """Autograd's gradient, quantised by the plain operators; rows behind the last group are left out along the columns."""
    x, slope = torch.randn(70, 128).double().requires_grad_(), torch.randn(70, 64).double()
    a, b = x.chunk(2, -1)[:: 1 if left else -1]
    (gradient,) = torch.autograd.grad(torch.nn.functional.silu(a) * b, x, slope)
    both = run("npu_dynamic_mx_quant_with_dual_axis", gradient, dst_type=FP8, scale_alg=1)
    name = "_npu_swiglu_backward_mx_quant_with_dual_axis"
    found = run(name, x.detach(), slope, activate_left=left)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(found, both, strict=True)
    )
    _, _, y, scale = run(name, x.detach(), slope, activate_left=left, group_index=torch.tensor([5, 40]))
    whole = run("npu_grouped_dynamic_mx_quant", gradient[:40], torch.tensor([5, 40]), dst_type=FP8, scale_alg=1)
    assert torch.equal(y[:40].view(torch.uint8), whole[0].view(torch.uint8))
    assert not y[40:].float().any()
    assert torch.equal(scale[:2], whole[1])


def powers(*size: int) -> torch.Tensor:
    """Powers of two near 1, as bytes."""
    return torch.randint(125, 130, size).to(torch.uint8)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("packed", [(True, True), (False, True), (False, False)])
def test_products_with_powers_of_two(packed: tuple[bool, bool], transposed: bool) -> None:
    """K of 96 has three blocks and four scales; 4-bit floats of the second factor lie along K where it was transposed."""
    m, n, k = 3, 4, 96
    first, second = (torch.tensor(E2M1_VALUES)[torch.randint(0, 8, size)] for size in ((m, k), (k, n)))
    s1, s2 = powers(m, 2, 2), powers(2, n, 2)
    left = first.double() * torch.exp2(s1.double() - 127).flatten(1).repeat_interleave(32, 1)[:, :k]
    right = (
        second.double() * torch.exp2(s2.transpose(0, 1).double() - 127).flatten(1).repeat_interleave(32, 1)[:, :k].t()
    )
    x1 = pack(first, E2M1) if packed[0] else first.to(torch.float8_e4m3fn)
    x2 = second.to(torch.float8_e4m3fn)
    if packed[1]:
        x2 = pack(second.t().contiguous(), E2M1).t() if transposed else pack(second, E2M1)
    dtypes = {name: FP4 if small else None for name, small in zip(("x1_dtype", "x2_dtype"), packed, strict=True)}
    bias = torch.randn(n)
    kinds = {"scale_dtype": 293, "pertoken_scale_dtype": 44, "group_sizes": [1, 1, 32], "output_dtype": 6}
    out = run("npu_quant_matmul", x1, x2, s2, pertoken_scale=s1, bias=bias, **kinds, **dtypes)
    torch.testing.assert_close(out, (left @ right + bias).float(), rtol=1e-6, atol=1e-5)


def test_products_of_floats_with_other_scales() -> None:
    """One for all, for rows and columns, for tiles of 128 by 128; an encoded one for columns behind a scale of blocks."""
    x1, x2 = (torch.randint(-8, 9, size).float() for size in ((130, 200), (200, 140)))
    small = x1.to(torch.float8_e5m2), x2.to(torch.float8_e4m3fn)
    exact = small[0].float() @ small[1].float()
    one, rows, columns = torch.tensor([0.5]), torch.rand(130), torch.rand(140)
    product = functools.partial(run, "npu_quant_matmul", *small, output_dtype=6)
    torch.testing.assert_close(product(one), exact * 0.5)
    torch.testing.assert_close(product(columns, pertoken_scale=rows), exact * columns * rows[:, None])
    tiles, of_rows = torch.rand(2, 2), torch.rand(130, 2)
    by_column = tiles.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :140]
    by_row = of_rows.repeat_interleave(128, 1)[:, :200]
    expected = (small[0].float() * by_row) @ (small[1].float() * by_column)
    for sizes in ([1, 128, 128], [0, 0, 0]):
        torch.testing.assert_close(product(tiles, pertoken_scale=of_rows, group_sizes=sizes), expected)
    whole = x1.to(torch.int8), x2.to(torch.int8)
    found = run("npu_quant_matmul", *whole, tiles, pertoken_scale=of_rows, group_sizes=[1, 128, 128], output_dtype=6)
    torch.testing.assert_close(found, (x1 * by_row) @ (x2 * by_column))
    weight, blocks = torch.tensor(E2M1_VALUES)[torch.randint(0, 8, (64, 4))], torch.rand(2, 4).bfloat16()
    scaled = weight * blocks.float().repeat_interleave(32, 0)
    found = run(
        "npu_quant_matmul", torch.ones(2, 64).to(torch.float8_e4m3fn), pack(weight, E2M1), blocks, x2_dtype=FP4, output_dtype=6,
        y_scale=run("npu_trans_quant_param", torch.full((4,), 0.25)).reshape(1, 4),
    )  # fmt: skip
    torch.testing.assert_close(found, scaled.sum(0).expand(2, 4) * 0.25)
    with pytest.raises(UnsupportedArgumentError, match="x1_dtype=5"):
        product(one, x1_dtype=5)
    with pytest.raises(UnsupportedArgumentError, match="output_dtype"):
        run("npu_quant_matmul", *small, one)


def test_two_levels_of_scales_and_the_way_back() -> None:
    """The largest of 512 numbers becomes 6; powers of two undo what they did; every number comes back within its step."""
    x = torch.nn.functional.pad(torch.tensor([[12.0, 1.0]]), (0, 598), value=0.5)
    y, level_0, level_1 = run("npu_dynamic_dual_level_mx_quant", x, smooth_scale=torch.full((600,), 0.5))
    assert level_0.tolist() == [[1.0, pytest.approx(0.25 / 6)]]
    assert level_1.flatten()[[0, 1, 16, 18, 19]].tolist() == [127, 123, 127, 127, 0]
    assert numbers(y, 3) == [6.0, 0.5, 0.0]
    back = run("npu_anti_mx_quant", y, level_1, src_type=FP4, dst_type=6)
    assert back[0, [0, 1, 2, 32, 512, 599]].tolist() == [6.0, 0.5, 0.0, 0.25, 6.0, 6.0]
    wide = torch.randn(40, 5)
    y, scale = run("npu_dynamic_mx_quant", wide, axis=0, dst_type=FP8)
    steps = torch.exp2(torch.stack([scale[0, :, i // 32] for i in range(40)]).float() - 127)
    for dtype in (torch.float32, torch.bfloat16):
        back = run("npu_anti_mx_quant", y, scale, axis=0, src_type=FP8, dst_type=dtype)
        assert torch.equal(back, (y.float() * steps).to(dtype))
    with pytest.raises(RuntimeError, match="src_type"):
        run("npu_anti_mx_quant", y, scale, src_type=FP4)


def power_above(quotient: np.ndarray) -> Any:
    """The least power of two that is not below the number; 0 for 0."""
    fraction, exponent = np.frexp(quotient)
    return np.where(quotient == 0, 0, np.ldexp(np.float32(1), exponent - (fraction == 0.5)))


def nearest(x: np.ndarray, bits: int, least: int, largest: float) -> Any:
    """The nearest float with that many bits behind the first one, whose least normal number is 2^least; even, where two are."""
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - bits)
    return np.clip(np.rint(x / step) * step, -largest, largest)


@pytest.mark.parametrize("mode", [2, 3, 4, 5, 11, 12, 14, 15, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_routed_rows_in_blocks(mode: int, dtype: torch.dtype) -> None:
    """Rows of 150 numbers of many magnitudes, one of zeros, in NumPy: blocks of 32 or 128, powers of two or quotients."""
    torch.manual_seed(mode)
    x = (torch.randn(5, 150) * torch.logspace(-7, 4, 150)).to(dtype)
    x[3] = 0
    experts = torch.tensor([[1], [0], [1], [0], [0]], dtype=torch.int32)
    values, _, _, scales = run("npu_moe_init_routing_v2", x, experts, expert_num=2, quant_mode=mode)
    bits, least, largest = (2, -14, 57344.0) if mode in {2, 4, 11, 14, 16} else (3, -6, 448.0)
    block = 32 if mode in {2, 3, 16, 17} else 128
    rows = x[[1, 3, 4, 0, 2]].float().numpy()
    blocks = np.pad(rows, ((0, 0), (0, -150 % block))).reshape(5, -1, block)
    most = np.abs(blocks).max(-1)
    if block == 32 and dtype == torch.float16:  # bfloat16's eight bits, the others cut off
        fraction, exponent = np.frexp(most)
        most = np.ldexp(np.floor(fraction * 256) / 256, exponent)
    most = np.maximum(most, np.float32(1e-4 if mode > 13 else 0))
    scale = most / np.float32(largest) if mode in {11, 12} else power_above(most / np.float32(largest))
    quotients = (blocks / np.where(scale == 0, 1, scale)[..., None]).reshape(5, -1)[:, :150]
    assert np.array_equal(values.float().numpy(), nearest(quotients, bits, least, largest))
    stored = scales.reshape(5, -1).float().numpy()
    assert np.array_equal(stored[:, : scale.shape[1]], np.maximum(scale, 2.0**-127 if block == 32 else 0))
    assert (stored[:, scale.shape[1] :] <= 2.0**-127).all()
