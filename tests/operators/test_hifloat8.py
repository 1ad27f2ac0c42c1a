"""The bytes of HiFloat8, against values of the format's paper, and the operators that read and write them."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError
from npugraph_ex.operators._hifloat8 import LARGEST, decode, encode


def test_values_of_bytes() -> None:
    """The numbers at the borders of each width of the exponent."""
    known = {0x00: 0.0, 0x01: 2.0**-22, 0x07: 2.0**-16, 0x08: 1.0, 0x0F: 1.875, 0x10: 2.0, 0x18: 0.5, 0x20: 4.0, 0x6E: LARGEST,
             0x6F: math.inf, 0x7E: 2.0**-15, 0xEF: -math.inf, 0x88: -1.0}  # fmt: skip
    assert decode(torch.tensor(list(known), dtype=torch.uint8)).tolist() == list(known.values())
    assert decode(torch.tensor([0x80], dtype=torch.uint8)).isnan().all()


def test_every_byte_comes_back_and_ties_round_away_from_zero() -> None:
    """Encoding is the inverse of decoding; the middle of two neighbours becomes the larger magnitude."""
    stored = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(encode(decode(stored), saturate=False), stored)
    values = decode(stored[:128]).sort().values[:-1].double()
    middles = (values[1:] + values[:-1]) / 2
    for sign in (1, -1):
        assert torch.equal(decode(encode(sign * middles, saturate=False)).double(), sign * values[1:])
        below = torch.nextafter(middles, torch.zeros_like(middles))
        assert torch.equal(decode(encode(sign * below, saturate=False)).double(), sign * values[:-1])
    assert decode(encode(torch.tensor([40959.0, 40960.0, -1e9]), saturate=False)).tolist() == [
        LARGEST,
        math.inf,
        -math.inf,
    ]
    assert decode(encode(torch.tensor([1e9, -1e9]), saturate=True)).tolist() == [LARGEST, -LARGEST]


def test_operators_with_hifloat8() -> None:
    """A cast there and back, a quantisation, and a normalisation that quantises."""
    x = torch.tensor([[0.3, -1.3], [100.0, 5000.0]])
    cast = OPERATORS["npu::npu_dtype_cast"].formula
    stored = cast(x, 290)
    assert stored.dtype == torch.uint8
    assert cast(stored, torch.float32, 290).tolist() == [[0.3125, -1.25], [96.0, 4096.0]]
    y, amax = OPERATORS["npu::npu_quant_max"].formula(x, torch.tensor([2.0]), round_mode="round", dst_dtype=290)
    assert decode(y).tolist() == [[0.625, -2.5], [192.0, 8192.0]]
    assert amax.tolist() == [5000.0]
    with pytest.raises(UnsupportedArgumentError, match="round_mode"):
        OPERATORS["npu::npu_quant_max"].formula(x, torch.tensor([2.0]), dst_dtype=290)
    ones = torch.ones(2).half()
    n = OPERATORS["npu::npu_rms_norm_quant"].formula(
        torch.tensor([[3.0, 3.0]]).half(), ones, 0 * ones, ones[:1] / 8, torch.zeros(1, dtype=torch.int8), dst_dtype=290
    )
    assert decode(n).tolist() == [[8.0, 8.0]]
    y1, y2, x = OPERATORS["npu::npu_add_rms_norm_quant"].formula(
        torch.tensor([[1.0, 1.0]]).half(),
        torch.tensor([[2.0, 2.0]]).half(),
        ones,
        torch.ones(2) / 8,
        None,
        dst_type=290,
    )
    assert decode(y1).tolist() == [[8.0, 8.0]]
    assert y2.dtype == torch.uint8
    assert x.tolist() == [[3.0, 3.0]]


def test_products_of_hifloat8() -> None:
    """Bytes of 1, 2 and 4 as factors: 1 * 2 + 2 * 4 is 10, times the scales; a result in hifloat8; another dtype is refused."""
    row, column = torch.tensor([[0x08, 0x10]], dtype=torch.uint8), torch.tensor([[0x10], [0x20]], dtype=torch.uint8)
    both, half = {"x1_dtype": 290, "x2_dtype": 290}, torch.tensor([0.5])
    total = torch.ones(1, 1)
    assert OPERATORS["npu::npu_add_quant_matmul_"].formula(total, row.t(), column, half, x1_scale=half, **both) is total
    assert total.tolist() == [[3.5]]
    assert OPERATORS["npu::npu_quant_matmul"].formula(row, column, half, output_dtype=5, **both).tolist() == [[5.0]]
    batched = functools.partial(OPERATORS["npu::npu_transpose_quant_batchmatmul"].formula, row[None], column[None])
    encoded = OPERATORS["npu::npu_trans_quant_param"].formula(half)
    assert batched(5, x2_scale=encoded, **both).tolist() == [[[5.0]]]
    assert decode(batched(290, x1_scale=2 * half, x2_scale=2 * half, **both)).tolist() == [[[10.0]]]
    with pytest.raises(UnsupportedArgumentError, match=r"x2 and x2_dtype=\(torch.uint8, None\)"):
        batched(5, x1_dtype=290)


@pytest.mark.parametrize("name", ["npu_dynamic_block_quant", "npu_grouped_dynamic_block_quant"])
def test_blocks_of_hifloat8(name: str) -> None:
    """The largest number of a block becomes 32768, or one's own maximum; of 3 and 1.1 the latter rounds to 1.125."""
    groups = (torch.tensor([1], dtype=torch.int32),) if "grouped" in name else ()
    quantise = functools.partial(OPERATORS[f"npu::{name}"].formula, torch.tensor([[3.0, 1.1]]), *groups, dst_type=290)
    y, scale = quantise(round_mode="round", dst_type_max=3.0)
    assert (decode(y).tolist(), scale[0].tolist()) == ([[3.0, 1.125]], [1.0])
    assert decode(quantise(round_mode="round")[0]).tolist()[0][0] == LARGEST
    for wrong in ({"round_mode": "hybrid"}, {"round_mode": "round", "dst_type_max": 4e4}):
        with pytest.raises(RuntimeError, match=[*wrong][-1]):
            quantise(**wrong)


def test_dynamic_quantisation_to_hifloat8() -> None:
    """Up to one's own maximum or 32768, symmetric and not; far from 0 GELU and SiLU are the identity."""
    x = torch.tensor([[3.0, 1.1]])
    y, scale = OPERATORS["npu::npu_dynamic_quant"].formula(x, dst_type=290, dst_type_max=3.0)
    assert (decode(y).tolist(), scale.tolist()) == ([[3.0, 1.125]], [1.0])
    y, scale, offset = OPERATORS["npu::npu_dynamic_quant_asymmetric"].formula(
        torch.tensor([[-1.0, 3.0]]), dst_type=290, dst_type_max=2.0
    )
    assert (decode(y).tolist(), scale.tolist(), offset.tolist()) == ([[-2.0, 2.0]], [1.0], [-1.0])
    with pytest.raises(UnsupportedArgumentError, match="dst_type_max=4"):
        OPERATORS["npu::npu_dynamic_quant"].formula(x, dst_type_max=4.0)
    static = {"input_scale": torch.tensor([0.5]), "quant_mode": "static", "round_mode": "round", "dst_type": 290}
    assert decode(OPERATORS["npu::npu_gelu_quant"].formula(torch.tensor([[200.0]]), **static)[0]).tolist() == [[96.0]]
    gated = {"activate_left": True, "quant_mode": 1, "dst_type": 290}
    y, _ = OPERATORS["npu::npu_dequant_swiglu_quant"].formula(
        torch.tensor([[100.0, 200.0, 2.0, 2.0]]), round_mode=1, **gated
    )
    assert decode(y).tolist() == [[16384.0, 32768.0]]
    with pytest.raises(RuntimeError, match="round_mode should be"):
        OPERATORS["npu::npu_dequant_swiglu_quant"].formula(torch.ones(1, 4), **gated)
