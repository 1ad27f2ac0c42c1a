"""Groups of HCCL calls, and averages: what torch_npu does around a collective keeps its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hccl_ranks import RANKS, on_emulated_ranks, with_all_interfaces

pytestmark = on_emulated_ranks

_GROUPS = (
    RANKS
    + """
import torch_npu

def grouped(rank, ranks):
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
    found, peer = [], 1 - rank
    one, other = (torch.full((1000,), float(rank + turn), device="npu") for turn in (1, 5))
    sent, received = torch.full((1000,), float(rank), device="npu"), torch.empty(1000, device="npu")
    dist.all_reduce(torch.ones(1, device="npu"))                     # the communicators exist before the groups begin
    dist.send(sent, 1) if rank == 0 else dist.recv(received, 0)
    received.fill_(-1)
    with npu_emulator.detect_races() as races:
        backend._group_start()
        works = [dist.all_reduce(one, async_op=True), dist.all_reduce(other, async_op=True)]
        backend._group_end()
        works[0].wait()
        found.append((one * 2)[0].item())
        works[1].wait()
        found.append((other * 2)[0].item())
        backend._group_start()
        works = [dist.isend(sent, peer), dist.irecv(received, peer)]
        backend._group_end()
        works[1].wait()
        found.append((received + 10)[0].item())
        works[0].wait()
    found.append(len(races))
    with npu_emulator.detect_races() as races:
        backend._group_start()
        works = [dist.isend(sent, peer), dist.irecv(received, peer)]
        received.mul_(2)                                             # beside the receive, which has no wait
    found.append(len(races))
    backend._group_end()
    for work in works:
        work.wait()
    averages = []
    for dtype in (torch.int32, torch.uint8, torch.int64, torch.bfloat16):
        value = (torch.tensor([1, 4, 9]) + rank).to(dtype).npu()
        dist.all_reduce(value, dist.ReduceOp.AVG)
        averages.append(value.tolist())
    dist.distributed_c10d._get_default_group().bound_device_id = torch.device("npu", rank)  # as `device_id` does
    try:
        dist.split_group(split_ranks=[[0, 1]])
    except RuntimeError as error:
        averages.append(str(error))
    group = dist.new_group([0, 1])._get_backend(torch.device("npu"))
    averages.append(group.get_hccl_comm_name(rank, init_comm=False))
    for algorithm in ("level0:NA;level1:H-D_R", "allreduce=level0:NA;level1:ring/allgather=level0:NA", "ring"):
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_algo": algorithm}
        try:
            dist.all_reduce(torch.ones(1, device="npu"), group=dist.new_group([0, 1], pg_options=options))
        except RuntimeError as error:
            averages.append(algorithm in str(error) and "names no algorithm" in str(error))
    return [*found, averages]

answer = over_ranks(2, grouped)
"""
)


@with_all_interfaces
def test_a_wait_inside_a_group_of_calls_waits_for_its_collective(ask: Callable[..., Any]) -> None:
    """torch_npu records a collective's end before its group ends; the averages of integers are cut, as on a 910B.

    A bound device changes nothing: no group can be split, and a new one has no communicator before its first use.
    """
    averages: list[Any] = [[1, 4, 9], [1, 4, 9], [1, 4, 9], [1.5, 4.5, 9.5]]
    found = ask(_GROUPS, NPU_EMULATOR_DEVICES="2")
    for rank in range(2):
        *told, (*values, refusal, name, refused) = found[rank]
        assert [*told, values] == [6.0, 22.0, 11.0 - rank, 0, 1, averages]
        assert "does not support splitting" in refusal
        assert name == ""  # a bound device makes no communicator
        assert refused  # of the three names of algorithms, the one without a level
