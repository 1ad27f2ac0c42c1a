"""Quantisers of groups, blocks, slices and products, and the way back: numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError
from npugraph_ex.operators._hifloat8 import encode
from npugraph_ex.operators._int4 import pack, unpack


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula(*args, **kwargs)


def test_int4_there_and_back() -> None:
    """Every value, the first in the lowest bits; unpacking is the inverse of packing."""
    values = torch.arange(-8, 8, dtype=torch.int8)
    assert pack("test", values).tolist() == [-0x01234568, 0x76543210]
    assert torch.equal(unpack(pack("test", values)), values)
    with pytest.raises(ValueError, match="multiple of 8"):
        pack("test", values[:9])


def test_whole_numbers_scaled_back() -> None:
    """(3 + 1) * 0.5 and 3 * 0.5; int4 values of one word; bfloat16 on demand."""
    x = torch.tensor([[3, -128]], dtype=torch.int8)
    scale, offset = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 28.0])
    assert run("npu_anti_quant", x, scale, offset=offset).tolist() == [[2.0, -200.0]]
    plain = run("npu_anti_quant", x, torch.tensor([0.5]), dst_dtype=torch.bfloat16)
    assert (plain.tolist(), plain.dtype) == ([[1.5, -64.0]], torch.bfloat16)
    packed = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert run("npu_anti_quant", packed, torch.tensor([2.0])).tolist() == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]]
    with pytest.raises(RuntimeError, match=r"src_dtype should be torch\.quint4x2"):
        run("npu_anti_quant", packed, scale, src_dtype=1)


def test_rows_in_groups() -> None:
    """Row 0 takes the first scales, rows 1 and 2 the third; the second group is empty. A tie goes to the even number."""
    x, index = torch.ones(3, 8), torch.tensor([1, 1, 3])
    scale = torch.tensor([[2.0] * 8, [99.0] * 8, [1.0, 1.5, 4.0, 200.0, -200.0, 0.0, 3.0, 7.0]])
    y = run("npu_group_quant", x, scale, index, offset=torch.tensor([1.0]))
    assert y.tolist() == [[3] * 8, *[[2, 2, 5, 127, -128, 1, 4, 8]] * 2]
    packed = run("npu_group_quant", x, scale, index, dst_dtype=torch.quint4x2)
    assert unpack(packed).tolist() == [[2] * 8, *[[1, 2, 4, 7, -8, 0, 3, 7]] * 2]


def test_blocks_by_hand() -> None:
    """Blocks of two rows and two columns of a 3 by 3 matrix; a block of zeros; the limit of a scale; an 8-bit float."""
    x = torch.tensor([[127.0, 1.0, 0.0], [-254.0, 3.0, 0.0], [10.0, 5.0, 127.0]])
    blocks = {"row_block_size": 2, "col_block_size": 2}
    y, scale = run("npu_dynamic_block_quant", x, **blocks)
    assert scale.tolist() == [[2.0, 0.0], [pytest.approx(10 / 127), 1.0]]
    assert y.tolist() == [[64, 0, 0], [-127, 2, 0], [127, 64, 127]]  # 63.5, 0.5, 1.5 and 63.5 are ties
    y, scale = run("npu_dynamic_block_quant", x[None], min_scale=1.0, **blocks)
    assert (scale.tolist()[0][0], y.tolist()[0][0]) == ([1.0, 0.0], [127, 1, 0])
    y, scale = run("npu_dynamic_block_quant", torch.tensor([[8.0, -2.0]]), dst_type=torch.float8_e4m3fn)
    assert (y.float().tolist(), scale.tolist()) == ([[448.0, -112.0]], [[pytest.approx(8 / 448)]])


def test_updates_are_quantised_into_their_places() -> None:
    """By row and by pair of row and place; 3 / 2 + 1 is 2.5 and rounds to 2. The functional twin leaves its input."""
    cache = torch.zeros(2, 3, 2, dtype=torch.int8)
    updates, scales, points = (
        torch.tensor([[[3.0, 4.0]], [[8.0, 900.0]]]),
        torch.tensor([2.0, 4.0]),
        torch.tensor([1, 0]),
    )
    by_row = torch.tensor([2, 0], dtype=torch.int32)
    changed = run("npu_quant_scatter", cache, by_row, updates, scales, points)
    assert changed.tolist() == [[[0, 0], [0, 0], [2, 1]], [[5, 127], [0, 0], [0, 0]]]
    assert not cache.any()
    by_pair = torch.tensor([[1, 1], [0, 2]], dtype=torch.int32)
    assert run("npu_quant_scatter_", cache, by_pair, updates, scales, points) is cache
    assert cache.tolist() == [[[0, 0], [0, 0], [5, 127]], [[0, 0], [2, 1], [0, 0]]]
    with pytest.raises(RuntimeError, match="reduce should be 'update'"):
        run("npu_quant_scatter_", cache, by_row, updates, scales, points, reduce="add")


def test_products_and_quantisation() -> None:
    """Permutations as factors move numbers only, so the codes are known; clipping at half cuts off what is above half."""
    x = torch.tensor([[[7.0, 1.0, 2.0, 3.0, -7.0, 4.0, 5.0, 6.0], [0.0] * 8]])
    swap, turn = torch.eye(2).flip(0), torch.eye(8).flip(0)
    out, scale = run("npu_kronecker_quant", x, swap, turn)
    assert (scale.tolist(), unpack(out).tolist()) == ([1.0], [[[0] * 8, [6, 5, 4, -7, 3, 2, 1, 7]]])
    out, scale = run("npu_kronecker_quant", x, torch.eye(2), torch.eye(8), 0.5)
    assert (scale.tolist(), unpack(out)[0, 0].tolist()) == ([0.5], [7, 2, 4, 6, -8, 7, 7, 7])
    y, scale = run("npu_rotate_quant", x[0], torch.eye(4).flip(0))
    assert (scale[0].item(), y[0].tolist()) == (pytest.approx(7 / 127), [54, 36, 18, 127, 109, 91, 73, -127])
    cut, scale = run("npu_rotate_quant", x[0], torch.eye(8), alpha=torch.tensor([0.5]), dst_dtype=torch.quint4x2)
    assert (scale[0].item(), unpack(cut)[0].tolist()) == (0.5, [7, 2, 4, 6, -7, 7, 7, 7])


def test_scaling_back_activation_and_quantisation() -> None:
    """Far from 0 SiLU is the identity, so A = 100 gives 100 B. Dynamic, static, groups with a row left over, both biases."""
    x = torch.tensor([[50, 50, 1, 2], [50, 50, 4, 2], [9, 9, 9, 9]], dtype=torch.int32)
    weight = torch.tensor([[2.0, 2.0, 1.0, 1.0], [2.0, 2.0, 0.5, 0.5]])
    groups = {"weight_scale": weight, "group_index": torch.tensor([1, 1]), "activate_left": True, "quant_mode": 1}
    out, scale = run("npu_dequant_swiglu_quant", x, quant_scale=torch.tensor([[1.0, 1.0], [1.0, 4.0]]), **groups)
    assert out.tolist() == [[64, 127], [64, 127], [0, 0]]
    torch.testing.assert_close(scale, torch.tensor([200 / 127, 400 / 127, 0.0]))
    row = {"weight_scale": weight[0], "activation_scale": torch.tensor([[1.0]]), "activate_left": True}
    whole = torch.tensor([0, 0, 1, -2], dtype=torch.int32)
    out, scale = run("npu_dequant_swiglu_quant", x[:1], bias=whole, quant_scale=torch.tensor([10.0]), **row)
    assert (out.tolist(), scale.tolist()) == ([[20, 0]], [0.0])
    floating, offset = torch.tensor([0.0, 0.0, 0.5, 0.0]), torch.tensor([1.0, -2.0])
    more = {"quant_scale": torch.tensor([10.0, 20.0]), "quant_offset": offset}
    assert run("npu_dequant_swiglu_quant", x[:1], bias=floating, **more, **row)[0].tolist() == [[16, 8]]


@pytest.mark.parametrize("mode", [1, 2])
def test_the_cut_off_activation_of_both_splits(mode: int) -> None:
    """Gates 9 and 0, cut off at 2; values 5 and -0.5, cut off at 2; alpha 100 is a step; bias 1: 2 * 3 and 0."""
    row = [9.0, 5.0, 0.0, -0.5] if mode == 1 else [9.0, 0.0, 5.0, -0.5]
    out, scale = run(
        "npu_dequant_swiglu_quant", torch.tensor([row]), activate_left=True, quant_mode=1, swiglu_mode=mode,
        clamp_limit=2.0, glu_alpha=100.0,
    )  # fmt: skip
    assert (out.tolist(), scale.tolist()) == ([[127, 0]], [pytest.approx(6 / 127)])


def test_other_outputs_of_operators_that_quantise() -> None:
    """Int4 and 8-bit floats of npu_quantize, of the fused norms, and of the quantised gradient of the norm."""
    x = torch.tensor([[1.0, -1.0] * 4])
    assert unpack(run("npu_quantize", x, torch.tensor([3.0]), None, 16, -1, False)).tolist() == [[3, -3] * 4]
    assert run("npu_quantize", x, torch.tensor([0.5]), None, 24, -1).float().tolist() == [[2.0, -2.0] * 4]
    with pytest.raises(UnsupportedArgumentError, match="dtype=16"):
        run("npu_quantize", x, torch.tensor([3.0]), None, 16, -1, True)
    y, nothing, *_, scale, _ = run("npu_add_rms_norm_dynamic_quant", x, 0 * x, torch.ones(8), epsilon=0.0, y_dtype=16)
    assert (unpack(y).tolist(), nothing.shape, scale.tolist()) == ([[7, -7] * 4], (0,), [pytest.approx(1 / 7)])
    half = torch.full((8,), 0.5)
    y, _, _ = run("npu_add_rms_norm_quant", x, 0 * x, torch.ones(8), half, None, epsilon=0.0, dst_type=291)
    assert (y.dtype, y.float().tolist()) == (torch.float8_e5m2, [[2.0, -2.0] * 4])
    dy, rstd = torch.eye(8)[:1], torch.ones(1)
    exact, _ = run("npu_rms_norm_backward", dy, x, torch.ones(8), rstd[:, None])
    quantised, dgamma = run("_npu_rms_norm_backward_quant", dy, x, rstd, torch.ones(8), torch.tensor([0.125]))
    torch.testing.assert_close(quantised * 0.125, exact)  # all gradients are whole eighths
    assert dgamma.tolist() == [1.0, *[0.0] * 7]


@pytest.mark.parametrize("axis", [-1, 0])
def test_blocks_with_powers_of_two_as_scales(axis: int) -> None:
    """Blocks with largest elements 300, 0.75 and none: exponents 8 - 8 and -1 - 8, bytes 127, 118 and 0; pairs are filled up."""
    row = torch.zeros(70)
    row[0], row[1], row[32], row[33] = 300.0, -3.0, 0.75, 2.0**-13
    x = row[None] if axis == -1 else row[:, None]
    y, scale = run("npu_dynamic_mx_quant", x, axis=axis, dst_type=24)
    assert scale.flatten().tolist() == [127, 118, 0, 0]
    assert scale.shape == ((1, 2, 2) if axis == -1 else (2, 1, 2))
    # 300 lies between 288 and 320; 0.75 is 384 / 512, and 2^-13 is 1/16 there.
    assert y.float().flatten()[[0, 1, 32, 33, 69]].tolist() == [288.0, -3.0, 384.0, 0.0625, 0.0]
    y, scale = run("npu_dynamic_mx_quant", x, axis=axis, dst_type=291)
    assert scale.flatten().tolist() == [120, 111, 0, 0]


def test_norms_with_powers_of_two_as_scales() -> None:
    """The parts in turn, in float64; the sum is handed out."""
    x1, x2, gamma, beta = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 40), (3, 40), (40,), (40,)))
    n = torch.nn.functional.rms_norm(x1 + x2, (40,), gamma, 1e-6) + beta
    y, scale = run("npu_dynamic_mx_quant", n, dst_type=24)
    alone = run("npu_rms_norm_dynamic_mx_quant", x1 + x2, gamma, beta=beta, dst_type=24)
    fused = run("npu_add_rms_norm_dynamic_mx_quant", x1, x2, gamma, beta=beta, dst_type=24)
    assert torch.equal(fused[1], x1 + x2)
    for first, second, rstd in (alone, (fused[0], *fused[2:])):
        assert torch.equal(first.view(torch.uint8), y.view(torch.uint8))
        assert torch.equal(second, scale)
        torch.testing.assert_close(rstd, 1 / ((x1 + x2).square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_quantisation_and_the_largest_magnitude() -> None:
    """The whole, and groups of one, no and two rows, each with its scale and its maximum."""
    x = torch.tensor([[1.0, -3.0], [2.0, 0.5], [-5.0, 4.0]])
    y, amax = run("npu_quant_max", x, torch.tensor([2.0]))
    assert (y.float().tolist(), amax.tolist()) == ([[2.0, -6.0], [4.0, 1.0], [-10.0, 8.0]], [5.0])
    y, amax = run("npu_quant_max", x, torch.tensor([2.0, 9.0, 0.5]), dst_dtype=24, group_list=torch.tensor([1, 1, 3]))
    assert (y.float().tolist(), amax.tolist()) == ([[2.0, -6.0], [1.0, 0.25], [-2.5, 2.0]], [3.0, 0.0, 5.0])


@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_gradients_of_the_weighted_activation(limit: float) -> None:
    """Autograd's, of the rows that groups have; the last row has none."""
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(3, 1, dtype=torch.float64, requires_grad=True)
    a, b = x.chunk(2, -1)
    if limit:
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    activated = torch.nn.functional.silu(a) * b
    g = torch.randn_like(activated)
    g[2] = 0
    of_x, of_weight = torch.autograd.grad(activated * weight, (x, weight), g)
    options = {"weight": weight.detach(), "y_origin": activated.detach(), "group_index": torch.tensor([1, 1])}
    got = run("npu_swiglu_group_quant_backward", g + 1.0 * (g == 0), x.detach(), clamp_limit=limit, **options)
    torch.testing.assert_close(got[0], of_x)
    torch.testing.assert_close(got[1], of_weight)
    plain, nothing = run("npu_swiglu_group_quant_backward", g, x.detach(), clamp_limit=limit)
    torch.testing.assert_close(plain, of_x / weight.detach())
    assert nothing.shape == (0,)


def test_the_weighted_activation_in_groups() -> None:
    """A scale for each group from its largest magnitude, or a given one; groups end at the last row; rows behind them are 0."""
    x = torch.tensor([[4.0, 3.0], [2.0, -1.0], [1.0, 2.0], [5.0, 5.0]]).double()
    a, b = x.clamp(max=2.0)[:, :1], x.clamp(-2.0, 2.0)[:, 1:]
    activated = torch.nn.functional.silu(a) * b * torch.tensor([[1.0], [3.0], [0.5], [1.0]])
    how = {"weight": torch.tensor([1.0, 3.0, 0.5, 1.0]).double(), "clamp_limit": 2.0, "output_origin": True}
    name = "npu_swiglu_group_quant"
    y, scale, origin = run(name, x, group_index=torch.tensor([2, 0, 1]), quant_mode=3, dst_type_max=8.0, **how)
    torch.testing.assert_close(origin, torch.cat((activated[:3], torch.zeros(1, 1).double())))
    largest = torch.stack((activated[:2].abs().max(), torch.tensor(1e-8).double(), activated[2].abs().max()))
    torch.testing.assert_close(scale, largest / 8)
    shares = torch.cat((activated[:2] / scale[0], activated[2:3] / scale[2], torch.zeros(1, 1).double()))
    assert torch.equal(y, encode(shares, saturate=False))
    beyond = run(name, x, group_index=torch.tensor([9, 2]), quant_mode=3, dst_type_max=8.0, **how)[1]
    torch.testing.assert_close(beyond, torch.stack((activated.abs().max(), largest[1])) / 8)
    y, scale, _ = run(name, x, group_index=torch.tensor([3, 9]), quant_mode=2, scale=torch.tensor([2.0, 4.0]), **how)
    factors = torch.tensor([[2.0], [2.0], [2.0], [4.0]])
    assert torch.equal(y, encode(activated * factors, saturate=False))
    assert scale.shape == (0,)
    for wrong, match in (
        ({"quant_mode": 1}, "quant_mode"),
        ({"quant_mode": 2}, "scale"),
        ({"quant_mode": 3, "clamp_limit": 0.0}, "clamp"),
    ):
        with pytest.raises(RuntimeError, match=match):
            run(name, x, **wrong)


def test_blocks_that_begin_anew_with_each_group() -> None:
    """Three groups, one of them empty: each quantised as if it were alone, its scales in places of its own."""
    x, ends = torch.randn(2, 300, 70), [130, 130, 300]
    sizes = {"row_block_size": 128, "col_block_size": 64, "dst_type": 24, "min_scale": 0.5}
    name = "npu_grouped_dynamic_block_quant"
    y, scale = run(name, x, torch.tensor(ends, dtype=torch.int32), **sizes)
    assert scale.shape == (2, 300 // 128 + 3, 2)
    for start, end, first, rows in ((0, 130, 0, 2), (130, 300, 3, 2)):
        alone = run("npu_dynamic_block_quant", x[:, start:end], **sizes)
        assert torch.equal(y[:, start:end].view(torch.uint8), alone[0].view(torch.uint8))
        assert torch.equal(scale[:, first : first + rows], alone[1])
    assert not scale[:, 2].any()
    for wrong in ({"row_block_size": 2}, {"col_block_size": 5}, {"group_list_type": 1}):
        with pytest.raises(RuntimeError, match=next(iter(wrong))):
            run(name, x, torch.tensor(ends), **wrong)
    with pytest.raises(RuntimeError, match="group_list"):
        run(name, x, torch.tensor([130, 20, 300]))


def test_weights_in_another_memory_order() -> None:
    """Values and strides stay; weights that do not lie transposed, and other dtypes, are refused with the device's code."""
    record = OPERATORS["npu::npu_weight_quant_preprocess"]
    (weight, scale, *codes), named = record.calls()[0]
    found = record.formula(weight, scale, *codes, bias=torch.ones(3), **named)
    for one, given in zip(found, (weight, scale, weight.new_empty(0), torch.ones(3)), strict=True):
        assert torch.equal(one, given)
        assert one.stride() == given.stride()
    record.constraints(weight, scale, *codes, **named)
    for wrong in (
        (weight.contiguous(), scale, *codes),
        (weight, scale.contiguous(), *codes),
        (weight, scale, 5, 296, 293),
    ):
        with pytest.raises(RuntimeError, match="161002"):
            record.constraints(*wrong, **named)
