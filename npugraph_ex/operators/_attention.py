"""Attention of one sequence, or of sequences of equal length: the formula that all attention operators have in common.

::

    scores  = scale * Q K^T + added,  -inf where excluded
    maximum = max(scores)                       row by row, and of the sink too where there is one
    total   = sum(exp(scores - maximum))        likewise
    output  = exp(scores - maximum) / total V

Fewer key heads than query heads are shared by as many consecutive query heads. A sink is one more score in each row of a head,
with no value. A row that sees nothing gives 0, with the maximum -inf and the total 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["Attended", "attended", "attention_weights", "excluded_by_band", "log_sum_exp", "shared_heads"]


class Attended(NamedTuple):
    """What attention gives, in the precision of the computation."""

    output: torch.Tensor
    """[..., N, Q, Dv]"""
    maximum: torch.Tensor
    """[..., N, Q, 1]"""
    total: torch.Tensor
    """[..., N, Q, 1]"""


def shared_heads(operand: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values [..., Nkv, S, D], each head repeated for the query heads that share it: [..., heads, S, D], dense.

    Dense, so that results do not depend on strides: the last bits of a processor's product of matrices may.
    """
    if operand.shape[-3] == heads:
        return operand.contiguous()
    return operand.repeat_interleave(heads // max(operand.shape[-3], 1), -3)


def attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    *,
    added: torch.Tensor | None = None,
    excluded: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Attended:
    """``exp(scores - maximum) / total`` [..., N, Q, S] as the output; arguments as for ``attended``."""
    heads = query.shape[-3]
    scores = query.contiguous() @ shared_heads(key, heads).mT * scale
    if added is not None:
        scores = scores + added.to(scores.dtype)
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    rows = (*scores.shape[:-1], 1)
    maximum = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full(rows, -torch.inf)
    if sink is not None:
        sink = sink.to(scores.dtype).reshape(heads, 1, 1)
        maximum = torch.maximum(maximum, sink)
    weights = torch.exp(scores - maximum.masked_fill(maximum == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - maximum)
    weights = weights if rounded is None else rounded(weights)
    return Attended(torch.where(total == 0, 0.0, weights / total), maximum, total)  # NaN stays NaN


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    added: torch.Tensor | None = None,
    excluded: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Attended:
    """Query [..., N, Q, D], key [..., Nkv, S, D], value [..., Nkv, S, Dv]; ``added``, ``excluded`` broadcast to [..., N, Q, S].

    ``sink``: [N]. ``rounded`` is applied to ``exp(scores - maximum)`` after their sum, before the second product.
    """
    weights, maximum, total = attention_weights(
        query, key, scale, added=added, excluded=excluded, sink=sink, rounded=rounded
    )
    return Attended(weights @ shared_heads(value, query.shape[-3]), maximum, total)


def log_sum_exp(result: Attended, *, unseen: float) -> torch.Tensor:
    """The logarithm of the sum of ``exp(scores)`` of each row, [..., N, Q, 1]; ``unseen`` for a row that sees nothing."""
    return torch.where(result.total == 0, unseen, result.maximum + torch.log(result.total))


def excluded_by_band(rows: int, columns: int, before: float, after: float, *, at_end: bool) -> torch.Tensor:
    """Where the key of a column is more than ``before`` behind the row's query or more than ``after`` ahead: [rows, columns].

    ``at_end``: the last query stands at the last key, otherwise the first at the first.
    """
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1)
    if at_end:
        distance = distance - (columns - rows)
    return (distance > after) | (distance < -before)
