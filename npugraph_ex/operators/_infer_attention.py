"""Attention of inference over a key-value cache: `npu_fused_infer_attention_score` and its v2.

Formula (operator documentation of ``torch_npu.npu_fused_infer_attention_score``), for each batch entry b::

    scores = scale * Q_b K_b^T + pse_shift,  -inf where atten_mask is true or outside the band
    output = softmax(scores) V_b
    lse    = log(sum(exp(scores)))           row by row, +inf where a row sees nothing

Only the first ``actual_seq_lengths[b]`` rows of Q and ``actual_seq_lengths_kv[b]`` rows of K and V take part; the other rows
of the output are 0. A query of one row has no other: ``actual_seq_lengths`` means nothing then. One length is for all entries,
and lengths beyond the last entry are not looked at. Fewer key heads than query heads are shared by as many consecutive query
heads (grouped-query attention).

Covered: layouts BSH, BSND, BNSD, TND and NTD (packed rows, lengths as running totals, without ``pse_shift`` and without a mask of
its own in sparse modes 0 and 1), and mixed ones such as BNSD_BSND, whose second part is the layout of the output; bool, int8 and
uint8 masks; sparse modes 0 to 4; paged caches through ``block_table``; rotary parts of query and key; int8 keys and values
(``_quantised_cache``), int8 outputs; sinks. Not covered, and refused by name: quantised queries, shared prefixes, padding sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._attention import attended, log_sum_exp
from npugraph_ex.operators._packed_attention import packed, per_sequence, unpacked, with_rope
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._quantised_cache import Dequantiser, OutputQuantiser

_LAYOUTS = ("BSH", "BSND", "BNSD", "TND", "NTD")
_OUTPUTS = ("BSH", "BSND", "BNSD", "NBSD", "TND", "NTD")


class Heads(NamedTuple):
    """How many heads the query and the cache have, and how query and output are laid out."""

    operator: str
    layout: str
    query: int
    cache: int
    output: str = ""

    @property
    def packed(self) -> bool:
        """Whether the sequences stand one behind the other."""
        return self.layout in {"TND", "NTD"}


class Extras(NamedTuple):
    """What few calls have: operands and results in int8, and a sink [N]."""

    dequantisers: tuple[Dequantiser, Dequantiser] = (Dequantiser(), Dequantiser())
    quantiser: OutputQuantiser = OutputQuantiser()
    sink: torch.Tensor | None = None


class Band(NamedTuple):
    """Which scores are left out."""

    mask: torch.Tensor | None
    mode: int
    before: int
    after: int


class Lengths(NamedTuple):
    """How many rows of each batch entry count; None: all of them."""

    query: Sequence[int] | None
    cache: Sequence[int] | None


def checked_heads(operator: str, layout: str, heads: int, cache_heads: int, **only_none: object) -> Heads:
    """The heads of a call; raises for what the formula above does not cover."""
    given, _, output = layout.partition("_")
    if given not in _LAYOUTS or (output or given) not in _OUTPUTS:
        raise unsupported(
            operator, "input_layout", layout, f"{', '.join(_LAYOUTS)}, and with another layout of the output"
        )
    for name, value in only_none.items():
        if value is not None:
            raise unsupported(operator, name, "a value", "None")
    cache_heads = cache_heads or heads
    if heads % cache_heads:
        raise ValueError(
            f"{operator}: num_key_value_heads must divide the number of query heads {heads}; it is {cache_heads}."
        )
    return Heads(operator, given, heads, cache_heads, output or given)


def join_rope(
    heads: Heads,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ropes: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    paged: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(query, key, value)`` with the rotary parts joined to query and key, both or neither of which must be given."""
    query, key, value = operands
    if (ropes[0] is None) != (ropes[1] is None):
        missing, given = ("query_rope", "key_rope") if ropes[0] is None else ("key_rope", "query_rope")
        raise ValueError(f"{heads.operator}: {given} needs {missing} beside it, which is None.")
    query = with_rope(query, ropes[0], heads.query, joined=heads.layout == "BSH")
    key = with_rope(key, ropes[1], heads.cache, joined=key.dim() == 3 if paged else heads.layout == "BSH")
    return query, key, value


def attend(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: Heads,
    scale: float,
    band: Band,
    lengths: Lengths,
    pse: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    extras: Extras = Extras(),  # noqa: B008 - immutable
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, lse)``: output in its layout, of the query's dtype or int8; lse [B, N, S, 1] in the dtype of the computation."""
    _refuse_uncovered(heads.operator, operands, lengths, block_table, extras)
    if heads.packed:
        return _attend_packed(operands, heads, scale, band, lengths, pse, block_table, extras)
    query = operands[0]
    dtype = compute_dtype(*operands)
    q = _by_head(query, heads.layout, heads.query).to(dtype)
    keys, values = (
        dequantise(heads.operator, _cache(operand, heads, block_table).to(dtype), block_table)
        for operand, dequantise in zip(operands[1:], extras.dequantisers, strict=True)
    )
    output = q.new_zeros((*q.shape[:-1], values.shape[-1]))
    lse = q.new_full((*q.shape[:-1], 1), torch.inf)
    for b in range(q.shape[0]):
        rows = 1 if q.shape[2] == 1 else _length(heads.operator, "query", lengths.query, b, q.shape[2])
        columns = _length(heads.operator, "key", lengths.cache, b, keys.shape[2])
        part = None if pse is None else pse[b if pse.shape[0] > 1 else 0, :, :rows, :columns]
        excluded = _excluded(heads.operator, band, b, rows, columns, q.shape[2])
        result = attended(
            q[b, :, :rows],
            keys[b, :, :columns],
            values[b, :, :columns],
            scale,
            added=part,
            excluded=excluded,
            sink=extras.sink,
        )
        output[b, :, :rows] = result.output
        lse[b, :, :rows] = log_sum_exp(result, unseen=torch.inf)
    output = extras.quantiser(output)
    output = output if extras.quantiser.scale is not None else output.to(query.dtype)
    return _stored(output, heads.output).contiguous(), lse


def _refuse_uncovered(
    operator: str,
    operands: Sequence[torch.Tensor],
    lengths: Lengths,
    block_table: torch.Tensor | None,
    extras: Extras,
) -> None:
    """Raise for operands whose elements would be taken for other ones."""
    known = (False, *(each.scale is not None for each in extras.dequantisers))
    for name, operand, scaled in zip(("query", "key", "value"), operands, known, strict=True):
        if not operand.is_floating_point() and not (scaled and operand.dtype == torch.int8):
            raise unsupported(
                operator, name, operand.dtype, "floating-point tensors, and int8 keys and values with a scale"
            )
    if block_table is None:
        return
    if not lengths.cache:
        raise ValueError(f"{operator}: a paged cache needs the lengths of its sequences; there are none.")
    if operands[1].dim() not in {3, 4, 5}:
        raise unsupported(operator, "key", tuple(operands[1].shape), "paged caches with 3, 4 or 5 dimensions")


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
    operands = (unpacked(query, rows), key, value)
    output, lse = attend(operands, spread, scale, band, Lengths(rows, columns), block_table=block_table, extras=extras)
    total = query.shape[0]
    output = packed(output, rows, total, 0.0)
    output = output.transpose(0, 1).contiguous() if heads.output == "NTD" else output
    return output, packed(lse.transpose(1, 2), rows, total, torch.inf)


def _by_head(operand: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """``operand`` as [B, N, S, D]."""
    if layout == "BNSD":
        return operand
    if layout == "BSH":
        operand = operand.unflatten(-1, (heads, -1))
    return operand.transpose(1, 2)


def _stored(heads: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] in the layout of the output."""
    if layout == "BNSD":
        return heads
    if layout == "NBSD":
        return heads.transpose(0, 1)
    heads = heads.transpose(1, 2)
    return heads.flatten(2) if layout == "BSH" else heads


def _cache(operand: torch.Tensor, heads: Heads, block_table: torch.Tensor | None) -> torch.Tensor:
    """Keys or values as [B, N, S, D]; a paged cache is read by the table's rows.

    It is [blocks, size, N*D], [blocks, N, size, D], or in layout NZ [blocks, N, D/E, size, E].
    """
    if block_table is None:
        return _by_head(operand, heads.layout, heads.cache)
    if operand.dim() == 5:
        operand = operand.transpose(2, 3).flatten(3)
    if operand.dim() == 3:
        operand = operand.unflatten(-1, (heads.cache, -1)).transpose(1, 2)
    # A table names blocks only as far as the sequence goes; what stands behind is cut off by its length.
    known = block_table.long().clamp(0, operand.shape[0] - 1)
    return operand[known].transpose(1, 2).flatten(2, 3)


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
    """Where a score is left out: the mask given (modes 0, 1), causal from the left (2) or right (3), a band (4)."""
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1)
    if band.mode == 2:
        return distance > 0
    shifted = distance - (columns - rows)
    if band.mode == 3:
        return shifted > 0
    if band.mode == 4:
        return (shifted > band.after) | (shifted < -band.before)
    if band.mode not in {0, 1}:
        raise unsupported(operator, "sparse_mode", band.mode, "0 to 4")
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
