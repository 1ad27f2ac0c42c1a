"""Schedules over several ranks: the order of each rank's tasks is a function of the schedule, whenever the other ranks come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hccl_ranks import RANKS, on_emulated_ranks, with_all_interfaces

pytestmark = [on_emulated_ranks, with_all_interfaces]

_RACES = (
    RANKS
    + """
import random, time

class Racing:
    # Two streams and two communicators work on x and y without events. No step commutes with another one.
    def __init__(self, rank, ranks):
        self.rank, self.ranks, self.second = rank, ranks, dist.new_group(list(range(ranks)))
        self.x, self.y = (torch.ones(1, dtype=torch.int64, device="npu") for _ in range(2))
        self.side, self.graph = torch.npu.Stream(), torch.npu.NPUGraph()
        self.steps()
        torch.npu.synchronize()
        with torch.npu.graph(self.graph):
            self.x.mul_(5)
            dist.all_reduce(self.x)
            self.x.add_(1)
        self.pauses = random.Random(os.urandom(8))

    def steps(self):
        dist.all_reduce(self.x)
        dist.all_reduce(self.y, group=self.second)
        self.exchange(self.x, self.y)

    def exchange(self, given, taken):
        peer = self.rank ^ 1
        calls = [lambda: dist.isend(given, peer), lambda: dist.irecv(taken, peer)]
        for work in [call() for call in calls[:: 1 if self.rank < peer else -1]]:
            work.wait()

    def pause(self):
        time.sleep(self.pauses.random() * 0.002)

    def first(self, turn):
        self.x.mul_(3)
        self.pause()
        dist.all_reduce(self.x)
        self.x.bitwise_and_(0xFFF)

    def other(self, turn):
        with torch.npu.stream(self.side):
            self.y.add_(self.x)
            self.pause()
            dist.all_reduce(self.y, group=self.second)
            self.x.add_(self.y)

    def run(self):
        self.x.fill_(1)
        self.y.fill_(self.rank)
        torch.npu.synchronize()
        for turn in range(2):
            for part in (self.first, self.other)[:: 1 if (self.rank + turn) % 2 else -1]:  # ranks launch in crossing order
                part(turn)
            self.x.add_(turn + self.rank)
        self.graph.replay()
        with torch.npu.stream(self.side):
            self.exchange(self.y, self.x)
        self.pause()
        torch.npu.synchronize()
        return self.x.item(), self.y.item()

def raced(schedules, runs):
    def work(rank, ranks):
        program, found = Racing(rank, ranks), {}
        for schedule in schedules:
            found[schedule] = []
            for _ in range(runs):
                dist.barrier()  # no rank begins while another one has not ended
                torch.npu.synchronize()
                with npu_emulator.kernel_log() as log, npu_emulator.schedule(schedule):
                    value = program.run()
                found[schedule].append([value, [ran.name for ran in log]])
        return found
    return work
"""
)


@pytest.mark.parametrize(("ranks", "schedules", "runs"), [(2, 6, 5), (4, 2, 3)])
def test_a_schedule_gives_one_order_on_each_rank(
    ask: Callable[..., Any], ranks: int, schedules: int, runs: int
) -> None:
    """Two communicators in crossing order, side streams, messages and a replay race: other orders by schedule, not by run.

    A new program with one schedule repeats what that schedule did among others.
    """
    names = ["lazy", "pct:3:3", *(f"random:{seed}" for seed in range(schedules - 2))]
    code = f"answer = [over_ranks({ranks}, raced({names}, {runs})), over_ranks({ranks}, raced({names[-1:]}, 1))]"
    found, again = ask(f"{_RACES}\n{code}", NPU_EMULATOR_DEVICES=str(ranks))
    for rank in range(ranks):
        for name in names:
            first, *others = found[rank][name]
            assert others == [first] * (runs - 1), (rank, name)
        assert again[rank][names[-1]] == found[rank][names[-1]][:1]
        assert len({str(found[rank][name][0][0]) for name in names}) > 1
