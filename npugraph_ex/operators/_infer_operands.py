"""Operands of inference attention in the one form that it computes: [B, N, S, D], codes brought back, rotary parts joined.

Layouts, before ``_``, are those of the operands, behind it that of the output. Keys and values in a paged cache lie in
[blocks, size, N*D], [blocks, N, size, D], or in layout NZ [blocks, N, D/E, size, E]. Int4 codes come eight in an int32, so that the
last dimension has an eighth of its size.

Int8 queries (multi-head latent attention; documentation of ``torch_npu.npu_fused_infer_attention_score_v2``) have a scale s for
each token and head, and int8 keys one scale c: the query's rotary part is given in units of ``s c`` (``npu_mla_prolog_v3``), so
that ``scores = s c (Q K^T + Q_rope K_rope^T)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._int4 import unpack
from npugraph_ex.operators._packed_attention import with_rope
from npugraph_ex.operators._precision import HALVES, refused, unsupported
from npugraph_ex.operators._quantised_cache import Dequantiser, Int8Products, OutputQuantiser

__all__ = ["Extras", "Heads", "Lengths", "Prefix", "by_head", "cached", "checked_heads", "operands_of", "stored"]

_LAYOUTS = ("BSH", "BSND", "BNSD", "TND", "NTD", "NSD", "SH")
_OUTPUTS = (*_LAYOUTS, "NBSD")


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


class Lengths(NamedTuple):
    """How many rows of each batch entry count; None: all of them."""

    query: Sequence[int] | None
    cache: Sequence[int] | None


class Prefix(NamedTuple):
    """Keys and values [1, ...] that all sequences have before their own; ``length`` of their rows count, None: all."""

    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    length: int | None = None


class Extras(NamedTuple):
    """What few calls have.

    Attributes:
        dequantisers: of keys and of values.
        quantiser: of the result.
        sink: one more score a head, [N].
        ropes: rotary parts of query and key.
        query_scale: of an int8 query, laid out as the query without its last dimension.
        prefix: what all sequences begin with.
        products: the numbers of attention wholly in int8.
        floating: the dtype of a result of an int8 query; None: that of its rotary part, else float16.
        padding: how many rows of query and of keys stand behind those that count; None: the rest.
    """

    dequantisers: tuple[Dequantiser, Dequantiser] = (Dequantiser(), Dequantiser())
    quantiser: OutputQuantiser = OutputQuantiser()
    sink: torch.Tensor | None = None
    ropes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    query_scale: torch.Tensor | None = None
    prefix: Prefix = Prefix()
    padding: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    products: Int8Products = Int8Products()
    floating: torch.dtype | None = None


def checked_heads(operator: str, layout: str, heads: int, cache_heads: int, **only_none: object) -> Heads:
    """The heads of a call; raises for what the formula does not cover."""
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


def operands_of(
    heads: Heads,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Lengths,
    block_table: torch.Tensor | None,
    extras: Extras,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(query, key, value)`` without packed codes and with the rotary parts joined; raises for what is not covered."""
    _refuse_dtypes(heads.operator, given, extras)
    _refuse_forms(heads.operator, given[1], lengths, block_table, extras)
    _refuse_other_heads(heads, given, paged=block_table is not None)
    query, *cache = given
    key, value = (_plain(unpack(operand) if operand.dtype == torch.int32 else operand) for operand in cache)
    rope, key_rope = extras.ropes
    if (rope is None) != (key_rope is None):
        missing, there = ("query_rope", "key_rope") if rope is None else ("key_rope", "query_rope")
        raise ValueError(f"{heads.operator}: {there} needs {missing} beside it, which is None.")
    query = with_rope(query, rope, heads.query, joined=heads.layout == "BSH")
    paged = block_table is not None
    key_rope = None if key_rope is None else _plain(key_rope)
    key = with_rope(key, key_rope, heads.cache, joined=key.dim() == 3 if paged else heads.layout == "BSH")
    return query, key, value


_AXIS_OF_HEADS = {"BNSD": 1, "BSND": 2, "TND": 1, "NSD": 0}


def _refuse_other_heads(heads: Heads, given: Sequence[torch.Tensor], *, paged: bool) -> None:
    """Raise where the shapes show other numbers of heads than the call; a paged cache has a layout of its own."""
    axis = _AXIS_OF_HEADS.get(heads.layout)
    if axis is None:
        return
    of_query = "num_query_heads" if heads.operator.endswith("_v2") else "num_heads"
    told = [(of_query, heads.query), ("num_key_value_heads", heads.cache), ("num_key_value_heads", heads.cache)]
    for operand, (name, count) in zip(given[: 1 if paged else 3], told, strict=False):
        if operand.shape[axis] != count:
            raise refused(
                heads.operator, name, count, f"{operand.shape[axis]}, as dimension {axis} of {heads.layout} is"
            )


def _refuse_dtypes(operator: str, given: Sequence[torch.Tensor], extras: Extras) -> None:
    """Raise for operands whose elements would be taken for other ones."""
    query, key, value = given
    codes = not query.is_floating_point()
    scaled = extras.query_scale is not None or extras.products.there
    if codes != scaled or query.dtype not in {torch.int8, *HALVES, torch.float32, torch.float64}:
        raise unsupported(
            operator, "query", query.dtype,
            "float16, bfloat16 and float32; int8 with dequant_scale_query, or with the three scales of whole tensors",
        )  # fmt: skip
    if extras.products.there:
        if any(operand.dtype != torch.int8 for operand in given) or extras.ropes != (None, None):
            raise refused(
                operator, "query, key and value", "others", "int8 without rotary parts, as they are wholly in int8"
            )
        return
    for name, operand, each in zip(("key", "value"), (key, value), extras.dequantisers, strict=True):
        known = each.scale is not None and operand.dtype in {torch.int8, torch.int32}
        if (not operand.is_floating_point() and not known) or (codes and operand.dtype != torch.int8):
            raise unsupported(
                operator, name, operand.dtype,
                "floating-point tensors, and int8 and packed int4 (int32) with a scale; int8 beside an int8 query",
            )  # fmt: skip
    if codes and any(each.scale is None or each.scale.numel() != 1 for each in extras.dequantisers):
        raise refused(operator, "the scale of keys or values", "another", "one number for each beside an int8 query")
    if extras.ropes[1] is not None and not codes and not key.is_floating_point():
        raise refused(operator, "key_rope", "a tensor", "None beside quantised keys, unless the query is int8, too")


def _refuse_forms(
    operator: str, key: torch.Tensor, lengths: Lengths, block_table: torch.Tensor | None, extras: Extras
) -> None:
    """Raise for a paged cache of no known form, and for what does not go with one."""
    if block_table is None:
        return
    if not lengths.cache:
        raise ValueError(f"{operator}: a paged cache needs the lengths of its sequences; there are none.")
    if key.dim() not in {3, 4, 5} or (key.dim() == 5 and key.dtype == torch.int32):
        raise unsupported(
            operator, "key", tuple(key.shape), "paged caches with 3, 4 or 5 dimensions, of int4 with 3 or 4"
        )
    if extras.prefix.key is not None or extras.padding != (None, None):
        raise refused(operator, "block_table", "a tensor", "None beside a shared prefix or padding sizes")


def _plain(cache: torch.Tensor) -> torch.Tensor:
    """A paged cache in layout NZ as [blocks, N, size, D]; any other operand as it is."""
    return cache.transpose(2, 3).flatten(3) if cache.dim() == 5 else cache


def by_head(operand: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """``operand`` as [B, N, S, D]."""
    if layout in {"NSD", "SH"}:
        operand, layout = operand[None], {"NSD": "BNSD", "SH": "BSH"}[layout]
    if layout == "BNSD":
        return operand
    if layout == "BSH":
        operand = operand.unflatten(-1, (heads, -1))
    return operand.transpose(1, 2)


def stored(heads: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] in the layout of the output."""
    if layout in {"NSD", "SH"}:
        return stored(heads, {"NSD": "BNSD", "SH": "BSH"}[layout])[0]
    if layout == "BNSD":
        return heads
    if layout == "NBSD":
        return heads.transpose(0, 1)
    heads = heads.transpose(1, 2)
    return heads.flatten(2) if layout == "BSH" else heads


def cached(operand: torch.Tensor, heads: Heads, block_table: torch.Tensor | None) -> torch.Tensor:
    """Keys or values as [B, N, S, D]; a paged cache is read by the table's rows."""
    if block_table is None:
        return by_head(operand, heads.layout, heads.cache)
    if operand.dim() == 3:
        operand = operand.unflatten(-1, (heads.cache, -1)).transpose(1, 2)
    # A table names blocks only as far as the sequence goes; what stands behind is cut off by its length.
    known = block_table.long().clamp(0, operand.shape[0] - 1)
    return operand[known].transpose(1, 2).flatten(2, 3)
