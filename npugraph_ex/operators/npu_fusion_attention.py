"""Attention of training and its gradients, with the seed as a number: the first version and, with rotary parts, the second.

The formula and its limits are in ``_training_attention``. A dropout mask that is given says by a bit which weights are kept.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._attention_masks import Masking
from npugraph_ex.operators._dropout import drawn_seed
from npugraph_ex.operators._precision import HALVES
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._training_attention import (
    NO_LIMIT,
    TRAINING_MODES,
    AttentionSettings,
    Random,
    backward,
    forward,
    join_rope,
)

_Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def _draws(keep_prob: float, dropout_mask: torch.Tensor | None) -> bool:
    return keep_prob != 1.0 and dropout_mask is None


def _run(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    how: AttentionSettings,
    dropout_mask: torch.Tensor | None,
    seed: int,
    offset: int,
    dtype: torch.dtype,
) -> _Result:
    """The results of both versions; ``seed`` and ``offset`` are those of the mask that is given or wanted, or of a draw."""
    if _draws(how.keep_prob, dropout_mask) and not (seed or offset):
        seed, offset = drawn_seed(), 0
    elif dropout_mask is None and how.keep_prob == 1.0:
        seed, offset = 0, 0
    output, largest, total = forward(*operands, how, Random(seed, dropout_mask, offset=offset))
    return output, largest, total, output.new_empty(0, dtype=dtype), seed, offset, _weights(operands, how)


def _weights(operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], how: AttentionSettings) -> int:
    """The number of attention weights, for each of which a dropout mask would have a bit (op-plugin, ``dropout_gen_mask``)."""
    (query, key, _), layout = operands, how.layout
    if layout == "TND":
        ends = [[0, *map(int, lengths or ())] for lengths in how.lengths]
        lengths = [[after - before for before, after in itertools.pairwise(one)] for one in ends]
        per_head: int = sum(rows * columns for rows, columns in zip(*lengths, strict=True))
        return int(query.shape[1]) * per_head
    batch, rows = layout.index("B"), layout.index("S")
    return int(query.shape[batch]) * how.head_num * int(query.shape[rows]) * int(key.shape[rows])


def _drops(*args: Any, **kwargs: Any) -> bool:
    given = dict(zip(_FIRST, args, strict=False)) | kwargs
    return _draws(given.get("keep_prob", 1.0), given.get("dropout_mask"))


_FIRST = (
    *("query", "key", "value", "head_num", "input_layout", "pse", "padding_mask", "atten_mask", "scale", "keep_prob"),
    *("pre_tockens", "next_tockens", "inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode"),
    *("gen_mask_parallel", "sync", "softmax_layout", "sink", "dropout_mask", "seed", "offset"),
)


def _example() -> Call:
    return call(*(torch.randn(2, 2, 4, 16).half() for _ in range(3)), 2, "BNSD", scale=0.25)


def masked_example(**kwargs: Any) -> Call:
    """A bias, a causal mask and a sink for each head; as many rows as heads, so that each layout of four dimensions fits."""
    mask = torch.ones(2, 2).triu(1).bool()
    rest = {"pse": torch.randn(2, 2, 2, 2).half(), "atten_mask": mask, "sink": torch.randn(2)}
    return call(*(torch.randn(2, 2, 2, 16).half() for _ in range(3)), 2, "BNSD", **rest, **kwargs)


def packed_example(lengths: Any) -> Call:
    """Two sequences of 2 and 4 rows, packed."""
    rows = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths}
    return call(*(torch.randn(6, 2, 16).half() for _ in range(3)), 2, "TND", **rows)


def _dropping_example() -> Call:
    return masked_example(keep_prob=0.5, dropout_mask=torch.randint(0, 256, (2, 2, 2, 2), dtype=torch.uint8))


def _gradient_example() -> Call:
    query, key, value, dy = (torch.randn(2, 2, 3, 4).half() for _ in range(4))
    output, largest, total, *_ = npu_fusion_attention(query, key, value, 2, "BNSD", scale=0.25)
    saved = {"softmax_max": largest, "softmax_sum": total, "attention_in": output}
    return call(query, key, value, dy, 2, "BNSD", **saved, scale_value=0.25)


@Operator(
    name="npu::npu_fusion_attention",
    source="operator documentation of torch_npu.npu_fusion_attention",
    covers=TRAINING_MODES,
    dtypes=(*HALVES, torch.float32),
    floats_only=True,
    draws_random_numbers=_drops,
    alike=Alike(dtype=("query", "key", "value", "pse")),
    examples=(_example, masked_example, _dropping_example, lambda: packed_example([2, 6])),
)
def npu_fusion_attention(
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
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> _Result:
    """(output like ``query``, row maxima, row sums [B, N, Sq, 8] in float32, an empty tensor, seed, offset, number of weights).

    In layout TND query is [T, N, D], the ends of the sequences are ``actual_seq_qlen`` and ``actual_seq_kvlen``, statistics [T,
    N, 8].
    """
    how = AttentionSettings(
        "npu_fusion_attention",
        head_num,
        input_layout,
        Masking(atten_mask, sparse_mode, pre_tockens, next_tockens, prefix),
        scale,
        keep_prob,
        pse=pse,
        sink=sink,
        lengths=(actual_seq_qlen, actual_seq_kvlen),
        softmax_layout=softmax_layout,
    )
    how.check(padding_mask)
    return _run((query, key, value), how, dropout_mask, seed, offset, query.dtype)


@Operator(
    name="npu::npu_fusion_attention_grad",
    source="operator documentation of torch_npu.npu_fusion_attention",
    covers=TRAINING_MODES,
    dtypes=(*HALVES, torch.float32),
    alike=Alike(shape=("dy", "attention_in"), dtype=("query", "key", "value", "dy", "pse", "attention_in")),
    examples=(_gradient_example,),
)
def npu_fusion_attention_grad(
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
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of query, key and value; None for that of ``pse``, which is not computed; that of ``sink``, empty without one."""
    how = AttentionSettings(
        "npu_fusion_attention_grad",
        head_num,
        input_layout,
        Masking(atten_mask, sparse_mode, pre_tockens, next_tockens, prefix),
        scale_value,
        keep_prob,
        pse=pse,
        sink=sink,
        lengths=(actual_seq_qlen, actual_seq_kvlen),
        softmax_layout=softmax_layout,
    )
    how.check(padding_mask)
    saved = (softmax_max, softmax_sum)
    dq, dk, dv, of_sink = backward((query, key, value), dy, how, Random(seed, offset=offset), saved, attention_in)
    return dq, dk, dv, None, of_sink if sink is not None else torch.empty(0)


@Operator(
    name="npu::npu_fusion_attention_v2",
    source="operator documentation of torch_npu.npu_fusion_attention; CANN operator documentation, aclnnFlashAttentionScoreV2",
    covers=TRAINING_MODES | {"pse_type": (0, 1, 2, 3)},
    dtypes=HALVES,
    draws_random_numbers=_drops,
    alike=Alike(dtype=("query", "key", "value", "pse"), besides={"pse": (torch.float32,)}),
    examples=(_example,),
)
def npu_fusion_attention_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: list[int] | None = None,
    kv_start_idx: list[int] | None = None,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> _Result:
    """As ``npu_fusion_attention``; the scores of the rotary parts are added; ``pse_type`` 0 adds ``pse`` after the scale."""
    how = AttentionSettings(
        "npu_fusion_attention_v2",
        head_num,
        input_layout,
        Masking(atten_mask, sparse_mode, pre_tokens, next_tokens, prefix),
        scale,
        keep_prob,
        pse=pse,
        pse_type=pse_type,
        sink=sink,
        lengths=(actual_seq_qlen, actual_seq_kvlen),
        softmax_layout=softmax_layout,
    )
    how.check(padding_mask)
    shared = max(key.shape[-1] * head_num // max(query.shape[-1], 1), 1)
    joined = join_rope(query, query_rope, head_num, input_layout), join_rope(key, key_rope, shared, input_layout)
    return _run((*joined, value), how, dropout_mask, seed, offset, query.dtype)


@Operator(
    name="npu::npu_fusion_attention_grad_v2",
    source="operator documentation of torch_npu.npu_fusion_attention; CANN operator documentation, aclnnFlashAttentionScoreGradV2",
    covers=TRAINING_MODES | {"pse_type": (0, 1, 2, 3)},
    dtypes=HALVES,
    alike=Alike(
        shape=("dy", "attention_in"),
        dtype=("query", "key", "value", "dy", "pse", "attention_in"),
        besides={"pse": (torch.float32,)},
    ),
    examples=(_gradient_example,),
)
def npu_fusion_attention_grad_v2(
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
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: list[int] | None = None,
    kv_start_idx: list[int] | None = None,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of query, key, value, ``pse`` (not computed: empty), the rotary parts (empty without them) and the sink."""
    how = AttentionSettings(
        "npu_fusion_attention_grad_v2",
        head_num,
        input_layout,
        Masking(atten_mask, sparse_mode, pre_tokens, next_tokens, prefix),
        scale_value,
        keep_prob,
        pse=pse,
        pse_type=pse_type,
        sink=sink,
        lengths=(actual_seq_qlen, actual_seq_kvlen),
        softmax_layout=softmax_layout,
    )
    how.check(padding_mask)
    shared = max(key.shape[-1] * head_num // max(query.shape[-1], 1), 1)
    joined = join_rope(query, query_rope, head_num, input_layout), join_rope(key, key_rope, shared, input_layout)
    saved = (softmax_max, softmax_sum)
    dq, dk, dv, of_sink = backward((*joined, value), dy, how, Random(seed, offset=offset), saved, attention_in)
    joins = input_layout in {"BSH", "SBH"}
    dq, dq_rope = _split(dq, query, query_rope, head_num if joins else 1)
    dk, dk_rope = _split(dk, key, key_rope, shared if joins else 1)
    return dq, dk, dv, query.new_empty(0), dq_rope, dk_rope, None if sink is None else of_sink


def _split(
    joined: torch.Tensor, plain: torch.Tensor, rope: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of an operand and of its rotary part; ``count`` heads share the last dimension."""
    if rope is None:
        return joined, joined.new_empty(0)
    sizes = [part.shape[-1] // count for part in (plain, rope)]
    first, second = joined.unflatten(-1, (count, -1)).split(sizes, -1)
    return first.flatten(-2).contiguous(), second.flatten(-2).contiguous()
