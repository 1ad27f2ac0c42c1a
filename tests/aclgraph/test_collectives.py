"""Collectives between two processes of this machine: captured, replayed, and equal to eager mode and to arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import npu_emulator
from npugraph_ex.versions import point_to_point

_TWO_RANKS = """
import tempfile
from datetime import timedelta
import npu_emulator
npu_emulator.activate(quiet=True)
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from npugraph_ex import scope
from npugraph_ex.report.graphs import graph_records
from npugraph_ex.versions import point_to_point
from npugraph_ex_conformance.forked import over_ranks

OPERATORS = torch.ops._c10d_functional
wait = OPERATORS.wait_tensor
MESSAGES = not point_to_point.DIFFERENCE.older

def given(rank, call):
    return torch.arange(4.0) * (rank + 1) + 10 * call

def whole(both, me):
    # What every process must get, from what all of them put in.
    x, total = both[me], both[0] + both[1]
    return [
        2 * total + 1, 2 * x + 1,
        torch.cat(both) * 2,
        total.chunk(2)[me], total / 2, torch.maximum(*both),
        torch.cat([both[0][2 * me : 2 * me + 2], both[1][2 * me : 2 * me + 2]]),
        both[1],
        total + 1, total * 3,
        *([both[1 - me] + 6, both[1 - me] * 8] if MESSAGES else []),
        total * 7,
    ]

def work(rank, ranks):
    world, name = dist.group.WORLD, dist.group.WORLD.group_name
    pair = dist.new_group([0, 1]).group_name

    def model(x):
        doubled = x * 2
        started = OPERATORS.all_reduce(doubled, "sum", name)
        beside = doubled + 1                     # what is still being read must not be overwritten
        summed = wait(started) + 1
        gathered = wait(OPERATORS.all_gather_into_tensor(x, 2, name)) * 2
        mine = wait(OPERATORS.reduce_scatter_tensor(x, "sum", 2, name))
        mean = wait(OPERATORS.all_reduce(x, "avg", name))
        largest = wait(OPERATORS.all_reduce(x, "max", pair))
        turned = wait(OPERATORS.all_to_all_single(x, [2, 2], [2, 2], name))
        given_by_one = wait(OPERATORS.broadcast(x, 1, name))
        several = OPERATORS.all_reduce_coalesced([x + 0.5, x * 3], "sum", name)
        first, second = [wait(part) for part in several]
        received = []
        if MESSAGES:
            several = OPERATORS.batch_p2p_ops(   # one receives before it sends, and both list in the same order
                ["irecv", "isend", "irecv", "isend"], 4 * [1 - rank], [1, 1, 2, 2],
                [torch.empty_like(x), x + 6, torch.empty_like(x), x * 8], name,
            )
            received = [wait(several[0]), wait(several[2])]
        with scope.npu_stream_switch("side"):
            elsewhere = OPERATORS.all_reduce(x * 7, "sum", name)
        OPERATORS.all_reduce(x, "sum", name)     # of no use here, and the others take part in it
        return (summed, beside, gathered, mine, mean, largest, turned, given_by_one, first, second,
                *received, wait(elsewhere))

    fast = torch.compile(model, backend="npugraph_ex", dynamic=False, fullgraph=True)
    kept = []
    with torch.no_grad():
        for call in range(3):
            x = given(rank, call).npu()
            eager = [value.cpu() for value in model(x)]
            kept.append((eager, fast(x), whole([given(0, call), given(1, call)], rank)))
    same = [
        [bool(torch.equal(a, b.cpu()) and torch.equal(a, c)) for a, b, c in zip(*call, strict=True)] for call in kept
    ]

    def in_place(x):                             # as users write it; the tracer makes functional calls of these
        x = x + 1
        dist.all_reduce(x)
        gathered = torch.empty(8, device=x.device)
        dist.all_gather_into_tensor(gathered, x)
        return x * 2, gathered

    fast = torch.compile(in_place, backend="npugraph_ex", dynamic=False, fullgraph=True)
    with torch.no_grad():
        for call in range(3):
            summed = given(0, call) + given(1, call) + 2
            have = fast(given(rank, call).npu())
            same.append([bool(torch.equal(have[0].cpu(), summed * 2) and torch.equal(have[1].cpu(), summed.repeat(2)))])

    def to_other(x):                             # what the other sends lies in the buffer, as in eager mode
        buffer = torch.zeros_like(x)
        if rank == 0:                            # a send ends when it is received, so one of the two receives first
            dist.isend(x + 1, 1)
        dist.irecv(buffer, 1 - rank).wait()
        if rank == 1:
            dist.isend(x + 1, 0).wait()
        return buffer * 2

    if MESSAGES:
        fast = torch.compile(to_other, backend="npugraph_ex", dynamic=False, fullgraph=True)
        with torch.no_grad(), torch._dynamo.config.patch(enable_p2p_compilation=True):
            for call in range(3):
                same.append([bool(torch.equal(fast(given(rank, call).npu()).cpu(), (given(1 - rank, call) + 1) * 2))])

    class Meet(torch.autograd.Function):
        forward = staticmethod(lambda ctx, y: y * 1)

        @staticmethod
        def backward(ctx, gradient):
            total = wait(OPERATORS.all_reduce(gradient, "sum", name))
            return total if rank == 1 else gradient

    def trained(x, weight):                      # most results are used on one rank only; the backward has a collective, too
        y = x * weight * weight
        total = wait(OPERATORS.all_reduce(y.detach(), "sum", name))
        several = OPERATORS.all_reduce_coalesced([y.detach(), x * 2], "sum", name)
        OPERATORS.all_reduce(weight.detach(), "sum", name)
        loss = Meet.apply(y) * (total if rank == 0 else 3)
        return loss.sum() if rank == 0 else loss.sum() + wait(several[0]).sum() + wait(several[1]).sum()

    fast = torch.compile(trained, backend="npugraph_ex", dynamic=False, fullgraph=True)
    for call in range(3):
        both = [given(0, call) + 1, given(1, call) + 1]   # the weight is one, so y is x
        total, mine = both[0] + both[1], both[rank]
        loss = (mine * total).sum() if rank == 0 else (mine * 3 + total * 3).sum()
        gradient = 2 * mine * (total if rank == 0 else total + 3)
        for run in (trained, fast):
            weight = torch.ones(4).npu().requires_grad_()
            had = run(mine.npu(), weight)
            had.backward()
            same.append([bool(had.item() == loss and torch.equal(weight.grad.cpu(), gradient))])

    dist.all_reduce(torch.ones(1).npu())         # a rank that left out a collective is met here
    torch.npu.synchronize()
    done = dist.FileStore(store + ".done", 2)    # who ends first takes the connections of the other with it
    done.set(str(rank), "")
    done.wait([str(1 - rank)], timedelta(minutes=15))
    return same, [record.fate for record in graph_records()]

store = tempfile.mktemp()
answer = over_ranks(2, work)

# Another backend's eager calls are torch's own, as before.
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("npu:fake", store=FakeStore(), rank=0, world_size=1)
answer.append(type(dist.all_reduce(torch.ones(2).npu(), async_op=True)).__name__)
"""


@pytest.mark.skipif(not npu_emulator.is_active(), reason="two emulated processes; real ones need two devices")
def test_two_processes(ask: Callable[..., Any]) -> None:
    """Each kind of collective, three calls: replays give what eager mode gives and what arithmetic says, on both sides.

    In training, collectives run once, in the forward or in the backward, whether a rank uses their results or not.

    The backend is HCCL, as on hardware. Another backend's eager calls are left alone.
    """
    *ranks, elsewhere = ask(_TWO_RANKS)
    assert elsewhere == "FakeWork"
    for same, fates in ranks:
        messages = not point_to_point.DIFFERENCE.older
        assert same == 3 * [(13 if messages else 11) * [True]] + (12 if messages else 9) * [[True]]
        assert fates == (4 if messages else 3) * ["captured"]
