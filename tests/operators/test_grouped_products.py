"""Products of groups of rows: against a product for each group in float64, with numbers that hold exactly or within rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch.utils._pytree import tree_map_only

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError
from npugraph_ex.operators._hifloat8 import decode
from npugraph_ex.operators._microscaling import E2M1, pack

assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = 296
ENDS = torch.tensor([2, 3, 5])
SIZES = torch.tensor([2, 1, 2])


def formula(name: str) -> Callable[..., Any]:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


def small(*size: int) -> torch.Tensor:
    """Random int4 values, as int8."""
    return torch.randint(-8, 8, size).to(torch.int8)


def packed(values: torch.Tensor) -> torch.Tensor:
    """Eight int4 values in one int32."""
    return formula("npu_convert_weight_to_int4pack")(values.int())


def by_group(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows 0 and 1 times the first matrix, 2 times the second, 3 and 4 times the third, and one row of zeros."""
    groups = [0, 0, 1, 2, 2]
    return torch.cat(
        [torch.einsum("rk,rkn->rn", x[:5].double(), weight[groups].double()), torch.zeros(1, weight.shape[-1])]
    )


def test_rows_split_in_each_form_of_the_list() -> None:
    """Ends, sizes and pairs, of which one leaves a group out; stacked and listed weights; each activation."""
    x, weight, bias = (torch.randn(size, dtype=torch.float64) for size in ((6, 4), (3, 4, 5), (3, 5)))
    split = functools.partial(formula("npu_grouped_matmul"), [x], split_item=3, group_type=0)
    expected = by_group(x, weight)
    for group_list, kind in ((ENDS, 0), (ENDS, None), (SIZES, 1), (torch.stack([torch.arange(3), SIZES], 1), 2)):
        for weights in ([weight], [*weight]):
            torch.testing.assert_close(split(weights, group_list=group_list, group_list_type=kind)[0], expected)
    (out,) = split([weight], bias=[bias], group_list=torch.tensor([[2, 2]]), group_list_type=2)
    torch.testing.assert_close(out[:2], x[:2] @ weight[2] + bias[2])
    assert not out[2:].any()
    gelu = torch.nn.functional.gelu
    functions = {
        1: torch.relu,
        2: functools.partial(gelu, approximate="tanh"),
        3: gelu,
        4: lambda y: y / (1 + torch.exp(-1.702 * y)),
        5: torch.nn.functional.silu,
    }
    for act_type, function in functions.items():
        torch.testing.assert_close(split([weight], group_list=ENDS, act_type=act_type)[0], function(expected))
    listed = formula("npu_grouped_matmul.List")([x], [*weight], group_list=[2, 3, 5], split_item=3)
    torch.testing.assert_close(listed[0], expected)


def test_no_split_and_columns_split() -> None:
    """A list of factors of any leading dimensions; columns of x with rows of the weight, stacked and listed."""
    a, b = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    c, d = torch.randn(4, 6, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    product = formula("npu_grouped_matmul")
    for found, expected in zip(product([a, b], [c, d], group_type=-1), (a @ c, b @ d), strict=True):
        torch.testing.assert_close(found, expected)
    x, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    expected = torch.stack([x[:, :2] @ weight[:2], x[:, 2:3] @ weight[2:3], x[:, 3:] @ weight[3:]])
    (stacked,) = product([x], [weight], group_list=ENDS, split_item=3, group_type=2)
    torch.testing.assert_close(stacked, expected)
    torch.testing.assert_close(torch.stack(product([x], [weight], group_list=ENDS, group_type=2)), expected)


def test_quantised_and_anti_quantised_groups() -> None:
    """Scales per column and row, floating and encoded; an int8 result; packed weights with scales of their rows' groups."""
    x, weight = small(6, 16), small(3, 16, 8)
    scale, token = torch.rand(3, 8), torch.rand(6, 1)
    split = functools.partial(formula("npu_grouped_matmul"), [x], split_item=3, group_type=0, group_list=ENDS)
    whole = by_group(x, weight * scale.double().unsqueeze(1))
    out = split([weight], scale=[scale], per_token_scale=[token], output_dtype=torch.float32)[0]
    near(out.double(), whole * token)
    bits = scale.view(torch.int32).to(torch.int64)
    near(split([packed(weight)], scale=[bits.unsqueeze(1)], bias=[8 * (weight * scale.unsqueeze(1)).sum(1)],
               per_token_scale=[token], output_dtype=torch.float32)[0].double(), whole * token)  # fmt: skip
    int8 = split([weight], scale=[scale / 16], offset=[torch.full((3, 8), 3.0)])[0]
    assert int8.dtype == torch.int8
    assert (int8[:5].double() - (whole[:5] / 16 + 3).clamp(-128, 127)).abs().max() <= 0.5 + 1e-5

    floating, shift = torch.randn(6, 16, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    anti = functools.partial(formula("npu_grouped_matmul"), [floating], split_item=3, group_type=0, group_list=ENDS)
    real = (weight + shift.unsqueeze(1)) * scale.double().unsqueeze(1)
    for given in (weight, packed(weight)):
        out = anti([given], antiquant_scale=[scale], antiquant_offset=[shift])[0]
        torch.testing.assert_close(out, by_group(floating, real))


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("Requires manual passing group_type", {"group_type": None}),
        ("The group type must be -1, 0 or 2; group_type is 1", {"group_type": 1}),
        ("group_list should be", {"group_list": torch.tensor([3, 2, 5])}),
        ("group_list should be", {"group_list": torch.tensor([1, 2, 7])}),
        ("group_list_type should be", {"group_list_type": 3}),
        ("x_dtype=5", {"x_dtype": 5}),
        ("act_type=6", {"act_type": 6}),
    ],
)
def test_calls_that_are_refused(message: str, fields: dict[str, Any]) -> None:
    """The error names the argument, and is one of the device's where the device refuses."""
    given = {"group_type": 0, "split_item": 3, "group_list": ENDS, **fields}
    with pytest.raises(RuntimeError, match=message):
        formula("npu_grouped_matmul")([torch.randn(6, 4)], [torch.randn(3, 4, 5)], **given)


def test_the_gradient_of_the_weights_is_added() -> None:
    """For each group the transposed rows times the gradient's rows; in place and not; for stacked and joined groups."""
    y, x, grad = torch.randn(3, 4, 2, dtype=torch.float64), *(torch.randn(5, n, dtype=torch.float64) for n in (4, 2))
    add = formula("npu_grouped_matmul_add")
    expected = torch.stack([y[0] + x[:2].T @ grad[:2], y[1] + x[2:3].T @ grad[2:3], y[2] + x[3:].T @ grad[3:]])
    written, also = y.clone(), y.reshape(12, 2).clone()
    assert formula("npu_grouped_matmul_add_")(written, x, grad, ENDS) is written
    result = add(also, x, grad, SIZES, group_list_type=1)
    assert result.data_ptr() != also.data_ptr()
    for found in (written, result.reshape(3, 4, 2), also.reshape(3, 4, 2)):
        torch.testing.assert_close(found, expected)
    with pytest.raises(UnsupportedArgumentError, match="transpose_x"):
        add(y, x, grad, ENDS, transpose_x=False)


def test_swiglu_of_grouped_products_is_quantised() -> None:
    """Both versions, with int8 and packed weights, smoothing, sizes for ends; one step of int8 at most from float64."""
    x, weight = small(6, 16), small(3, 16, 8)
    scale, token, smooth = torch.rand(3, 8), torch.rand(6), torch.rand(3, 4) + 0.5
    groups = [0, 0, 1, 2, 2]

    def expected(factor: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        act, gate = (by_group(x, weight * scale.double().unsqueeze(1)) * token.unsqueeze(1)).chunk(2, -1)
        s = (torch.nn.functional.silu(act) * gate)[:5] * factor
        return s / s.abs().amax(1, keepdim=True) * 127, s.abs().amax(1) / 127

    def check(found: tuple[torch.Tensor, ...], factor: torch.Tensor | float = 1.0) -> None:
        quotient, scales = expected(factor)
        assert (found[0][:5].double() - quotient).abs().max() <= 0.5 + 1e-3
        near(found[1][:5].double(), scales)
        assert not found[0][5:].any()

    check(formula("npu_grouped_matmul_swiglu_quant")(x, weight, ENDS, scale, token))
    second = formula("npu_grouped_matmul_swiglu_quant_v2")
    check(second(x, [weight], [scale], token, SIZES, group_list_type=1, smooth_scale=smooth), smooth[groups])
    check(second(packed(x), [packed(weight)], [scale], token, ENDS))
    assist = 8 * (weight * scale.unsqueeze(1)).sum(1)
    check(second(x, [packed(weight)], [scale.unsqueeze(1)], token, ENDS, weight_assist_matrix=[assist]))
    wide_x, wide, wide_scale = small(6, 32), small(3, 32, 64), torch.rand(3, 64)
    in_nz = wide.reshape(3, 2, 16, 2, 32).permute(0, 3, 1, 2, 4).contiguous()
    for one, other in zip(*(second(wide_x, [w], [wide_scale], token, ENDS) for w in (wide, in_nz)), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UnsupportedArgumentError, match="4 dimensions"):
        second(x, [weight[:, None]], [scale], token, ENDS)


def test_swiglu_of_products_of_floats() -> None:
    """8-bit floats with scales of rows and columns, and with powers of two, quantised by row and by block; rows behind are 0."""
    x, weight = (torch.randint(-8, 9, size).to(torch.float8_e4m3fn) for size in ((6, 64), (3, 64, 128)))
    scale, token = torch.rand(3, 128), torch.rand(6)
    powers_x, powers_w = (torch.randint(124, 130, size).to(torch.uint8) for size in ((6, 1, 2), (3, 1, 128, 2)))
    second = functools.partial(formula("npu_grouped_matmul_swiglu_quant_v2"), x, [weight])

    def activated(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        act, gate = by_group(left, right)[:5].chunk(2, -1)
        return torch.nn.functional.silu(act) * gate

    s = activated(x.double() * token[:, None], weight.double() * scale[:, None])
    out, scales = second([scale], token, ENDS, quant_dtype=24)
    near(scales[:5].double(), s.abs().amax(1) / 448)
    near(out[:5].double() * scales[:5, None].double(), s, rtol=0.07, atol=float(scales.max()) * 2**-9)
    assert not out[5:].float().any()
    left = x.double() * torch.exp2(powers_x.double() - 127).flatten(1).repeat_interleave(32, 1)
    right = weight.double() * torch.exp2(powers_w[:, 0].double() - 127).mT.repeat_interleave(32, 1)
    modes = {"quant_mode": 2, "dequant_mode": 2, "x_scale_dtype": 293, "weight_scale_dtype": 293}
    out, scales = second([powers_w], powers_x, ENDS, quant_dtype=23, **modes)
    exact, bytes_ = OPERATORS["npu::npu_dynamic_mx_quant"].formula(activated(left, right), dst_type=23)
    assert torch.equal(scales[:5], bytes_)
    near(out[:5].double(), exact.double(), rtol=0.26)
    assert (out[:5].float() == exact.float()).float().mean() > 0.98
    halves, halves_scale = second([powers_w], powers_x, ENDS, quant_dtype=FP4, **modes)
    exact, bytes_ = OPERATORS["npu::npu_dynamic_mx_quant"].formula(activated(left, right), dst_type=FP4)
    assert torch.equal(halves_scale[:5], bytes_)
    assert (halves[:5] == exact).float().mean() > 0.98


def test_swiglu_of_products_of_hifloat8() -> None:
    """Bytes of 1 and 2: silu(3) * 6 is the largest of its row and becomes 32768, another half of it; on the device, too."""
    x = torch.tensor([[0x08, 0x10]], dtype=torch.uint8)  # 1 and 2
    weight = torch.tensor([[[0x08, 0x08, 0x10, 0x08], [0x08, 0x08, 0x10, 0x08]]], dtype=torch.uint8)
    call = (x, [weight], [torch.ones(1, 4)], torch.ones(1), torch.tensor([1]))
    how = {"quant_dtype": 290, "x_dtype": 290, "weight_dtype": 290, "dequant_dtype": 6}
    out, scale = formula("npu_grouped_matmul_swiglu_quant_v2")(*call, **how)
    assert decode(out).tolist() == [[32768.0, 16384.0]]
    near(scale, 6 * torch.nn.functional.silu(torch.tensor([3.0])) / 32768)
    found = torch_npu.npu_grouped_matmul_swiglu_quant_v2(*tree_map_only(torch.Tensor, torch.Tensor.npu, call), **how)
    assert torch.equal(found[0].cpu(), out)


def test_four_bit_results_on_the_device_have_the_size_that_op_plugin_allocates() -> None:
    """Half of what torch_npu's meta function announces."""
    x, weight = torch.zeros(4, 64, dtype=torch.uint8).npu(), torch.zeros(2, 128, 128, dtype=torch.uint8).npu()
    powers = (
        torch.full((2, 2, 256, 2), 127, dtype=torch.uint8).npu(),
        torch.full((4, 2, 2), 127, dtype=torch.uint8).npu(),
    )
    out, scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x, [weight], [powers[0]], powers[1], torch.tensor([2, 4]).npu(), dequant_mode=2, quant_mode=2, quant_dtype=FP4,
        dequant_dtype=6, weight_scale_dtype=293, x_scale_dtype=293, x_dtype=FP4, weight_dtype=FP4,
    )  # fmt: skip
    assert (out.shape, scale.shape) == ((4, 64), (4, 2, 2))


@pytest.mark.parametrize("halved", [(False, False), (False, True), (True, True)], ids=["8 8", "8 4", "4 4"])
def test_products_of_small_floats_in_blocks(halved: tuple[bool, bool]) -> None:
    """Powers of two of 32 elements; 4-bit floats of the weight lie along k or n; added up for tokens; numbers as scales."""
    numbers = torch.tensor(E2M1_VALUES)
    first, second = (numbers[torch.randint(0, 8, size)] for size in ((6, 128), (3, 128, 16)))
    powers_x, powers_w = (torch.randint(124, 130, size).to(torch.uint8) for size in ((6, 2, 2), (3, 2, 16, 2)))
    x = pack(first, E2M1).view(torch.int8) if halved[0] else first.to(torch.float8_e4m3fn)
    along_n = pack(second, E2M1) if halved[1] else second.to(torch.float8_e4m3fn)
    along_k = pack(second.mT.contiguous(), E2M1).mT if halved[1] else along_n
    left = first.double() * torch.exp2(powers_x.double() - 127).flatten(1).repeat_interleave(32, 1)
    right = second.double() * torch.exp2(powers_w.double() - 127).transpose(1, 2).flatten(2).repeat_interleave(32, 2).mT
    codes = [FP4 if half else None for half in halved]
    bias, logit, rows = torch.randn(3, 16), torch.rand(6), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = by_group(left, right)
    each = (expected + torch.cat([bias[[0, 0, 1, 2, 2]], torch.zeros(1, 16)])) * logit.unsqueeze(1)
    for weight in (along_n, along_k):
        for name in ("scale", "antiquant_scale"):
            scales: dict[str, Any] = {name: [powers_w]}
            (out,) = formula("npu_grouped_matmul")(
                [x], [weight], **scales, per_token_scale=[powers_x], per_token_scale_dtype=293, group_list=ENDS,
                split_item=3, group_type=0, x_dtype=codes[0], weight_dtype=codes[1], output_dtype=6, act_type=1,
            )  # fmt: skip
            near(out.double(), expected.relu())
        out = formula("npu_grouped_matmul_finalize_routing")(
            x, weight, SIZES, scale=powers_w, bias=bias, pertoken_scale=powers_x, logit=logit, row_index=rows, output_bs=3,
            x_dtype=codes[0], w_dtype=codes[1], scale_dtype=293, pertoken_scale_dtype=44,
        )  # fmt: skip
        near(out.double(), each[:3] + each[3:])
    if not any(halved):
        scale, token = torch.rand(3, 16), torch.rand(6)
        (out,) = formula("npu_grouped_matmul")(
            [x],
            [along_n],
            scale=[scale],
            per_token_scale=[token],
            group_list=ENDS,
            split_item=3,
            group_type=0,
            output_dtype=6,
        )
        plain = by_group(first.double() * token.double().unsqueeze(1), second.double() * scale.double().unsqueeze(1))
        near(out.double(), plain)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("x_dtype=5", {"x_dtype": 5}),
        ("scale_dtype=5", {"scale_dtype": 5}),
        ("wider floating output", {"output_dtype": 1}),
        ("whole k", {"group_type": 2}),
        ("in both or in none", {"x": [torch.ones(2, 64).half()], "weight_dtype": FP4}),
    ],
)
def test_small_floats_that_are_refused(message: str, fields: dict[str, Any]) -> None:
    """What the bytes are not known to stand for, integers and narrow results, split columns, one such factor alone."""
    given = {"output_dtype": 5, "group_type": 0, "split_item": 3, "group_list": torch.tensor([2]), **fields}
    x = given.pop("x", [torch.ones(2, 64).to(torch.float8_e5m2)])
    weight = torch.ones(1, 64, 8)
    weight = weight.to(torch.int8) if "weight_dtype" in given else weight.to(torch.float8_e5m2)
    with pytest.raises(UnsupportedArgumentError, match=message):
        formula("npu_grouped_matmul")(x, [weight], scale=[torch.ones(1, 8)], **given)


def test_grouped_products_are_added_up_for_each_token() -> None:
    """Each row weighted and added to its token, and the shared expert's rows; int4 weights with an offset of their groups."""
    x, weight = small(6, 16), small(3, 16, 8)
    scale, token, logit, shared = torch.rand(3, 8), torch.rand(6), torch.rand(6), torch.randn(2, 8)
    rows = torch.tensor([0, 1, 2, 0, 1, 2])
    each = by_group(x, weight * scale.double().unsqueeze(1)) * token.unsqueeze(1) * logit.unsqueeze(1)
    expected = each[:3] + each[3:]
    expected[1:] += 0.5 * shared
    call = functools.partial(
        formula("npu_grouped_matmul_finalize_routing"), x, pertoken_scale=token, logit=logit, row_index=rows,
        shared_input=shared, shared_input_weight=0.5, shared_input_offset=1, output_bs=3,
    )  # fmt: skip
    near(call(weight, SIZES, scale=scale).double(), expected)
    offset = torch.rand(3, 2, 8)
    with_offset = weight * scale.double().unsqueeze(1) + offset.double().repeat_interleave(8, 1)
    each = by_group(x, with_offset) * token.unsqueeze(1) * logit.unsqueeze(1)
    expected = each[:3] + each[3:]
    expected[1:] += 0.5 * shared
    out = call(
        packed(weight), ENDS, group_list_type=0, scale=scale.unsqueeze(1).expand(3, 2, 8), offset=offset,
        bias=8 * (weight * scale.unsqueeze(1)).sum(1),
    )  # fmt: skip
    near(out.double(), expected)
    with pytest.raises(RuntimeError, match="shared_input should be of 8 columns"):
        formula("npu_grouped_matmul_finalize_routing")(x, weight, SIZES, scale=scale, shared_input=torch.randn(2, 16))


def test_a_grouped_product_on_the_device() -> None:
    """The list of results comes back from the device, and the overload with a list on the host has its own kernel."""
    x, weight = torch.randn(5, 4).npu(), torch.randn(3, 4, 2).npu()
    (out,) = torch_npu.npu_grouped_matmul([x], [weight], group_list=ENDS.npu(), split_item=3, group_type=0)
    near(out.cpu().double(), by_group(x.cpu(), weight.cpu())[:5])
    (same,) = torch_npu.npu_grouped_matmul([x], [*weight.unbind()], group_list=[2, 3, 5], split_item=3)
    assert_equal(same, out)
