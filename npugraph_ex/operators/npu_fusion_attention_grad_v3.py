"""The gradients of attention of training, with the seed as a tensor. The formula and its limits are in ``_training_attention``."""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._attention_masks import Masking
from npugraph_ex.operators._precision import HALVES
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._training_attention import (
    NO_LIMIT,
    TRAINING_MODES,
    AttentionSettings,
    Random,
    backward,
    ends,
)
from npugraph_ex.operators.npu_fusion_attention_v3 import npu_fusion_attention_v3


def _example() -> Call:
    query, key, value, dy = (torch.randn(2, 2, 3, 4).half() for _ in range(4))
    output, largest, total, _, seed, offset = npu_fusion_attention_v3(query, key, value, 2, "BNSD", scale=0.25)
    saved = {"softmax_max": largest, "softmax_sum": total, "attention_in": output}
    return call(query, key, value, dy, 2, "BNSD", **saved, seed=seed, offset=offset, scale_value=0.25)


@Operator(
    name="npu::npu_fusion_attention_grad_v3",
    source="operator documentation of torch_npu.npu_fusion_attention",
    covers=TRAINING_MODES,
    dtypes=(*HALVES, torch.float32),
    alike=Alike(shape=("dy", "attention_in"), dtype=("query", "key", "value", "dy", "pse", "attention_in")),
    examples=(_example,),
)
def npu_fusion_attention_grad_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor | None = None,
    softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None,
    attention_in: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    prefix: list[int] | None = None,
    actual_seq_qlen: torch.Tensor | None = None,
    actual_seq_kvlen: torch.Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value; that of ``pse``, which is not computed: empty; that of ``sink``, 0 without one."""
    how = AttentionSettings(
        "npu_fusion_attention_grad_v3",
        head_num,
        input_layout,
        Masking(atten_mask, sparse_mode, pre_tockens, next_tockens, prefix),
        scale_value,
        keep_prob,
        pse=pse,
        sink=sink,
        lengths=(ends(actual_seq_qlen), ends(actual_seq_kvlen)),
        softmax_layout=softmax_layout,
    )
    how.check(padding_mask)
    if seed is None and keep_prob < 1.0:
        raise ValueError(
            f"{how.operator}: with keep_prob below 1 it needs the seed that the forward gave; seed is None."
        )
    first, shift = (0 if at is None or at.is_meta else int(at.reshape(-1)[0]) for at in (seed, offset))
    random = Random(first, offset=shift)
    saved = (softmax_max, softmax_sum)
    dq, dk, dv, of_sink = backward((query, key, value), dy, how, random, saved, attention_in)
    return dq, dk, dv, query.new_empty(0), of_sink
