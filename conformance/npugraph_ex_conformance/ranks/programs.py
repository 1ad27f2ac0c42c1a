"""Random programs with collectives, as data: run on a rank's device, traced, or worked out for all ranks by plain arithmetic.

All values are int32 matrices of one shape, so that nothing may differ. A program is the same on every rank, except that a rank may
leave a result unused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives

ROWS, COLUMNS = 4, 32
_COLLECTIVES = torch.ops._c10d_functional
_SMALL, _WIDE = 3, 256
_SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda all_: all_.sum(0).int(), "max": lambda all_: all_.amax(0), "min": lambda all_: all_.amin(0)
}  # fmt: skip


class RankStep(NamedTuple):
    """One step: what it does, and to which earlier values (0 is the input). Its result is the next value.

    kind: a name of `KINDS`; a collective's result is awaited `later` steps behind it. seed: of its other choices.
    """

    kind: str
    values: tuple[int, ...]
    seed: int
    later: int = 0


class RankPlace(NamedTuple):
    """Where a program runs. Operators that compute and communicate in one have groups of their own, as the device asks."""

    rank: int
    ranks: int
    group: str
    """The name in torch."""
    products: str
    """The name in HCCL."""
    experts: str


Pointwise = Callable[..., torch.Tensor]


def _added(x: torch.Tensor, y: torch.Tensor, seed: int) -> torch.Tensor:
    return x + y * (seed % 5 + 1)


def _clamped(x: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.relu(torch.neg(x) + seed % 7)


def _written(x: torch.Tensor, seed: int) -> torch.Tensor:
    """A temporary that is written in place, as a whole and in part."""
    y = x + seed % 3
    y.mul_(3)
    y[:, : seed % COLUMNS].sub_(1)
    return y


def _copied(x: torch.Tensor, seed: int) -> torch.Tensor:
    y = x.clone()
    if seed % 2:
        x.add_(0)
    return y.view(-1).view_as(x)


POINTWISE: dict[str, tuple[int, Pointwise]] = {
    "added": (2, _added),
    "clamped": (1, _clamped),
    "written": (1, _written),
    "copied": (1, _copied),
}
"""How many values each takes, and what it does, on any rank alone."""


def _small(x: torch.Tensor, columns: int = COLUMNS) -> torch.Tensor:
    """Numbers from -3 to 3 in float16, whose products and their sums are exact."""
    wide = x.repeat(1, columns // COLUMNS) if columns > COLUMNS else x
    return (wide % (2 * _SMALL + 1) - _SMALL).half()


def _weight(seed: int, device: torch.device, rows: int = COLUMNS) -> torch.Tensor:
    down, along = torch.arange(rows, device=device).unsqueeze(1), torch.arange(COLUMNS, device=device)
    return ((down * (seed % 11 + 1) + along) % 5 - 2).half()


def _experts(seed: int, device: torch.device, ranks: int) -> torch.Tensor:
    """Two of as many experts as there are twice the ranks, for each row."""
    first = (torch.arange(ROWS, device=device) + seed) % (2 * ranks)
    return torch.stack([first, (first + 1 + seed % (2 * ranks - 1)) % (2 * ranks)], 1).int()


class Started(NamedTuple):
    """A collective that runs: what to wait for, and what the value is then."""

    waits: Any
    value: Callable[[Any], torch.Tensor]


def _same(result: torch.Tensor) -> torch.Tensor:
    return result


def _twice(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x * 2


def doubling(group: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """What a rule of the user's replaces, and by what: a sum over the ranks, doubled. The other ranks see no difference."""

    def total(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _COLLECTIVES.wait_tensor(_COLLECTIVES.all_reduce(x, "sum", group))
        return found

    def product(x: torch.Tensor) -> torch.Tensor:
        return total(x) * 2

    def addition(x: torch.Tensor) -> torch.Tensor:
        found = total(x)
        return found + found

    return product, addition


def _beside(x: torch.Tensor, seed: int, at: RankPlace) -> Started:
    """An operator that could work in place reads what the collective still reads, and nobody reads it afterwards.

    `all_reduce` copies its argument before it starts; the other three read it until the wait.
    """
    sent = torch.cat([x + other for other in range(at.ranks)])
    rows, c = [ROWS] * at.ranks, _COLLECTIVES
    form = seed % 4
    if form == 0:
        result = c.all_reduce(sent, "sum", at.group)
    elif form == 1:
        result = c.all_gather_into_tensor(sent, at.ranks, at.group)
    elif form == 2:
        result = c.reduce_scatter_tensor(sent, "sum", at.ranks, at.group)
    else:
        result = c.all_to_all_single(sent, rows, rows, at.group)
    negative = torch.neg(sent)
    return Started(result, lambda all_: _row_sums(all_) - _row_sums(negative))


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """The sum of the matrices that lie in ``x`` one below the other."""
    return x.view(-1, ROWS, COLUMNS).sum(0).int()


def _rows(giver: int, taker: int, seed: int) -> int:
    """How many rows one rank gives to another one in an exchange of unequal parts."""
    return (giver + 2 * taker + seed) % ROWS


def start(step: RankStep, x: torch.Tensor, at: RankPlace) -> Started:  # noqa: PLR0911 - as in `arithmetic`
    """Start the collective of a step on a device."""
    seed, c = step.seed, _COLLECTIVES
    if step.kind == "all_reduce":
        return Started(c.all_reduce(x, list(_SUMS)[seed % 3], at.group), _same)
    if step.kind == "doubled":  # in two spellings, so that a rule fits on half of the ranks
        spelled = torch.add if at.rank % 2 else _twice
        return Started(c.all_reduce(x, "sum", at.group), lambda all_: spelled(all_, all_))
    if step.kind == "beside":
        return _beside(x, seed, at)
    if step.kind == "all_gather":
        result = c.all_gather_into_tensor(x, at.ranks, at.group)
        return Started(result, lambda all_: all_.view(at.ranks, ROWS, COLUMNS)[seed % at.ranks] + 1)
    if step.kind == "reduce_scatter":
        parts = torch.cat([x + other for other in range(at.ranks)])
        return Started(c.reduce_scatter_tensor(parts, "sum", at.ranks, at.group), _same)
    if step.kind == "all_to_all":
        rows = [ROWS] * at.ranks
        result = c.all_to_all_single(torch.cat([x * (other + 1) for other in range(at.ranks)]), rows, rows, at.group)
        return Started(result, lambda all_: all_.view(at.ranks, ROWS, COLUMNS).sum(0).int())
    if step.kind == "uneven":
        rows = [_rows(at.rank, other, seed) for other in range(at.ranks)]
        taken = [_rows(other, at.rank, seed) for other in range(at.ranks)]
        sent = torch.cat([x[:count] + other for other, count in enumerate(rows)])
        return Started(c.all_to_all_single(sent, taken, rows, at.group), lambda all_: x + all_.sum(0).int())
    if step.kind == "messages":  # with the neighbours, or with those behind them
        far = 1 + seed % (at.ranks - 1)
        peers, room = [(at.rank + far) % at.ranks, (at.rank - far) % at.ranks], torch.empty_like(x)
        result = c.batch_p2p_ops(["isend", "irecv"], peers, [0, 0], [x * 3, room], at.group)
        return Started(result, lambda both: both[1] - x)
    if step.kind == "broadcast":
        return Started(c.broadcast(x, seed % at.ranks, at.group), _same)
    return Started(c.all_reduce_coalesced([x, x + 1], "sum", at.group), lambda both: both[0] - both[1] * 2)


def fused(step: RankStep, x: torch.Tensor, at: RankPlace) -> Any:
    """The operator of a step that computes and communicates in one, on a device."""
    seed, npu = step.seed, torch.ops.npu
    if step.kind == "mm_all_reduce":
        return npu.npu_mm_all_reduce_base(_small(x), _weight(seed, x.device), at.products).int()
    if step.kind == "mm_reduce_scatter":
        rows = torch.cat([_small(x + other, _WIDE) for other in range(at.ranks)])
        return npu.npu_mm_reduce_scatter_base(rows, _weight(seed, x.device, _WIDE), at.products, at.ranks).int()
    if step.kind == "all_gather_mm":
        out = npu.npu_all_gather_base_mm(_small(x, _WIDE), _weight(seed, x.device, _WIDE), at.products, at.ranks)[0]
        return out.view(at.ranks, ROWS, COLUMNS)[seed % at.ranks].int()
    ids, experts, where = _experts(seed, x.device, at.ranks), 2 * at.ranks, (at.experts, at.ranks, at.rank)
    sent = npu.npu_moe_distribute_dispatch_v2(_small(x), ids, *where, experts)
    worked = sent[0] * (at.rank + 2)
    scales = torch.ones(ROWS, 2, device=x.device)
    back = npu.npu_moe_distribute_combine_v2(worked, ids, sent[2], sent[4], scales, *where, experts)
    return back.int()


COLLECTIVES = (
    "all_reduce",
    "doubled",
    "beside",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "coalesced",
    "uneven",
    *(["messages"] if hasattr(_COLLECTIVES, "batch_p2p_ops") else []),  # torch 2.13 has them in graphs
)
FUSED = ("mm_all_reduce", "mm_reduce_scatter", "all_gather_mm", "experts")


def arithmetic(step: RankStep, xs: list[Any]) -> list[Any]:  # noqa: C901, PLR0911, PLR0912 - some lines for each kind
    """The value of a collective or fused step on every rank, from the argument on every rank."""
    ranks, seed, kind = len(xs), step.seed, step.kind
    all_, everyone = torch.stack(xs), range(ranks)
    one = seed % ranks
    if kind == "all_reduce":
        return [list(_SUMS.values())[seed % 3](all_)] * ranks
    if kind == "doubled":
        return [all_.sum(0).int() * 2] * ranks
    if kind == "beside":
        sent = [torch.cat([x + other for other in everyone]) for x in xs]
        if seed % 4 < 2:
            return [_row_sums(torch.cat(sent)) + _row_sums(one) for one in sent]
        return [(all_ + rank).sum(0).int() + _row_sums(sent[rank]) for rank in everyone]
    if kind == "all_gather":
        return [xs[one] + 1] * ranks
    if kind == "reduce_scatter":
        return [sum(x + rank for x in xs) for rank in everyone]
    if kind == "all_to_all":
        return [(all_ * (rank + 1)).sum(0).int() for rank in everyone]
    if kind == "broadcast":
        return [xs[one]] * ranks
    if kind == "uneven":
        parts = [[x[: _rows(giver, rank, seed)] + rank for giver, x in enumerate(xs)] for rank in everyone]
        return [xs[rank] + torch.cat(parts[rank]).sum(0).int() for rank in everyone]
    if kind == "messages":
        far = 1 + seed % (ranks - 1)
        return [xs[(rank - far) % ranks] * 3 - xs[rank] for rank in everyone]
    if kind == "coalesced":
        return [(all_.sum(0) - (all_ + 1).sum(0) * 2).int()] * ranks
    wide = [_small(x, _WIDE).double() for x in xs]
    if kind == "mm_all_reduce":
        return [
            torch.stack([_small(x).double() @ _weight(seed, all_.device).double() for x in xs]).sum(0).int()
        ] * ranks
    if kind == "mm_reduce_scatter":
        weight = _weight(seed, all_.device, _WIDE).double()
        return [torch.stack([_small(x + rank, _WIDE).double() @ weight for x in xs]).sum(0).int() for rank in everyone]
    if kind == "all_gather_mm":
        return [(wide[one] @ _weight(seed, all_.device, _WIDE).double()).int()] * ranks
    owners = _experts(seed, all_.device, ranks).long() // 2
    return [_small(x).int() * (owners + 2).sum(1, keepdim=True).int() for x in xs]


class RankProgram(NamedTuple):
    """Steps, which steps' results each rank leaves unused, and which values are returned."""

    ranks: int
    steps: tuple[RankStep, ...]
    unused: tuple[frozenset[int], ...]
    returned: tuple[int, ...]
    side: int
    """The step that runs on a stream of its own; -1 where none does."""

    def run(self, x: torch.Tensor, at: RankPlace) -> tuple[torch.Tensor, ...]:
        """On a device, eager or traced."""
        from npugraph_ex import scope

        values = [x]
        running: dict[int, tuple[Started, int]] = {}
        for number, step in enumerate(self.steps):
            for due in [other for other, (_, later) in running.items() if later <= number]:
                values[due + 1] = _awaited(running.pop(due)[0])
            given = [values[value] for value in step.values]
            if step.kind in POINTWISE:
                values.append(POINTWISE[step.kind][1](*given, step.seed))
            elif step.kind in FUSED:
                result = fused(step, given[0], at)
                values.append(given[0] if number in self.unused[at.rank] else result)
            elif number in self.unused[at.rank]:
                start(step, given[0], at)
                values.append(given[0])
            elif number == self.side:
                with scope.npu_stream_switch("side"):
                    started = start(step, given[0], at)
                values.append(_awaited(started))
            else:
                values.append(given[0])  # nobody reads it before the wait
                running[number] = (start(step, given[0], at), number + 1 + step.later)
        for number, (started, _) in running.items():
            values[number + 1] = _awaited(started)
        return tuple(values[value] * 1 for value in self.returned)

    def expected(self, xs: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """What every rank returns, on the CPU."""
        values = [[x.clone() for x in xs]]
        for number, step in enumerate(self.steps):
            given = [values[value] for value in step.values]
            if step.kind in POINTWISE:
                function = POINTWISE[step.kind][1]
                values.append([function(*(value[rank] for value in given), step.seed) for rank in range(self.ranks)])
            else:
                results = arithmetic(step, given[0])
                values.append([given[0][r] if number in self.unused[r] else results[r] for r in range(self.ranks)])
        return [tuple(values[value][rank] for value in self.returned) for rank in range(self.ranks)]


def _awaited(started: Started) -> torch.Tensor:
    wait = _COLLECTIVES.wait_tensor
    waits = started.waits
    return started.value([wait(part) for part in waits] if isinstance(waits, (list, tuple)) else wait(waits))


def draw(seed: int, ranks: int) -> RankProgram:
    """The random program of a seed."""
    chosen = random.Random(f"{seed}:{ranks}")
    steps: list[RankStep] = []
    ready, sent = [0], 0  # the step from which on each value may be read; what a collective took last
    for number in range(chosen.randint(5, 10)):
        kind = chosen.choice((*POINTWISE, *COLLECTIVES, *COLLECTIVES, *FUSED))
        readable = [value for value, since in enumerate(ready) if since <= number]
        count = POINTWISE[kind][0] if kind in POINTWISE else 1
        later = chosen.choice((0, 0, 1, 2, 3)) if kind in COLLECTIVES else 0
        values = [chosen.choice((chosen.choice(readable), readable[-1], sent)) for _ in range(count)]
        sent = values[0] if kind in COLLECTIVES else sent
        steps.append(RankStep(kind, tuple(values), chosen.randrange(1000), later))
        ready.append(number + 1 + later)
    communicating = [number for number, step in enumerate(steps) if step.kind not in POINTWISE]
    unused = tuple(frozenset(n for n in communicating if chosen.random() < 0.15) for _ in range(ranks))
    # What runs beside its collective would be read on the main stream, which waits only for the collective.
    alone = [n for n in communicating if steps[n].kind in COLLECTIVES and steps[n].kind != "beside"]
    side = chosen.choice(alone) if alone and chosen.random() < 0.4 else -1
    read = {value for step in steps for value in step.values}
    ends = [value for value in range(1, len(steps) + 1) if value not in read]  # a step that nothing shows finds nothing
    shown = tuple({*ends, *chosen.sample(range(1, len(steps) + 1), 2)})
    return RankProgram(ranks, tuple(steps), unused, shown, side)


def given(seed: int, rank: int, call: int) -> torch.Tensor:
    """A rank's input at one call."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank * 101 + call)
    return torch.randint(-50, 50, (ROWS, COLUMNS), dtype=torch.int32, generator=generator)
