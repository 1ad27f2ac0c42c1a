"""Attention of inference over whole prompts. The formula is in ``_infer_attention``."""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._infer_attention import Band, Extras, Lengths, attend, checked_heads
from npugraph_ex.operators._precision import HALVES
from npugraph_ex.operators._quantised_cache import Int8Products, OutputQuantiser
from npugraph_ex.operators._record import Operator, call

_NO_LIMIT = 2147483647


@Operator(
    name="npu::npu_prompt_flash_attention",
    source="operator documentation of torch_npu.npu_prompt_flash_attention; aclnnPromptFlashAttentionV3",
    dtypes=HALVES,
    alike=Alike(dtype=("query", "key", "value", "pse_shift"), besides={"pse_shift": (torch.float16,)}),
    examples=(
        lambda: call(
            *(torch.randn(2, 2, 4, 16).half() for _ in range(3)), num_heads=2, input_layout="BNSD", sparse_mode=2
        ),
        lambda: call(*(torch.randn(4, 32).half() for _ in range(3)), num_heads=2, input_layout="SH", next_tokens=9),
        lambda: call(
            *(torch.randn(2, 2, 2, 16).half() for _ in range(3)), num_heads=2, input_layout="BNSD",
            pse_shift=torch.randn(2, 2, 2, 2).half(), atten_mask=torch.ones(2, 2).triu(1).bool(),
        ),
        lambda: call(
            *(torch.randint(-9, 9, (2, 2, 2, 16), dtype=torch.int8) for _ in range(3)), num_heads=2, input_layout="BNSD",
            deq_scale1=torch.rand(1), quant_scale1=torch.rand(1), deq_scale2=torch.rand(1), quant_scale2=torch.rand(1),
            quant_offset2=torch.rand(1),
        ),
    ),
)  # fmt: skip
def npu_prompt_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    deq_scale1: torch.Tensor | None = None,
    quant_scale1: torch.Tensor | None = None,
    deq_scale2: torch.Tensor | None = None,
    quant_scale2: torch.Tensor | None = None,
    quant_offset2: torch.Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = _NO_LIMIT,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: list[int] | None = None,
    sparse_mode: int = 0,
) -> torch.Tensor:
    """Like ``query`` in layout: [B, S, N*D], [B, N, S, D] and so on; in NSD and SH the batch is 1 and left out."""
    heads = checked_heads(
        "npu_prompt_flash_attention", input_layout, num_heads, num_key_value_heads, padding_mask=padding_mask
    )
    band = Band(atten_mask, sparse_mode, pre_tokens, next_tokens)
    products = Int8Products(deq_scale1, quant_scale1, deq_scale2)
    products.check(heads.operator, ("deq_scale1", "quant_scale1", "deq_scale2"))
    extras = Extras(quantiser=OutputQuantiser(quant_scale2, quant_offset2), products=products)
    lengths = Lengths(actual_seq_lengths, actual_seq_lengths_kv)
    return attend((query, key, value), heads, scale_value, band, lengths, pse_shift, extras=extras)[0]
