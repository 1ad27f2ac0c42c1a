"""Attention of the ATB library (Ascend Transformer Boost): packed queries, keys packed alike or in a paged cache.

Formula: that of ``_attention``, sequence by sequence, written to ``out``. Lengths are host tensors of whole numbers, one for each
sequence; a sequence of length 0 leaves its rows of ``out`` as they are.

A mask that is given is added to the scores, and its values above 0 exclude: engines fill it with -inf or -10000 for float16 and
with 1 for bfloat16 and int8, which the library's kernel multiplies by a number below all scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._attention import attended, excluded_by_band
from npugraph_ex.operators._precision import compute_dtype, unsupported

__all__ = ["HeadCounts", "Mask", "attend_packed", "causal", "distances", "given_mask", "mask_of_heads", "packed_mask"]

Mask = Callable[[int, int, int, int], tuple[torch.Tensor | None, torch.Tensor | None]]
"""``mask(sequence, first row, rows, columns)``: what is added to the scores, and where they are excluded."""


class HeadCounts(NamedTuple):
    """How many heads the query and the cache have, and the factor of the scores."""

    query: int
    cache: int
    scale: float


def attend_packed(
    query: torch.Tensor,
    lengths: Sequence[int],
    cached: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    heads: HeadCounts,
    out: torch.Tensor,
    mask: Mask | None = None,
) -> None:
    """Write to ``out`` [T, N, Dv] the attention of ``query`` [T, N, D]; ``cached(b)`` gives key and value [S, Nkv, D] of one."""
    dtype = compute_dtype(query, out)
    first = 0
    for b, length in enumerate(lengths):
        key, value = (
            part.to(dtype).reshape(len(part), math.prod(part.shape[1:])).unflatten(1, (heads.cache or heads.query, -1))
            for part in cached(b)
        )
        rows = slice(first, first + length)
        if length and len(key):
            q = query[rows].to(dtype).reshape(length, heads.query, -1).transpose(0, 1)
            added, excluded = mask(b, first, length, len(key)) if mask else (None, None)
            output = attended(
                q, key.transpose(0, 1), value.transpose(0, 1), heads.scale, added=added, excluded=excluded
            ).output
            out[rows] = output.transpose(0, 1).reshape(out[rows].shape).to(out.dtype)
        first += length


def causal(b: int, first: int, rows: int, columns: int) -> tuple[None, torch.Tensor]:
    """No key is behind its query, the last of which stands at the last key."""
    del b, first
    return None, excluded_by_band(rows, columns, torch.inf, 0, at_end=True)


def _split(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    excluded = mask > 0
    return mask.double().masked_fill(excluded, 0.0), excluded


def given_mask(mask: torch.Tensor) -> Mask:
    """A mask [S, S], or [B, S, S], whose upper left part is that of a shorter sequence."""

    def part(b: int, first: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        del first
        one = mask if mask.dim() == 2 else mask[b if mask.shape[0] > 1 else 0]
        return _split(one[..., :rows, :columns])

    return part


def packed_mask(mask: torch.Tensor) -> Mask:
    """A mask [T, S] of the packed rows, one behind the other."""

    def part(b: int, first: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        del b
        return _split(mask[..., first : first + rows, :columns])

    return part


def mask_of_heads(mask: torch.Tensor) -> Mask:
    """A mask [N, S, S], or [B, N, S, S], that is added to the scores of each head."""

    def part(b: int, first: int, rows: int, columns: int) -> tuple[torch.Tensor, None]:
        del first
        one = mask if mask.dim() == 3 else mask[b if mask.shape[0] > 1 else 0]
        return one[..., :rows, :columns], None

    return part


def distances(operator: str, tile: torch.Tensor, slopes: torch.Tensor, *, root: bool) -> Mask:
    """A causal mask that adds to the scores of each head its slope times the distance to the key, or the root of that.

    ``tile`` [S, S] has these distances, which the kernel takes from it; only they are covered.
    """
    near = torch.arange(tile.shape[-1], dtype=torch.float64)
    expected = (near.unsqueeze(-1) - near).clamp(min=0)
    expected = expected.sqrt() if root else expected
    if not torch.allclose(tile.double().tril(), expected, rtol=2**-7):
        raise unsupported(
            operator, "mask", "other numbers", "distances between positions, or their roots with mask_type 5"
        )

    def part(b: int, first: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, excluded = causal(b, first, rows, columns)
        distance = torch.arange(columns - rows, columns).double().unsqueeze(-1) - torch.arange(columns)
        distance = distance.clamp(min=0)
        return slopes.double().reshape(-1, 1, 1) * (distance.sqrt() if root else distance), excluded

    return part
