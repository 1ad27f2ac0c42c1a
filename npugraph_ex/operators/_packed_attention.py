"""Two forms of the operands of inference attention, brought to the form that it computes: packed rows, and rotary parts.

Packed (layout TND; operator documentation of ``torch_npu.npu_fused_infer_attention_score``): the sequences stand one behind the
other in the first dimension, and their lengths are given as running totals; for a paged cache the cache's lengths are plain.

Rotary parts (``query_rope``, ``key_rope``): ``scores = Q K^T + Q_rope K_rope^T``, which is one product of joined heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

__all__ = ["packed", "per_sequence", "unpacked", "with_rope"]


def per_sequence(operator: str, what: str, totals: Sequence[int] | None, available: int) -> list[int]:
    """Return the length of each sequence from running totals, which must rise and stay within the rows there are."""
    if not totals:
        raise ValueError(f"{operator}: layout TND needs the lengths of the {what}, as running totals; there are none.")
    lengths = [int(after) - int(before) for before, after in zip((0, *totals), totals, strict=False)]
    if min(lengths) < 0 or int(totals[-1]) > available:
        raise ValueError(
            f"{operator}: in layout TND the lengths of the {what} are running totals that rise to at most its {available} "
            f"rows; they are {list(totals)}."
        )
    return lengths


def unpacked(operand: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[T, N, D] as [B, S, N, D], zeros behind each sequence's end."""
    rows = list(operand[: sum(lengths)].split(list(lengths)))
    return pad_sequence(rows, batch_first=True)


def packed(operand: torch.Tensor, lengths: Sequence[int], total: int, fill: float) -> torch.Tensor:
    """[B, S, N, D] as [T, N, D]; rows behind the last sequence's end hold ``fill``."""
    out = operand.new_full((total, *operand.shape[2:]), fill)
    out[: sum(lengths)] = torch.cat([operand[b, :length] for b, length in enumerate(lengths)])
    return out


def with_rope(operand: torch.Tensor, rope: torch.Tensor | None, heads: int, *, joined: bool) -> torch.Tensor:
    """Join each head with its rotary part; ``joined`` says that heads and their elements share the last dimension."""
    if rope is None:
        return operand
    if not joined:
        return torch.cat([operand, rope], -1)
    return torch.cat([part.unflatten(-1, (heads, -1)) for part in (operand, rope)], -1).flatten(-2)
