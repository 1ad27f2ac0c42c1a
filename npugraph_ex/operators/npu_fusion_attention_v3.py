"""Attention of training, with the seed as a tensor. The formula and its limits are in ``_training_attention``."""

from __future__ import annotations

from typing import Any

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._attention_masks import Masking
from npugraph_ex.operators._dropout import drawn_seed
from npugraph_ex.operators._precision import HALVES
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._training_attention import NO_LIMIT, TRAINING_MODES, AttentionSettings, Random, ends, forward
from npugraph_ex.operators.npu_fusion_attention import masked_example, packed_example


def _drops(*args: object, **kwargs: Any) -> bool:
    """Whether a call of the operator takes numbers from the generator: where it drops something."""
    return (args[9] if len(args) > 9 else kwargs.get("keep_prob", 1.0)) != 1.0


def _drawn(keep_prob: float) -> torch.Tensor:
    """What decides which weights are dropped: one number [1], int64; 0 where none is."""
    return torch.zeros(1, dtype=torch.int64) if keep_prob == 1.0 else torch.tensor([drawn_seed()])


@Operator(
    name="npu::npu_fusion_attention_v3",
    source="operator documentation of torch_npu.npu_fusion_attention",
    covers=TRAINING_MODES,
    dtypes=(*HALVES, torch.float32),
    draws_random_numbers=_drops,
    alike=Alike(dtype=("query", "key", "value", "pse")),
    examples=(
        lambda: call(*(torch.randn(2, 2, 4, 16).half() for _ in range(3)), 2, "BNSD"),
        masked_example,
        lambda: packed_example(torch.tensor([2, 6])),
    ),
)
def npu_fusion_attention_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: torch.Tensor | None = None,
    actual_seq_kvlen: torch.Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(output like ``query``, row maxima, row sums (both [B, N, Sq, 8], float32), an empty tensor, seed, offset)."""
    how = AttentionSettings(
        "npu_fusion_attention_v3",
        head_num,
        input_layout,
        Masking(atten_mask, sparse_mode, pre_tockens, next_tockens, prefix),
        scale,
        keep_prob,
        pse=pse,
        sink=sink,
        lengths=(ends(actual_seq_qlen), ends(actual_seq_kvlen)),
        softmax_layout=softmax_layout,
    )
    how.check(padding_mask)
    number = _drawn(keep_prob)
    results = forward(query, key, value, how, Random(0 if number.is_meta else int(number)))
    return *results, query.new_empty(0), number, torch.zeros_like(number)
