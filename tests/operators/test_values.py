"""What products, casts, rotations and gates compute, by hand; and every argument that no reference covers is named."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError

dynamic_quant = OPERATORS["npu::npu_dynamic_quant"].formula
fused = OPERATORS["npu::npu_add_rms_norm_dynamic_quant"].formula
quant_matmul = OPERATORS["npu::npu_quant_matmul"].formula
swiglu = OPERATORS["npu::npu_swiglu"].formula
rotary_mul = OPERATORS["npu::npu_rotary_mul"].formula
dtype_cast = OPERATORS["npu::npu_dtype_cast"].formula
quantize = OPERATORS["npu::npu_quantize"].formula
norm_quant = OPERATORS["npu::npu_add_rms_norm_quant"].formula
transposed_product = OPERATORS["npu::npu_transpose_batchmatmul"].formula
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


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
    quotient = OPERATORS["npu::npu_quant_matmul"].before_rounding(x1, x2, torch.tensor([2.0, 0.5]))
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


def test_transposed_product_promotes_float16_and_not_bfloat16() -> None:
    """Of the mixed pairs the device takes float16 with float32."""
    x1, x2 = torch.tensor([[[2.0]], [[3.0]]]), torch.tensor([[[5.0]], [[7.0]]])
    assert transposed_product(x1, x2.half()).tolist() == [[[10.0], [21.0]]]
    for first, second in ((x1, x2.bfloat16()), (x1.bfloat16(), x2), (x1.half(), x2.bfloat16())):
        with pytest.raises(RuntimeError, match="weight should be of the dtype of input"):
            transposed_product(first, second)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda x: dynamic_quant(x, dst_type=6), "dst_type"),
        (lambda x: dynamic_quant(x, quant_mode="pergroup"), "quant_mode"),
        (lambda x: dynamic_quant(x, dst_type_max=15.0), "dst_type_max"),
        (lambda x: fused(x, x, x[0], y_dtype=3), "y_dtype"),
        (lambda x: quant_matmul(x, x.to(torch.int8), x[0]), "x1"),
        (lambda x: quant_matmul(x.to(torch.int8), x.to(torch.int8), x[0].int()), "scale"),
        (lambda x: quant_matmul(x.to(torch.int8), x.to(torch.int8), x[0], output_dtype=4), "output_dtype"),
        (lambda x: quant_matmul(x.to(torch.int8), x.to(torch.int8), x[0], group_sizes=[1]), "group_sizes"),
        (lambda x: rotary_mul(x[None, None], x, x, "eighth"), "rotary_mode"),
        (lambda x: dtype_cast(x, 296), "dtype"),
        (lambda x: quantize(x, x[0], None, 16), "dtype"),
        (lambda x: quantize(x, x[0], None, 3, -1, False), "dtype"),
        (lambda x: norm_quant(x, x, x[0], x[0], None, dst_type=16), "dst_type"),
        (lambda x: transposed_product(x[None], x[None], bias=x), "bias"),
        (lambda x: OPERATORS["npu::npu_swiglu_quant"].formula(x, quant_mode=2), "quant_mode"),
        (lambda x: OPERATORS["npu::npu_swiglu_quant"].formula(x, dst_type=torch.float16), "dst_type"),
    ],
)
def test_uncovered_values_are_named(call: object, argument: str) -> None:
    """No silent wrong number: the error names the argument."""
    with pytest.raises(UnsupportedArgumentError, match=rf"\b{argument}="):
        call(torch.ones(4, 4))  # type: ignore[operator]
