"""Matrix products with quantised operands, what follows a product, and gradients: by hand, or by torch's operators in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError
from npugraph_ex.operators._hifloat8 import encode

assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def formula(name: str) -> Callable[..., Any]:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


def small(*size: int) -> torch.Tensor:
    """Random int4 values, as int8."""
    return torch.randint(-8, 8, size).to(torch.int8)


def packed(values: torch.Tensor) -> torch.Tensor:
    """Eight int4 values in one int32, the first in the lowest bits, by Python's own numbers."""
    flat = values.reshape(-1, 8).tolist()
    words = [sum((value & 15) << 4 * place for place, value in enumerate(row)) for row in flat]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).reshape(*values.shape[:-1], -1)


def encoded(scale: float, offset: int = 0) -> torch.Tensor:
    """What ``npu_trans_quant_param`` makes of a scale and an offset."""
    bits = torch.tensor([scale]).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return bits | (1 << 46) | ((offset & 0x1FF) << 37)


@pytest.mark.parametrize("turned", [False, True])
def test_packed_int4_operands(turned: bool) -> None:
    """Both packed; the second along n, or along k and then transposed; the product is that of the numbers."""
    x1, x2 = small(3, 16), small(16, 24)
    right = packed(x2.mT.contiguous()).mT if turned else packed(x2)
    out = formula("npu_quant_matmul")(packed(x1), right, torch.ones(1), output_dtype=torch.float32)
    assert_equal(out.double(), x1.double() @ x2.double())


def test_encoded_scales() -> None:
    """(1, 2) @ (3, 4) = 11: times 0.5 and less 3 it is 2.5, which rounds to 2; a float16 output has no offset."""
    x1, x2 = torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3], [4]], dtype=torch.int8)
    product = formula("npu_quant_matmul")
    assert product(x1, x2, encoded(0.5, -3)).tolist() == [[2]]
    assert product(x1, x2, encoded(-0.5), output_dtype=torch.float16).tolist() == [[-5.5]]
    assert product(x1, x2, torch.ones(1), bias=torch.tensor([5]).int(), output_dtype=torch.int32).tolist() == [[16]]


def test_scales_of_groups_of_rows() -> None:
    """Int8 with int4, whose vector makes good what the lower halves miss; both int4 with an offset for each group."""
    x1, x2, scale, token = small(2, 16), small(16, 8), torch.rand(2, 8), torch.rand(2, 1)
    rows = scale.double().repeat_interleave(8, 0)
    weight = x2.double() * rows
    make_good = 8 * weight.sum(0)
    mixed = formula("npu_quant_matmul")(
        x1, packed(x2), scale, offset=make_good.float(), pertoken_scale=token, output_dtype=torch.float32,
        group_sizes=[0, 0, 8],
    )  # fmt: skip
    torch.testing.assert_close(mixed.double(), x1.double() @ weight * token.double(), rtol=1e-5, atol=1e-4)
    offset = torch.randn(2, 8).half()
    both = formula("npu_quant_matmul")(
        packed(x1), packed(x2), scale, offset=offset, pertoken_scale=token, output_dtype=torch.float32
    )
    weight = (x2.double() - offset.double().repeat_interleave(8, 0)) * rows
    torch.testing.assert_close(both.double(), x1.double() @ weight * token.double(), rtol=1e-5, atol=1e-4)


def test_dynamic_quantisation_before_the_product() -> None:
    """Each row of maximum 127 has scale 1, so its numbers are their own quotients; groups take their own weights."""
    x, weight = torch.tensor([[127.0, 2.0], [-3.0, 127.0], [254.0, 4.0]]), torch.tensor([[1, 2], [0, 3]])
    scale, bias = torch.tensor([1.0, 0.5]), torch.tensor([1, 2], dtype=torch.int32)
    by_hand = [[131 + 1, (6 + 2) / 2], [251 + 1, (381 + 2) / 2], [2 * 132, 8.0]]
    whole = formula("npu_quant_matmul_dequant")(x, weight.to(torch.int8), scale, bias=bias)
    assert whole.tolist() == by_hand
    static = {"x_scale": torch.tensor([2.0]), "quant_mode": "pertensor"}
    assert formula("npu_quant_matmul_dequant")(x[:1], weight.to(torch.int8), scale, **static).tolist() == [
        [2 * 66, 3.0]
    ]
    grouped = formula("npu_quant_grouped_matmul_dequant")(
        x, torch.stack([weight, 2 * weight]).to(torch.int8), scale.expand(2, 2), torch.tensor([1, 2])
    )
    assert grouped.tolist() == [[131, 3], [502, 381], [0, 0]]
    smooth = {"smooth_scale": torch.tensor([1.0, 0.5])}
    assert formula("npu_quant_matmul_dequant")(x[:1], weight.to(torch.int8), scale, **smooth).tolist() == [[129, 1.5]]


@pytest.mark.parametrize(("form", "approximate"), [("gelu_erf", "none"), ("gelu_tanh", "tanh")])
def test_product_and_gelu(form: str, approximate: str) -> None:
    """Both forms of GELU, with a floating bias behind the scales and a whole one before; the sum over a batch."""
    x1, x2 = small(3, 16), small(16, 8)
    rows, columns, bias = (torch.rand(n, dtype=torch.float64) / 8 for n in (3, 8, 8))
    scaled = x1.double() @ x2.double() * rows[:, None] * columns
    fused = functools.partial(formula("npu_quant_matmul_gelu"), x1, x2, rows, columns, approximate=form)
    gelu = functools.partial(torch.nn.functional.gelu, approximate=approximate)
    torch.testing.assert_close(fused(), gelu(scaled))
    torch.testing.assert_close(fused(bias=bias), gelu(scaled + bias))
    torch.testing.assert_close(fused(bias=torch.ones(8).int()), gelu(scaled + rows[:, None] * columns))
    batch = formula("npu_quant_matmul_reduce_sum")(
        torch.stack([x1, -x1]), torch.stack([x2, x2]), x1_scale=torch.stack([3 * rows, rows]), x2_scale=columns
    )
    torch.testing.assert_close(batch, 2 * scaled)


def test_weight_quantised_product() -> None:
    """A scale for the tensor, for columns, and for groups of rows; packed weights, both ways; a quantised result."""
    x, weight = torch.randn(3, 64, dtype=torch.float64), small(64, 8)
    product = formula("npu_weight_quant_batchmatmul")
    scale, offset, bias = (torch.rand(8, dtype=torch.float64) for _ in range(3))
    real = (weight + offset) * scale
    torch.testing.assert_close(product(x, weight, scale, offset, bias=bias), x @ real + bias)
    torch.testing.assert_close(product(x, packed(weight), scale[:1]), x @ (weight * scale[:1]))
    groups, shifts = torch.rand(2, 8, dtype=torch.float64), torch.rand(2, 8, dtype=torch.float64)
    real = (weight + shifts.repeat_interleave(32, 0)) * groups.repeat_interleave(32, 0)
    turned = packed(weight.mT.contiguous()).mT
    torch.testing.assert_close(product(x, turned, groups, shifts, antiquant_group_size=32), x @ real)
    whole = product(torch.ones(1, 8), torch.ones(8, 1).to(torch.int8), torch.tensor([0.5]), quant_scale=encoded(2.0, 7))
    assert whole.tolist() == [[15]]
    with pytest.raises(ValueError, match="antiquant_group_size 16"):
        product(x, weight, groups, antiquant_group_size=16)
    codes = formula("npu_trans_quant_param")(scale.float().bfloat16().float()).reshape(1, 8)
    shift = torch.randint(-9, 9, (1, 8), dtype=torch.int32)
    torch.testing.assert_close(product(x, weight, codes, shift), x @ ((weight + shift) * scale.bfloat16().double()))
    hifloats = encode(weight, saturate=True)
    torch.testing.assert_close(product(x, hifloats, scale, weight_dtype=290), x @ (weight * scale))
    torch.testing.assert_close(product(x, weight.to(torch.float8_e4m3fn), scale), x @ (weight * scale))
    with pytest.raises(UnsupportedArgumentError, match="weight_dtype"):
        product(x, weight, scale, weight_dtype=5)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("", lambda y, _: y),
        ("add", torch.add),
        ("mul", torch.mul),
        ("relu", lambda y, _: y.relu()),
        ("gelu_erf", lambda y, _: torch.nn.functional.gelu(y)),
        ("gelu_tanh", lambda y, _: torch.nn.functional.gelu(y, approximate="tanh")),
        ("16cast32", lambda y, _: y),
    ],
)
def test_what_follows_a_product(form: str, expected: Callable[..., torch.Tensor]) -> None:
    """Each form against torch's own operators."""
    x1, x2, bias, x3 = (torch.randn(size, dtype=torch.float64) for size in ((3, 8), (8, 4), (4,), (3, 4)))
    third, added = x3 if form in {"add", "mul"} else None, None if form.startswith("gelu") else bias
    out = formula("npu_fused_matmul")(x1, x2, bias=added, x3=third, fused_op_type=form)
    torch.testing.assert_close(out, expected(x1 @ x2 + (0 if added is None else bias), x3))
    with pytest.raises(ValueError, match="x3 goes with"):
        formula("npu_fused_matmul")(x1, x2, x3=x3 if third is None else None, fused_op_type=form)


def test_what_the_fused_product_refuses() -> None:
    """By CANN's sources: GELU with a bias or of a batch, and a batch that is broadcast."""
    fused = formula("npu_fused_matmul")
    x, w, b = torch.randn(3, 8).half(), torch.randn(8, 4).half(), torch.randn(4).half()
    one = {"fused_op_type": "gelu_erf"}
    for given, how, argument in (
        ((x, w), {"bias": b, **one}, "bias should be left out"),
        ((x[None], w[None]), one, "x1 should be one matrix"),
        ((x[None], w), {"fused_op_type": "relu"}, "x2 should be of the batch"),
    ):
        with pytest.raises(ValueError, match=argument):
            fused(*given, **how)


def test_the_half_precision_product_may_stay_wide() -> None:
    """16cast32 hands out the float32 result of float16 factors."""
    out = formula("npu_fused_matmul")(
        torch.ones(1, 2).half(), torch.full((2, 1), 1.0 + 2**-10).half(), fused_op_type="16cast32"
    )
    assert (out.dtype, out.item()) == (torch.float32, 2 + 2**-9)
    # 2048 + 1 is no half: the product is rounded to 2048 before the sum, with 1 or with -2048.
    factors = torch.tensor([[2048.0, 1.0]]).half(), torch.ones(2, 1).half()
    for x3, expected in ((1.0, 2048.0), (-2048.0, 0.0)):
        out = formula("npu_fused_matmul")(*factors, x3=torch.tensor([[x3]]).half(), fused_op_type="add")
        assert out.item() == expected


def test_linear_and_batched_products_have_torchs_gradients() -> None:
    """Values and both gradients are those of torch in float64; so are those of a broadcast factor, and second derivatives."""
    x, weight, bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 8), (4, 8), (4,)))
    out = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(formula("npu_linear")(x, weight, bias), out)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (x, weight), grad)
    torch.testing.assert_close(formula("npu_linear_backward")(grad, x, weight), expected)

    left, right = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 3, 8), (2, 8, 4)))
    out = left @ right
    torch.testing.assert_close(formula("npu_bmmV2")(left, right, [6, 4]), out.reshape(6, 4))
    upper = torch.randn_like(out)
    first, second = torch.autograd.grad(out, (left, right), upper)
    torch.testing.assert_close(formula("npu_bmm_v2_mat1_backward")(upper, left, right, [2, 3, 8]), first)
    torch.testing.assert_close(formula("npu_bmm_v2_mat2_backward")(upper, left, right, [2, 8, 4]), second)

    wanted = upper.clone().requires_grad_()
    grads = wanted @ right.mT, left.mT @ wanted
    seeds = torch.randn_like(left), torch.randn_like(right)
    expected = torch.autograd.grad(grads, (wanted, left, right), seeds)
    found = formula("matmul_double_backward")(*seeds, upper, left, right, [True, True, True])
    torch.testing.assert_close(found, expected)
    assert formula("matmul_double_backward")(seeds[0], None, upper, left, right, [False, True, True])[:2] == (
        None,
        None,
    )


def test_linear_on_the_device_has_its_gradient() -> None:
    """``backward`` calls npu_linear_backward."""
    x, weight = torch.randn(3, 8).npu().requires_grad_(), torch.randn(4, 8).npu().requires_grad_()
    torch_npu.npu_linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), weight.detach().cpu().sum(0).expand(3, 8))
    torch.testing.assert_close(weight.grad.cpu(), x.detach().cpu().sum(0).expand(4, 8))


def test_transposed_product_quantises() -> None:
    """With a scale for each batch's column the result is one row of int8 for each row."""
    a, b = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0]], [[5.0]]])
    scale = torch.cat([encoded(0.5), encoded(100.0)])
    out = formula("npu_transpose_batchmatmul")(a, b, scale=scale, perm_x1=[1, 0, 2])
    assert (out.dtype, out.tolist()) == (torch.int8, [[[2, 127]]])


def test_encoding_scales() -> None:
    """The 13 lowest bits are cut off, or rounded half to even; the offset is nine bits; bit 46 is set."""
    encode = formula("npu_trans_quant_param")
    assert_equal(
        encode(torch.tensor([0.5]), torch.tensor([-3.4, 300.0])), torch.cat([encoded(0.5, -3), encoded(0.5, 255)])
    )
    one = 1.0 + 2.0**-10  # the last bit that is kept
    between = torch.tensor([1.0 + 2.0**-11, one + 2.0**-11, one + 2.0**-12])
    assert_equal(encode(between), torch.cat([encoded(1.0), encoded(one), encoded(one)]))
    assert_equal(encode(between, None, 1), torch.cat([encoded(1.0), encoded(1.0 + 2.0**-9), encoded(one)]))


def test_packing_int4() -> None:
    """A weight and a quantised tensor are packed alike, and the product reads what they hold."""
    values = small(16, 8)
    assert_equal(formula("npu_convert_weight_to_int4pack")(values.int()), packed(values))
    quantised = formula("npu_quantize")(values.float(), torch.ones(1), None, 16, -1, False)
    assert_equal(quantised, packed(values))


ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "fastgelu": lambda y: y / (1 + torch.exp(-1.702 * y)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_two_products_with_an_activation(name: str) -> None:
    """One pair of weights with biases; a pair for each expert's rows, by numbers and by ends; weights of scaled integers."""
    x, first, second = (torch.randn(size, dtype=torch.float64) for size in ((5, 8), (2, 8, 4), (2, 4, 6)))
    biases = {"bias1": torch.randn(2, 4, dtype=torch.float64), "bias2": torch.randn(2, 6, dtype=torch.float64)}
    act, ffn = ACTIVATIONS[name], formula("npu_ffn")

    def expected(rows: torch.Tensor, expert: int) -> torch.Tensor:
        hidden = act(rows @ first[expert] + biases["bias1"][expert])
        return hidden @ second[expert] + biases["bias2"][expert]

    own = {key: bias[0] for key, bias in biases.items()}
    torch.testing.assert_close(ffn(x[None], first[0], second[0], name, **own), expected(x, 0)[None])
    each = torch.cat([expected(x[:2], 0), expected(x[2:], 1)])
    torch.testing.assert_close(ffn(x, first, second, name, expert_tokens=[2, 3], **biases), each)
    torch.testing.assert_close(ffn(x, first, second, name, expert_tokens_index=[2, 5], **biases), each)
    weights, scales = (small(8, 4), small(4, 6)), [torch.rand(n, dtype=torch.float64) for n in (4, 6, 4, 6)]
    real = [(weight + offset) * scale for weight, offset, scale in zip(weights, scales[2:], scales, strict=False)]
    anti = dict(zip(("scale1", "scale2", "offset1", "offset2"), scales, strict=True))
    out = ffn(x, *weights, name, **{f"antiquant_{key}": value for key, value in anti.items()})
    torch.testing.assert_close(out, act(x @ real[0]) @ real[1])


def test_two_quantised_products() -> None:
    """(1, 2) @ (3, 4) + 1 = 12, times 0.5 is 6; times 2 and less 1 it is 11; 11 * 5 times 0.25 is 13.75."""
    out = formula("npu_ffn")(
        torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3], [4]], dtype=torch.int8),
        torch.tensor([[5]], dtype=torch.int8), "relu", bias1=torch.tensor([1]).int(), scale=torch.tensor([2.0]),
        offset=torch.tensor([-1.0]), deq_scale1=encoded(0.5), deq_scale2=encoded(0.25), output_dtype=torch.bfloat16,
    )  # fmt: skip
    assert (out.dtype, out.tolist()) == (torch.bfloat16, [[13.75]])
    # 2049 is 2048 in float16, and so a tie behind the scale and the offset, which goes to 0; unrounded it would be 1.
    x, ones = torch.tensor([[127] * 16 + [17]], dtype=torch.int8), torch.ones(17, 1, dtype=torch.int8)
    scales = {"scale": torch.tensor([2.0**-11]), "offset": torch.tensor([-0.5]), "deq_scale1": encoded(1.0)}
    assert formula("npu_ffn")(x, ones, ones[:1], "relu", deq_scale2=encoded(1.0), **scales).item() == 0


def test_two_products_with_a_gate() -> None:
    """The left columns times the activated right ones, without experts only."""
    first, second = torch.tensor([[2.0, 3.0]]), torch.ones(1, 1)
    three, ffn = torch.tensor(3.0), functools.partial(formula("npu_ffn"), torch.ones(1, 1))
    for name, act in (
        ("geglu", functools.partial(torch.nn.functional.gelu, approximate="tanh")),
        ("reglu", torch.relu),
    ):
        torch.testing.assert_close(ffn(first, second, name), (2 * act(three)).reshape(1, 1))
    torch.testing.assert_close(ffn(first, second, "swiglu"), (6 * torch.sigmoid(three)).reshape(1, 1))
    with pytest.raises(RuntimeError, match="activation should be"):
        ffn(first[None], second[None], "swiglu", expert_tokens=[1])


def test_adapters_of_rows() -> None:
    """Each row takes its own pair of matrices, of one layer, into a part of its columns; the last row has none."""
    y, x, a, b = (torch.randn(size, dtype=torch.float64) for size in ((3, 6), (3, 8), (2, 3, 5, 8), (2, 3, 4, 5)))
    indices = torch.tensor([1, 0, 2], dtype=torch.int32)
    expected = y.clone()
    for row, adapter in ((0, 1), (1, 0)):
        expected[row, 1:5] += 0.5 * (b[adapter, 2] @ (a[adapter, 2] @ x[row]))
    arguments = (x, b, indices, a, 2, 0.5, 1, 4)
    for name in ("npu_batch_gather_matmul", "npu_batch_gather_matmul_"):
        written = y.clone()
        assert formula(name)(written, *arguments) is written
        torch.testing.assert_close(written, expected)
    # In 1024ths 1536 becomes 1537.5, rounded 1538, then 1539.502, rounded 1540; without the rounding between it is 1539.
    y, x, matrix = (
        torch.full(size, value).half() for size, value in (((1, 1), 0.0), ((1, 1), 1.5), ((1, 1, 1, 1), 1 + 2**-10))
    )
    assert formula("npu_batch_gather_matmul")(y, x, matrix, torch.tensor([0]), matrix, 0, 1.0).item() == 1540 / 1024


def test_products_of_8_bit_floats() -> None:
    """Scales of rows and columns, and powers of two for blocks of 32; the second operand in both orders; added to a sum."""
    x1, x2 = (torch.randint(-4, 5, size).to(torch.float8_e4m3fn) for size in ((3, 2, 64), (2, 64, 4)))
    rows, columns = torch.rand(3, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    product = functools.partial(formula("npu_transpose_quant_batchmatmul"), dtype=6, perm_x1=[1, 0, 2])
    expected = torch.einsum("mbk,bkn->mbn", x1.double(), x2.double())
    scaled = expected * rows[:, None, None] * columns
    torch.testing.assert_close(product(x1, x2, x1_scale=rows, x2_scale=columns), scaled)
    split = product(x1, x2, x1_scale=rows, x2_scale=columns, batch_split_factor=2)
    torch.testing.assert_close(split, scaled.transpose(0, 1))
    left, right = (2.0 ** torch.randint(-3, 4, size) for size in ((3, 2, 1, 2), (2, 1, 4, 2)))
    by_block = x1.double() * left.double().flatten(2).repeat_interleave(32, 2)
    weight = x2.double() * right.double().squeeze(1).mT.repeat_interleave(32, 1)
    scales = {"x1_scale": left.to(torch.float8_e8m0fnu), "x2_scale": right.to(torch.float8_e8m0fnu)}
    whole = torch.einsum("mbk,bkn->mbn", by_block, weight).float()
    torch.testing.assert_close(product(x1, x2, **scales), whole)
    turned = {**scales, "x2_scale": scales["x2_scale"].transpose(1, 2), "perm_x2": [0, 2, 1]}
    torch.testing.assert_close(product(x1, x2.mT, **turned), whole)

    one, other, y = x1[:, 0].mT, x2[0], torch.randn(3, 4, dtype=torch.float64)
    add = formula("npu_add_quant_matmul")
    first, second = torch.tensor([0.5]), torch.tensor([3.0])
    torch.testing.assert_close(add(y, one, other, second, x1_scale=first), y + 1.5 * expected[:, 0])
    pair = left[:, 0].transpose(0, 1).to(torch.float8_e8m0fnu), right[0].to(torch.float8_e8m0fnu)
    torch.testing.assert_close(add(y, one, other, pair[1], x1_scale=pair[0]), y + by_block[:, 0] @ weight[0])
    bits = [scale.view(torch.uint8) for scale in pair]
    same = add(y, one, other, bits[1], x1_scale=bits[0], x1_scale_dtype=44, x2_scale_dtype=44)
    torch.testing.assert_close(same, y + by_block[:, 0] @ weight[0])
    assert formula("npu_add_quant_matmul_")(y, one, other, second) is y
