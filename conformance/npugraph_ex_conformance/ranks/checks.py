"""What one rank does with a program: eager mode, the compiled graph and its replays, against arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import npu_emulator
from npugraph_ex_conformance.ranks.around import Eager, around
from npugraph_ex_conformance.ranks.programs import RankPlace, RankProgram, doubling, draw, given

_CALLS = 3


@functools.cache
def here() -> RankPlace:
    """Where this process runs."""
    world: Any = dist.group.WORLD
    ranks = list(range(dist.get_world_size()))
    names = [_connected(dist.new_group(ranks)) for _ in range(2)]
    return RankPlace(dist.get_rank(), len(ranks), world.group_name, *names)


def _connected(group: Any) -> str:
    """A group's name in HCCL."""
    name: str = group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())
    return name


def program_faults(seed: int, mutant: str | None = None) -> str:
    """What is wrong with the program of a seed on this rank; empty if nothing is.

    Args:
        seed: of the program.
        mutant: the deliberate fault that is on while the program is compiled.
    """
    from npugraph_ex import last_report, register_replacement, testing
    from npugraph_ex.testing.oracle.side_streams import free_events

    at = here()
    program = draw(seed, at.ranks)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return program.run(x, at)

    before, behind = around(seed)

    def between(program: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], call: int) -> tuple[torch.Tensor, ...]:
        first, *others = program(before.run(given(seed, at.rank, call).to("npu"), seed))
        return behind.run(first, seed), *others

    inputs = [[given(seed, rank, call) for rank in range(at.ranks)] for call in range(_CALLS)]
    wanted = [_expected(program, xs, before, behind, seed)[at.rank] for xs in inputs]
    with torch.no_grad():
        eager = [_difference("eager mode", call, between(run, call), wanted[call]) for call in range(2)]
        if _some_rank_has(eager):
            return next(filter(None, eager), "")
        torch.compiler.reset()
        rule = register_replacement(*doubling(at.group), [torch.ones(2, dtype=torch.int32, device="npu")])
        schedule = ("fifo", "lazy", f"random:{seed}", f"pct:{seed}:3")[seed % 4]  # of every rank
        on_schedule = npu_emulator.schedule(schedule)
        with (
            testing.mutant(mutant) if mutant else nullcontext(),
            rule,
            free_events(),
            on_schedule,
            npu_emulator.detect_races() as races,
        ):
            divided: dict[str, Any] = {"auto_streams": seed // 4 % 2 == 1}
            compiled = torch.compile(run, backend="npugraph_ex", fullgraph=True, dynamic=False, options=divided)
            begun, kept = [], []
            for call in range(_CALLS):
                begun.append(_begin(at, call))  # awaited after all calls: a replay must wait for them itself
                kept.append(between(compiled, call))
            faults = [
                _difference("collectives beside the graph", call, _await(results), _begun_wanted(at, call))
                for call, results in enumerate(begun)
            ] + [
                _difference(f"the compiled graph on the schedule {schedule}", call, kept[call], wanted[call])
                for call in range(_CALLS)
            ]
    for group in dist.distributed_c10d._world.pg_map:  # a rank that left a collective out meets the others here
        dist.all_reduce(torch.ones(1, device="npu"), group=group)
    torch.get_device_module("npu").synchronize()
    report = last_report()
    faults += [f"{race.first.name} and {race.second.name} race" for race in races]
    undone = [record.name for record in report.passes if record.outcome == "rolled back"] if report else []
    return next(filter(None, faults), f"passes were undone: {', '.join(undone)}" if undone else "")


def _expected(
    program: RankProgram, xs: list[torch.Tensor], before: Eager, behind: Eager, seed: int
) -> list[tuple[torch.Tensor, ...]]:
    """What every rank gets, on the CPU."""
    results = program.expected(before.arithmetic(xs, seed))
    firsts = behind.arithmetic([result[0] for result in results], seed)
    return [(first, *result[1:]) for first, result in zip(firsts, results, strict=True)]


def _some_rank_has(faults: list[str]) -> bool:
    """Whether anything is wrong on any rank. Then all end here, else those without a fault would wait for the others."""
    count = torch.tensor([sum(map(bool, faults))], device="npu")
    dist.all_reduce(count)
    return bool(count.item())


def _begin(at: RankPlace, call: int) -> tuple[torch.Tensor, ...]:
    """Begin two collectives of the program's group in eager mode."""
    mine = torch.full((3,), at.rank + call, dtype=torch.int32, device="npu")
    return tuple(torch.ops._c10d_functional.all_reduce(mine, how, at.group) for how in ("sum", "max"))


def _await(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.ops._c10d_functional.wait_tensor(result) for result in results)


def _begun_wanted(at: RankPlace, call: int) -> tuple[torch.Tensor, ...]:
    values = torch.arange(at.ranks, dtype=torch.int32) + call
    return tuple(torch.full((3,), int(value), dtype=torch.int32) for value in (values.sum(), values.max()))


def _difference(what: str, call: int, found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> str:
    wrong = [n for n, (one, other) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(one.cpu(), other)]
    return f"{what}, call {call}: results {wrong} are not what arithmetic gives" if wrong else ""
