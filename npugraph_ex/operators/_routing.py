"""How the tokens of a mixture of experts are put in the order of their experts, and how they are quantised on the way."""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._precision import INT8_MAX


class Routing(NamedTuple):
    """Where each of the N * K choices of N tokens goes.

    source: for each output row the number of the choice, token * K + k, that it holds; -1 where it holds none.
    row_index: [N * K], for each choice its output row; -1 where it has none.
    order: [N * K], the choices in the order of their experts; those of experts out of range come last.
    counts: [experts], how many choices each expert in range has.
    """

    source: torch.Tensor
    row_index: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor


def route(expert_idx: torch.Tensor, experts: tuple[int, int], *, rows: int | None, capacity: int | None) -> Routing:
    """Order the choices [N, K] by expert, the earlier choice first; ``experts`` is the half-open range of those computed here.

    ``rows`` limits the output rows, which then follow each other. With ``capacity`` each expert has that many output rows, and
    the choices beyond are dropped.
    """
    start, end = experts
    flat = expert_idx.reshape(-1).long()
    here = (flat >= start) & (flat < end)
    order = torch.where(flat < start, 2**31 - 1, flat).argsort(stable=True)
    place = order.argsort()
    expert = torch.where(here, flat - start, end - start)
    counts = flat.new_zeros(end - start + 1).scatter_add_(0, expert, torch.ones_like(flat))[:-1]
    if capacity is None:
        source = torch.where(here[order], order, -1)[:rows]
        return Routing(source, torch.where(here, place, -1), order, counts)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    nth = place - first[expert]
    kept = here & (nth < capacity)
    slots = (end - start) * capacity
    slot = torch.where(kept, expert * capacity + nth, slots)
    choices = torch.arange(flat.numel(), device=flat.device)
    source = flat.new_full((slots + 1,), -1).scatter_(0, slot, choices)[:-1]
    return Routing(source, torch.where(kept, slot, -1), order, counts)


def taken(x: torch.Tensor, source: torch.Tensor, k: int) -> torch.Tensor:
    """The row of ``x`` for each choice in ``source``, zeros where there is none."""
    if not x.shape[0]:
        return x.new_zeros((source.shape[0], *x.shape[1:]))
    rows = x[source.clamp(min=0) // k]
    missing = (source < 0).reshape(-1, *[1] * (x.dim() - 1))
    return rows.masked_fill(missing, 0)


def dynamic_quotient(rows: torch.Tensor, highest: float = INT8_MAX) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rows / scale, scale)`` with ``scale = max(abs(row)) / highest``: one scale for each row."""
    scale = rows.abs().amax(-1) / highest if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])
    return rows / scale.unsqueeze(-1), scale
