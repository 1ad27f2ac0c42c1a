"""Attention of training and its gradients: what all versions of `npu_fusion_attention` compute.

Formula (operator documentation of ``torch_npu.npu_fusion_attention``)::

    scores = mask(scale * (Q K^T + pse), atten_mask)        pse_type 0: scale * Q K^T + pse
    P      = softmax(scores)                                 a sink is one more score of each row, with no value
    output = D(P) V

and, with dO the gradient of the output::

    dV = D(P)^T dO    dP = D(dO V^T)    dS = P * (dP - rowsum(dO * output))    dQ = scale dS K    dK = scale dS^T Q
    dsink = -sum(P_sink * rowsum(dO * output))

D is dropout: it keeps an element with probability ``keep_prob`` and divides it by that, and makes the others 0. Which elements,
the result ``seed`` tells, a draw from torch's generator; the gradient takes it and drops the same ones. The gradient takes P
from the statistics of the forward where they are given: ring attention gives those of all its blocks.

In layout TND the sequences stand one behind the other, and their ends are given. Statistics are then [T, N, 8]; with
``softmax_layout`` TND row by row, otherwise the memory of each sequence is [N, S, 8].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._attention import attention_weights, shared_heads
from npugraph_ex.operators._attention_masks import Masking, left_out
from npugraph_ex.operators._dropout import drawn, generator_at
from npugraph_ex.operators._dropout import dropped as masked_by_bits
from npugraph_ex.operators._packed_attention import per_sequence, with_rope
from npugraph_ex.operators._precision import compute_dtype, refused, unsupported

NO_LIMIT = 2147483647
TRAINING_MODES: dict[str, Collection[object]] = {
    "sparse_mode": range(9),
    "inner_precise": range(4),
    "softmax_layout": ("", "TND"),
}
"""The values of arguments that matter with a mask, or in one layout, only."""
_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
_REPLICAS = 8  # the softmax statistics are stored eight times over, one 32-byte block of float32 a row
_INNER_PSE = (2, 3)


class AttentionSettings(NamedTuple):
    """What a call says beside query, key and value."""

    operator: str
    head_num: int
    layout: str
    masking: Masking
    scale: float
    keep_prob: float
    pse: torch.Tensor | None = None
    pse_type: int = 1
    sink: torch.Tensor | None = None
    lengths: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None)
    softmax_layout: str = ""

    def check(self, padding_mask: torch.Tensor | None) -> None:
        """Raise for argument values that the formula does not cover."""
        if self.layout not in _LAYOUTS:
            raise unsupported(self.operator, "input_layout", self.layout, ", ".join(_LAYOUTS))
        if not 0.0 < self.keep_prob <= 1.0:
            raise ValueError(f"{self.operator}: keep_prob must be above 0 and at most 1; it is {self.keep_prob}.")
        if padding_mask is not None:
            raise unsupported(self.operator, "padding_mask", "a value", "None")
        if self.pse is not None and (self.layout == "TND" or self.pse_type in _INNER_PSE):
            raise unsupported(self.operator, "pse", "a value", "None in layout TND and with pse_type 2 and 3")


class Part(NamedTuple):
    """The sequences of a batch, or one sequence of a packed batch, by heads: [B, N, S, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    left_out: torch.Tensor | None
    rows: slice
    columns: slice


class Random:
    """What dropout keeps: a generator with the seed that the forward drew, or bits that the caller brings."""

    def __init__(self, seed: int, bits: torch.Tensor | None = None, *, offset: int = 0) -> None:
        """Begin with the first weight."""
        self._generator = generator_at(seed, offset)
        self._bits = bits

    def dropped(self, weights: torch.Tensor, keep_prob: float) -> torch.Tensor:
        """``weights`` [B, N, Sq, Skv] with some of them 0 and the others divided by ``keep_prob``."""
        if keep_prob == 1.0 or weights.is_meta:
            return weights
        if self._bits is not None:
            return masked_by_bits(weights, self._bits, 1.0 - keep_prob)
        kept = drawn(weights.shape, 1.0 - keep_prob, generator=self._generator)
        return torch.where(kept, weights / keep_prob, 0.0)


def ends(lengths: torch.Tensor | Sequence[int] | None) -> Sequence[int] | None:
    """Ends of sequences as whole numbers."""
    return lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths


def _refuse_unlike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionSettings) -> None:
    """Values have the shape of keys but for the last dimension, and all three have one batch: nothing broadcasts."""
    if key.shape[:-1] != value.shape[:-1]:
        shape = tuple(value.shape)
        raise refused(
            how.operator, "value", shape, f"of the shape of key but for the last dimension, {tuple(key.shape)}"
        )
    batch = how.layout.find("B")
    if batch >= 0 and query.shape[batch] != key.shape[batch]:
        raise refused(how.operator, "key's batch", key.shape[batch], f"that of query, {query.shape[batch]}")


def parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionSettings) -> Iterator[Part]:
    """The parts of a call, in order."""
    _refuse_unlike(query, key, value, how)
    shared = max(key.shape[-1] * how.head_num // max(query.shape[-1], 1), 1)
    counts = (how.head_num, shared, shared)
    q, k, v = (heads(operand, count, how.layout) for operand, count in zip((query, key, value), counts, strict=True))
    if how.layout != "TND":
        everything = slice(None)
        yield Part(q, k, v, _left_out(how, q, k, 0, 0), everything, everything)
        return
    rows = per_sequence(how.operator, "query", how.lengths[0], query.shape[0])
    columns = per_sequence(how.operator, "key", how.lengths[1], key.shape[0])
    first = [0, 0]
    for b, (count, width) in enumerate(zip(rows, columns, strict=True)):
        mine, theirs = slice(first[0], first[0] + count), slice(first[1], first[1] + width)
        part = q[:, :, mine], k[:, :, theirs], v[:, :, theirs]
        yield Part(*part, _left_out(how, part[0], part[1], b, len(rows) - 1), mine, theirs)
        first = [first[0] + count, first[1] + width]


def _left_out(how: AttentionSettings, q: torch.Tensor, k: torch.Tensor, b: int, last: int) -> torch.Tensor | None:
    if how.masking.mask is None and how.masking.mode not in {5, 6}:
        return None
    return left_out(how.operator, how.masking, q.shape[-2], k.shape[-2], sequence=b, last=last)


def heads(operand: torch.Tensor, count: int, layout: str) -> torch.Tensor:
    """``operand`` as [B, N, S, D] in the precision of the computation; ``count`` heads, where a layout does not tell."""
    operand = operand.to(compute_dtype(operand))
    if layout == "BNSD":
        return operand
    if layout == "BSND":
        return operand.transpose(1, 2)
    if layout == "TND":
        return operand.transpose(0, 1).unsqueeze(0)
    if layout == "SBH":
        operand = operand.transpose(0, 1)
    split: torch.Tensor = operand.unflatten(-1, (count, -1))
    return split.transpose(1, 2)


def stored(by_head: torch.Tensor, like: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] in the layout and dtype of ``like``."""
    if layout == "TND":
        by_head = by_head.squeeze(0).transpose(0, 1)
    elif layout != "BNSD":
        by_head = by_head.transpose(1, 2)
        if layout != "BSND":
            by_head = by_head.flatten(2)
        if layout == "SBH":
            by_head = by_head.transpose(0, 1)
    return by_head.to(like.dtype).contiguous()


def _added(how: AttentionSettings, dtype: torch.dtype) -> torch.Tensor | None:
    if how.pse is None:
        return None
    return how.pse.to(dtype) * (how.scale if how.pse_type == 1 else 1.0)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionSettings, random: Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(output, row maxima, row sums)``: like ``query`` in layout and dtype; [B, N, Sq, 8] or [T, N, 8] in float32."""
    outputs, statistics = [], []
    for part in parts(query, key, value, how):
        added = _added(how, part.q.dtype)
        weights, *saved = attention_weights(
            part.q, part.k, how.scale, added=added, excluded=part.left_out, sink=how.sink
        )
        outputs.append(random.dropped(weights, how.keep_prob) @ shared_heads(part.v, how.head_num))
        statistics.append(saved)
    output = stored(torch.cat(outputs, 2), query, how.layout)
    largest, total = (_stored_statistics([saved[i] for saved in statistics], query, how) for i in range(2))
    return output, largest, total


def _stored_statistics(each: list[torch.Tensor], query: torch.Tensor, how: AttentionSettings) -> torch.Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    wide = [part.to(dtype).expand(*part.shape[:-1], _REPLICAS) for part in each]
    if how.layout != "TND":
        return wide[0].contiguous()
    if how.softmax_layout == "TND":
        return torch.cat(wide, 2).squeeze(0).transpose(0, 1).contiguous()
    return torch.cat([part.reshape(-1) for part in wide]).view(-1, how.head_num, _REPLICAS)


def _statistic(saved: torch.Tensor, part: Part, how: AttentionSettings) -> torch.Tensor:
    """A statistic that the forward gave, of one part: [B, N, Sq, 1]."""
    if how.layout != "TND":
        return saved[..., :1].to(part.q.dtype)
    rows = saved[part.rows]
    if how.softmax_layout == "TND":
        return rows[..., :1].transpose(0, 1).unsqueeze(0).to(part.q.dtype)
    return rows.reshape(how.head_num, -1, _REPLICAS)[..., :1].unsqueeze(0).to(part.q.dtype)


def _weights(
    part: Part, how: AttentionSettings, saved: tuple[torch.Tensor | None, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(P, P of the sink)``, from the statistics of the forward where they are given."""
    scores = part.q.contiguous() @ shared_heads(part.k, how.head_num).mT * how.scale
    added = _added(how, scores.dtype)
    scores = scores if added is None else scores + added
    scores = scores if part.left_out is None else scores.masked_fill(part.left_out, -torch.inf)
    sink = None if how.sink is None else how.sink.to(scores.dtype).reshape(-1, 1, 1)
    if saved[0] is None or saved[1] is None:
        result = attention_weights(part.q, part.k, how.scale, added=added, excluded=part.left_out, sink=how.sink)
        largest, total = result.maximum, result.total
    else:
        largest, total = (_statistic(statistic, part, how) for statistic in saved if statistic is not None)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    shares = torch.where(total > 0, torch.exp(scores - shift) / total, 0.0)
    return shares, None if sink is None else torch.exp(sink - shift) / total


def backward(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dy: torch.Tensor,
    how: AttentionSettings,
    random: Random,
    saved: tuple[torch.Tensor | None, torch.Tensor | None],
    attention_in: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key, value and sink; the last an empty scalar without one."""
    query, key, value = operands
    slope = heads(dy, how.head_num, how.layout)
    output = None if attention_in is None else heads(attention_in, how.head_num, how.layout)
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    of_sink = torch.zeros(()) if how.sink is None else torch.zeros(how.sink.shape, dtype=slope.dtype)
    for part in parts(*operands, how):
        weights, sink_weights = _weights(part, how, saved)
        kept = random.dropped(torch.ones_like(weights), how.keep_prob)
        mine = slope[:, :, part.rows]
        k, v = (shared_heads(operand, how.head_num) for operand in (part.k, part.v))
        to_weights = mine @ v.mT * kept
        if output is None:
            along = (to_weights * weights).sum(-1, keepdim=True)
        else:
            along = (mine * output[:, :, part.rows]).sum(-1, keepdim=True)
        to_scores = weights * (to_weights - along) * how.scale
        of_k, of_v = _folded(to_scores.mT @ part.q, part.k), _folded((weights * kept).mT @ mine, part.v)
        found.append((to_scores @ k, of_k, of_v))
        if sink_weights is not None:
            of_sink = of_sink - (sink_weights * along).sum((0, 2, 3)).reshape(of_sink.shape)
    dq, dk, dv = (
        stored(torch.cat([each[i] for each in found], 2), like, how.layout)
        for i, like in enumerate((query, key, value))
    )
    return dq, dk, dv, of_sink if how.sink is None else of_sink.to(how.sink.dtype)


def _folded(wide: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The gradients of a shared head, added up."""
    shared: torch.Tensor = wide.unflatten(1, (kv.shape[1], -1))
    return shared.sum(2)


def join_rope(operand: torch.Tensor, rope: torch.Tensor | None, count: int, layout: str) -> torch.Tensor:
    """Each head of a query or key with its rotary part behind it."""
    return with_rope(operand, rope, count, joined=layout in {"BSH", "SBH"})
