"""Collectives that no graph holds, in eager mode around a compiled program: scatter and messages before it, reduce behind it.

Nothing but torch_npu's own streams orders them and the program's replays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Eager(NamedTuple):
    """A collective on a rank's device, and what it gives on every rank by plain arithmetic. Both take the seed last."""

    run: Callable[[torch.Tensor, int], torch.Tensor]
    arithmetic: Callable[[list[torch.Tensor], int], list[torch.Tensor]]


def _scattered(x: torch.Tensor, seed: int) -> torch.Tensor:
    root, result = seed % dist.get_world_size(), torch.empty_like(x)
    parts = [x + rank for rank in range(dist.get_world_size())] if dist.get_rank() == root else None
    dist.scatter(result, parts, root)
    return result


def _passed(x: torch.Tensor, seed: int) -> torch.Tensor:
    """To the next rank, and from the one before; every other rank sends first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    result, sent = torch.empty_like(x), x * (seed % 3 + 1)
    calls: list[tuple[Any, torch.Tensor, int]] = [(dist.isend, sent, rank + 1), (dist.irecv, result, rank - 1)]
    for work in [call(tensor, peer % ranks) for call, tensor, peer in calls[:: -1 if rank % 2 else 1]]:
        work.wait()
    return result


def _reduced(x: torch.Tensor, seed: int) -> torch.Tensor:
    """On the root; the others keep theirs, because what their memory holds then is nobody's promise."""
    root, result = seed % dist.get_world_size(), x + dist.get_rank()
    dist.reduce(result, root)
    return result if dist.get_rank() == root else x


def _reduced_by_hand(xs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    whole, root = torch.stack([x + rank for rank, x in enumerate(xs)]).sum(0).int(), seed % len(xs)
    return [whole if rank == root else x for rank, x in enumerate(xs)]


_NOTHING = Eager(lambda x, _: x, lambda xs, _: xs)
_SCATTER = Eager(_scattered, lambda xs, seed: [xs[seed % len(xs)] + rank for rank in range(len(xs))])
_PASS = Eager(_passed, lambda xs, seed: [xs[rank - 1] * (seed % 3 + 1) for rank in range(len(xs))])
_REDUCE = Eager(_reduced, _reduced_by_hand)


def around(seed: int) -> tuple[Eager, Eager]:
    """What stands before and behind the program of a seed."""
    return (_SCATTER, _PASS, _NOTHING)[seed % 3], (_REDUCE, _NOTHING)[seed // 3 % 2]
