"""Attention of each query to the blocks of keys that were selected for it: native sparse attention in training, and its gradients.

Formula (operator documentation of ``torch_npu.npu_nsa_select_attention``), for a query row of a sequence and a head::

    K', V' = the blocks of select_block_size keys that topk_indices names for the row, counted from the sequence's first key
    P      = softmax(scale_value * Q K'^T)
    output = P V'                                                        P rounded to the dtype of query first

and, with dO the gradient of the output::

    dV' += P^T dO    dS = P * (dO V'^T - rowsum(dO * output))    dQ = scale_value dS K'    dK' += scale_value dS^T Q

That P is rounded between the products, as the device's second product needs it, is from op-plugin's golden. A block that is named
twice counts twice. Fewer key heads than query heads are shared by as many consecutive query heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._packed_attention import per_sequence
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Call, Operator, Work, call

_NAME = "npu_nsa_select_attention"
_SOURCE = "operator documentation of torch_npu.npu_nsa_select_attention"
_REPLICAS = 8  # the softmax statistics are stored eight times over, one 32-byte block of float32 a row


class _Selected(NamedTuple):
    """One query row and one key head: which query heads attend to which keys."""

    row: int
    heads: slice
    shared: int
    keys: torch.Tensor


def _selected(
    shapes: tuple[torch.Size, torch.Size],
    topk_indices: torch.Tensor,
    block: int,
    lengths: tuple[Sequence[int] | None, Sequence[int] | None],
) -> Iterator[_Selected]:
    """What each row and key head attends to; ``shapes`` are those of query and key, ``lengths`` the sequences' ends."""
    (total, heads, _), (available, shared, _) = shapes
    rows, columns = per_sequence(_NAME, "query", lengths[0], total), per_sequence(_NAME, "key", lengths[1], available)
    first, first_key = 0, 0
    for count, width in zip(rows, columns, strict=True):
        blocks = topk_indices[first : first + count]
        if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < width // block:
            raise refused(
                _NAME, "topk_indices", int(blocks.max()), f"from 0 to {width // block - 1}, the sequence's blocks"
            )
        for row, named in enumerate(blocks, first):
            keys = first_key + (named.long().unsqueeze(-1) * block + torch.arange(block)).flatten(1)
            for n in range(shared):
                yield _Selected(row, slice(n * heads // shared, (n + 1) * heads // shared), n, keys[n])
        first, first_key = first + count, first_key + width


def _check(query: torch.Tensor, key: torch.Tensor, head_num: int, atten_mask: torch.Tensor | None) -> None:
    if atten_mask is not None:
        raise unsupported(_NAME, "atten_mask", "a tensor", "None")
    if query.dim() != 3 or query.shape[1] != head_num or head_num % key.shape[1]:
        raise refused(
            _NAME,
            "query",
            query.shape,
            f"[T, head_num {head_num}, D], its heads a multiple of the {key.shape[1]} of key",
        )


def _check_choice(topk_indices: torch.Tensor, block_size: int, block_count: int) -> None:
    if block_size <= 0 or block_size % 16:
        raise refused(_NAME, "select_block_size", block_size, "a multiple of 16")
    if topk_indices.shape[-1] != block_count:
        raise refused(_NAME, "select_block_count", block_count, f"{topk_indices.shape[-1]}, as topk_indices tells")


def _example() -> Call:
    query, key, value = torch.randn(3, 4, 16).half(), torch.randn(48, 2, 16).half(), torch.rand(48, 2, 8).half()
    indices = torch.tensor([[[1, 0], [0, 1]], [[0, 0], [1, 0]], [[0, 0], [0, 0]]], dtype=torch.int32)
    return call(query, key, value, indices, 0.25, 4, 16, 2, actual_seq_qlen=[2, 3], actual_seq_kvlen=[32, 48])


def _example_of_gradient() -> Call:
    (query, key, value, *how), named = _example()
    output, largest, total = npu_nsa_select_attention(query, key, value, *how, **named)
    return call(torch.randn(output.shape).half(), query, key, value, output, largest, total, *how, **named)


def _work(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    topk_indices: torch.Tensor,
    scale_value: float,
    head_num: int,
    select_block_size: int,
    select_block_count: int,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
) -> Work:
    """Two products of each query row with its selected keys."""
    del key, topk_indices, scale_value, atten_mask, actual_seq_qlen, actual_seq_kvlen
    scores = float(query.shape[0] * head_num * select_block_size * select_block_count)
    return Work(products=2 * scores * (query.shape[-1] + value.shape[-1]), elements=scores)


@Operator(
    name=f"npu::{_NAME}",
    source=_SOURCE,
    dtypes=HALVES,
    alike=Alike(dtype=("query", "key", "value")),
    examples=(_example,),
    work=_work,
)
def npu_nsa_select_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    topk_indices: torch.Tensor,
    scale_value: float,
    head_num: int,
    select_block_size: int,
    select_block_count: int,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(output, row maxima, row sums)``: [T, N, Dv] like ``query``, and float32 [T, N, 8] twice.

    query [T, N, D], key [T', N', D], value [T', N', Dv], topk_indices [T, N', select_block_count]; the sequences' ends.
    """
    _check(query, key, head_num, atten_mask)
    _check_choice(topk_indices, select_block_size, select_block_count)
    dtype = compute_dtype(query)
    output = torch.zeros(*query.shape[:2], value.shape[-1], dtype=dtype)
    largest, total = (torch.zeros(*query.shape[:2], 1, dtype=dtype) for _ in range(2))
    lengths = actual_seq_qlen, actual_seq_kvlen
    for row, heads, n, keys in _selected((query.shape, key.shape), topk_indices, select_block_size, lengths):
        scores = query[row, heads].to(dtype) @ key[keys, n].to(dtype).mT * scale_value
        maximum = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - maximum)
        largest[row, heads], total[row, heads] = maximum, weights.sum(-1, keepdim=True)
        shares = (weights / total[row, heads]).to(query.dtype)
        output[row, heads] = shares.to(dtype) @ value[keys, n].to(dtype)
    statistics = (each.expand(-1, -1, _REPLICAS).contiguous() for each in (largest, total))
    return (output.to(query.dtype), *statistics)  # type: ignore[return-value]


@Operator(
    name=f"npu::{_NAME}_grad",
    source=_SOURCE,
    dtypes=HALVES,
    alike=Alike(shape=("attention_out", "grad"), dtype=("query", "key", "value", "grad", "attention_out")),
    examples=(_example_of_gradient,),
)
def npu_nsa_select_attention_grad(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_out: torch.Tensor,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    topk_indices: torch.Tensor,
    scale_value: float,
    head_num: int,
    select_block_size: int,
    select_block_count: int,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, like them; P comes from the statistics of the forward."""
    _check(query, key, head_num, atten_mask)
    _check_choice(topk_indices, select_block_size, select_block_count)
    dtype = compute_dtype(query)
    dq, dk, dv = (torch.zeros(operand.shape, dtype=dtype) for operand in (query, key, value))
    along = (grad.to(dtype) * attention_out.to(dtype)).sum(-1, keepdim=True)
    lengths = actual_seq_qlen, actual_seq_kvlen
    for row, heads, n, keys in _selected((query.shape, key.shape), topk_indices, select_block_size, lengths):
        q, slope = query[row, heads].to(dtype), grad[row, heads].to(dtype)
        k, v = key[keys, n].to(dtype), value[keys, n].to(dtype)
        weights = torch.exp(q @ k.mT * scale_value - softmax_max[row, heads, :1]) / softmax_sum[row, heads, :1]
        to_scores = weights * (slope @ v.mT - along[row, heads]) * scale_value
        dq[row, heads] = to_scores @ k
        dk[:, n].index_add_(0, keys, to_scores.mT @ q)
        dv[:, n].index_add_(0, keys, weights.mT @ slope)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)
