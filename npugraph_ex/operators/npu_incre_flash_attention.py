"""Attention of inference of one new row a sequence over its cache. The formula is in ``_infer_attention``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._infer_attention import Band, Extras, Lengths, attend, checked_heads
from npugraph_ex.operators._precision import HALVES
from npugraph_ex.operators._quantised_cache import Int8Products, OutputQuantiser, of_both
from npugraph_ex.operators._record import Call, Operator, call

_NO_LIMIT = 2147483647


def _example() -> Call:
    query, key, value = (torch.randn(2, rows, 32).half() for rows in (1, 6, 6))
    return call(query, key, value, actual_seq_lengths=[5, 3], num_heads=2, scale_value=0.25)


def _quantised_example() -> Call:
    query, table = torch.randn(2, 2, 1, 16).half(), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    caches = (torch.randint(-9, 9, (4, 1, 4, 16), dtype=torch.int8) for _ in range(2))
    layout = {"num_heads": 2, "num_key_value_heads": 1, "input_layout": "BNSD", "block_size": 4}
    scales = torch.rand(2, 1, 1, 16).half()
    return call(query, *caches, actual_seq_lengths=[5, 3], block_table=table, antiquant_scale=scales, **layout)


def _masked_example() -> Call:
    query, key, value = (torch.randn(2, 2, rows, 16).half() for rows in (1, 4, 4))
    rest = {"pse_shift": torch.randn(2, 2, 1, 4).half(), "atten_mask": torch.rand(2, 1, 1, 4) > 1}
    return call(query, key, value, num_heads=2, input_layout="BNSD", **rest)


def _padded_example() -> Call:
    query, key, value = (torch.randn(2, 2, rows, 16).half() for rows in (1, 4, 4))
    rest = {"actual_seq_lengths": [3, 2], "kv_padding_size": torch.tensor([1])}
    return call(query, key, value, num_heads=2, input_layout="BNSD", **rest)


def _integer_example() -> Call:
    operands = (torch.randint(-9, 9, (2, 2, rows, 16), dtype=torch.int8) for rows in (1, 4, 4))
    names = ("dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2")
    return call(*operands, num_heads=2, input_layout="BNSD", **{name: torch.rand(1) for name in names})


def _offset_example() -> Call:
    caches = (torch.randint(-9, 9, (2, 2, 4, 16), dtype=torch.int8) for _ in range(2))
    rest = {f"antiquant_{part}": torch.rand(2, 2, 1, 16).half() for part in ("scale", "offset")}
    return call(torch.randn(2, 2, 1, 16).half(), *caches, num_heads=2, input_layout="BNSD", **rest)


@Operator(
    name="npu::npu_incre_flash_attention",
    source="operator documentation of torch_npu.npu_incre_flash_attention; ops-transformer, attention/incre_flash_attention",
    covers={"inner_precise": (0, 1)},
    dtypes=HALVES,
    host_arguments=("actual_seq_lengths",),
    alike=Alike(dtype=("query", "key", "value", "pse_shift"), besides={"key": (torch.int8,), "value": (torch.int8,)}),
    examples=(_example, _quantised_example, _masked_example, _padded_example, _integer_example, _offset_example),
)
def npu_incre_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    dequant_scale1: torch.Tensor | None = None,
    quant_scale1: torch.Tensor | None = None,
    dequant_scale2: torch.Tensor | None = None,
    quant_scale2: torch.Tensor | None = None,
    quant_offset2: torch.Tensor | None = None,
    kv_padding_size: torch.Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
) -> torch.Tensor:
    """Like ``query``, [B, 1, N*D], [B, N, 1, D] or [B, 1, N, D]; ``actual_seq_lengths`` are those of keys and values."""
    heads = checked_heads(
        "npu_incre_flash_attention", input_layout, num_heads, num_key_value_heads, padding_mask=padding_mask
    )
    products = Int8Products(dequant_scale1, quant_scale1, dequant_scale2)
    products.check(heads.operator, ("dequant_scale1", "quant_scale1", "dequant_scale2"))
    band = Band(atten_mask, 1, _NO_LIMIT, _NO_LIMIT)
    extras = Extras(
        of_both(antiquant_scale, antiquant_offset, 0),
        OutputQuantiser(quant_scale2, quant_offset2),
        padding=(None, kv_padding_size),
        products=products,
    )
    lengths = Lengths(None, actual_seq_lengths)
    output, _ = attend((query, key, value), heads, scale_value, band, lengths, pse_shift, block_table, extras)
    return output
