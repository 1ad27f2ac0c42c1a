"""Attention of inference over a key-value cache: `npu_fused_infer_attention_score` and its v2.

Formula (operator documentation of ``torch_npu.npu_fused_infer_attention_score``), for each batch entry b::

    scores = scale * Q_b K_b^T + pse_shift,  -inf where atten_mask is true or outside the band
    output = softmax(scores) V_b
    lse    = log(sum(exp(scores)))           row by row, +inf where a row sees nothing

Only the first ``actual_seq_lengths[b]`` rows of Q and ``actual_seq_lengths_kv[b]`` rows of K and V take part, with a padding size
those that end so many rows before the last; the other rows of the output are 0. A query of one row has no other:
``actual_seq_lengths`` means nothing then. One length is for all entries, and lengths beyond the last entry are not looked at.
Fewer key heads than query heads are shared by as many consecutive query heads (grouped-query attention). The rows of a shared
prefix stand before those of each K_b and V_b.

Covered: layouts BSH, BSND, BNSD, NSD, TND and NTD (packed rows, lengths as running totals, without ``pse_shift`` and without a mask
of its own in sparse modes 0 and 1), and mixed ones such as BNSD_BSND, whose second part is the layout of the output; bool, int8
and uint8 masks; sparse modes 0 to 4, and 9, a tree of drafted tokens; paged caches through ``block_table``; int8 and int4
operands and rotary parts as ``_infer_operands`` says, and all in int8 as ``_quantised_cache`` says; outputs in 8 bits; sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._attention import attended, log_sum_exp
from npugraph_ex.operators._infer_operands import (
    Extras,
    Heads,
    Lengths,
    Prefix,
    by_head,
    cached,
    checked_heads,
    operands_of,
    stored,
)
from npugraph_ex.operators._packed_attention import packed, per_sequence, unpacked
from npugraph_ex.operators._precision import compute_dtype, refused, unsupported

__all__ = ["Band", "Extras", "Lengths", "Prefix", "attend", "checked_heads"]

_TREE = 9


class Band(NamedTuple):
    """Which scores are left out."""

    mask: torch.Tensor | None
    mode: int
    before: int
    after: int


def attend(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: Heads,
    scale: float,
    band: Band,
    lengths: Lengths,
    pse: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    extras: Extras = Extras(),  # noqa: B008 - immutable
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, lse)``: output in its layout, of the query's dtype (int8: that of its rotary part), or int8.

    lse: [B, N, S, 1] in the dtype of the computation.
    """
    operands = operands_of(heads, given, lengths, block_table, extras)
    _refuse_bands(heads.operator, band, extras, pse)
    how = _attend_packed if heads.packed else _attend_padded
    output, lse = how(operands, heads, scale, band, lengths, pse, block_table, extras)
    if extras.quantiser.scale is None:
        floating = given[0] if given[0].is_floating_point() else extras.ropes[0]
        output = output.to(extras.floating or (torch.float16 if floating is None else floating.dtype))
    return output, lse


def _refuse_bands(operator: str, band: Band, extras: Extras, pse: torch.Tensor | None) -> None:
    """Raise for bands and masks whose place is not documented."""
    if band.mode not in {*range(5), _TREE}:
        raise unsupported(operator, "sparse_mode", band.mode, "0 to 4, and 9")
    if band.mode == _TREE and (band.mask is None or extras.ropes[0] is None):
        raise refused(operator, "sparse_mode", band.mode, "another one without atten_mask and rotary parts")
    if extras.prefix.key is not None and band.mode in {2, 4, _TREE}:
        raise unsupported(operator, "sparse_mode", band.mode, "0, 1 and 3 beside a shared prefix")
    if extras.padding != (None, None):
        for name, value in (("atten_mask", band.mask), ("pse_shift", pse)):
            if value is not None:
                raise unsupported(operator, name, "a tensor", "None beside padding sizes")


def _attend_padded(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: Heads,
    scale: float,
    band: Band,
    lengths: Lengths,
    pse: torch.Tensor | None,
    block_table: torch.Tensor | None,
    extras: Extras,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, lse)`` of sequences side by side; output in the precision of the computation, or int8."""
    dtype = compute_dtype(*operands)
    q = by_head(operands[0], heads.layout, heads.query).to(dtype)
    if extras.query_scale is not None:
        q = q * _scale_by_head(extras.query_scale, heads.layout).to(dtype)
    q = q * extras.products.of_scores(dtype)
    keys, values = (
        dequantise(heads.operator, cached(operand, heads, block_table).to(dtype), block_table)
        for operand, dequantise in zip(operands[1:], extras.dequantisers, strict=True)
    )
    before = _prefix(extras.prefix, heads, dtype)
    output = q.new_zeros((*q.shape[:-1], values.shape[-1]))
    lse = q.new_full((*q.shape[:-1], 1), torch.inf)
    name, alone = heads.operator, q.shape[2] == 1
    for b in range(q.shape[0]):
        rows = slice(1) if alone else _part(name, "query", lengths.query, b, q.shape[2], extras.padding[0])
        columns = _part(name, "key", lengths.cache, b, keys.shape[2], extras.padding[1], alone=alone)
        key, value = (each[b, :, columns] for each in (keys, values))
        if before is not None:
            key, value = (torch.cat(parts, 1) for parts in zip(before, (key, value), strict=True))
        query = q[b, :, rows]
        size = query.shape[1], key.shape[1]
        result = attended(
            query,
            key,
            value,
            scale,
            added=None if pse is None else pse[b if pse.shape[0] > 1 else 0, :, : size[0], : size[1]],
            excluded=_excluded(name, band, b, *size, q.shape[2]),
            sink=extras.sink,
            rounded=extras.products.rounded if extras.products.there else None,
        )
        output[b, :, rows] = result.output
        lse[b, :, rows] = log_sum_exp(result, unseen=torch.inf)
    return stored(extras.quantiser(output), heads.output).contiguous(), lse


def _scale_by_head(scale: torch.Tensor, layout: str) -> torch.Tensor:
    """The scale of an int8 query, [B, S, N] or in BNSD [B, N, S], as [B, N, S, 1]."""
    return (scale if layout == "BNSD" else scale.transpose(1, 2)).unsqueeze(-1)


def _prefix(prefix: Prefix, heads: Heads, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values [N, S, D] that all sequences begin with."""
    if prefix.key is None and prefix.value is None:
        return None
    if prefix.key is None or prefix.value is None:
        raise refused(heads.operator, "key_shared_prefix and value_shared_prefix", "one", "both or neither")
    if not prefix.key.is_floating_point():
        raise unsupported(heads.operator, "key_shared_prefix", prefix.key.dtype, "floating-point tensors")
    key, value = (by_head(part, heads.layout, heads.cache)[0].to(dtype) for part in (prefix.key, prefix.value))
    length = key.shape[1] if prefix.length is None else prefix.length
    if not 0 <= length <= key.shape[1]:
        raise refused(
            heads.operator, "actual_shared_prefix_len", length, f"0 to {key.shape[1]}, the rows of the prefix"
        )
    return key[:, :length], value[:, :length]


def _attend_packed(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: Heads,
    scale: float,
    band: Band,
    lengths: Lengths,
    pse: torch.Tensor | None,
    block_table: torch.Tensor | None,
    extras: Extras,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, lse)`` as [T, N, D] or [N, T, D], and [T, N, 1]: the sequences side by side, then packed again."""
    if extras.prefix.key is not None or extras.padding != (None, None):
        raise refused(
            heads.operator, "input_layout", heads.layout, "another one beside a shared prefix or padding sizes"
        )
    if pse is not None:
        raise unsupported(heads.operator, "pse_shift", "a value", "None in layout TND")
    if band.mask is not None and band.mode in {0, 1}:
        raise unsupported(heads.operator, "atten_mask", "a value", "None in layout TND with sparse_mode 0 or 1")
    query, key, value = operands
    if heads.layout == "NTD":
        query = query.transpose(0, 1)
        key, value = (operand.transpose(0, 1) if block_table is None else operand for operand in (key, value))
    rows = per_sequence(heads.operator, "query", lengths.query, query.shape[0])
    if block_table is None:
        columns = per_sequence(heads.operator, "key", lengths.cache, key.shape[0])
        key, value = unpacked(key, columns), unpacked(value, columns)
    else:
        columns = [int(length) for length in lengths.cache or ()]
    spread = heads._replace(layout="BSND", output="BSND")
    if band.mode == _TREE and band.mask is not None:
        band = band._replace(mask=_trees(band.mask, rows))
    if extras.query_scale is not None:
        by_token = extras.query_scale if heads.layout == "TND" else extras.query_scale.t()
        extras = extras._replace(query_scale=unpacked(by_token.unsqueeze(-1), rows)[..., 0])
    operands = (unpacked(query, rows), key, value)
    output, lse = _attend_padded(operands, spread, scale, band, Lengths(rows, columns), None, block_table, extras)
    total = query.shape[0]
    output = packed(output, rows, total, 0.0)
    output = output.transpose(0, 1).contiguous() if heads.output == "NTD" else output
    return output, packed(lse.transpose(1, 2), rows, total, torch.inf)


def _trees(mask: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The masks of drafted tokens, Q*Q elements of each sequence one behind the other, as [B, Q, Q]."""
    out = mask.new_ones((len(rows), max(rows), max(rows)))
    for b, part in enumerate(mask.flatten().split([count * count for count in rows])):
        out[b, : rows[b], : rows[b]] = part.view(rows[b], rows[b])
    return out


def _part(
    operator: str,
    what: str,
    lengths: Sequence[int] | None,
    b: int,
    available: int,
    padding: torch.Tensor | None,
    *,
    alone: bool = False,
) -> slice:
    """Which rows of a sequence count: the first ones, or those before the padding; none of too few for one query ``alone``."""
    length = _length(operator, what, lengths, b, available)
    if padding is None or not lengths:
        return slice(length)
    end = available - max(int(padding.flatten()[0]), 0)
    if end < length and alone:
        return slice(0)
    if end < length:
        raise refused(operator, f"the {what}'s padding size", available - end, f"at most {available - length}")
    return slice(end - length, end)


def _length(operator: str, what: str, lengths: Sequence[int] | None, b: int, available: int) -> int:
    if not lengths:
        return available
    if 1 < len(lengths) <= b:
        raise ValueError(
            f"{operator}: there must be one {what} length, or one for each batch entry; there are {len(lengths)}."
        )
    length = int(lengths[b] if len(lengths) > 1 else lengths[0])
    if not 0 <= length <= available:
        raise ValueError(f"{operator}: the {what} has {available} rows, but its length {b} is {length}.")
    return length


def _excluded(operator: str, band: Band, b: int, rows: int, columns: int, all_rows: int) -> torch.Tensor | None:
    """Where a score is left out: the mask given (modes 0, 1), causal from the left (2) or right (3), a band (4), a tree (9)."""
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1)
    if band.mode == 2:
        return distance > 0
    shifted = distance - (columns - rows)
    if band.mode == 3:
        return shifted > 0
    if band.mode == 4:
        return (shifted > band.after) | (shifted < -band.before)
    if band.mode == _TREE and band.mask is not None:
        return _outside_tree(operator, band.mask[b], rows, columns)
    if band.mask is None:
        return None
    mask = band.mask.bool()
    # [Q, KV], [B, Q, KV] or [B, 1, Q, KV]; the mask of a single query row may leave Q out: [B, KV].
    if mask.dim() == 2 and all_rows == 1 and mask.shape[0] != 1:
        mask = mask.unsqueeze(1)
    while mask.dim() < 4:
        mask = mask.unsqueeze(-3) if mask.dim() == 2 else mask.unsqueeze(1)
    chosen = mask[b if mask.shape[0] > 1 else 0, :, :rows, :columns]
    if band.mode == 0 and (band.before < rows or band.after < columns):
        chosen = chosen | (distance > band.after) | (distance < -band.before)
    return chosen


def _outside_tree(operator: str, mask: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """All tokens before the drafted ones are seen, and of these the ancestors, where the mask [Q, Q] is false."""
    if rows > columns:
        raise refused(
            operator, "the query's length", rows, f"at most that of the keys, {columns}, with sparse_mode {_TREE}"
        )
    out = torch.zeros(rows, columns, dtype=torch.bool)
    out[:, columns - rows :] = mask[:rows, :rows].bool()
    return out
