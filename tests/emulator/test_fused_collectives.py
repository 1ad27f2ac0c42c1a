"""Operators that compute and communicate in one, over two emulated devices: eager, captured and replayed, wrong calls, races."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hccl_ranks import RANKS, on_emulated_ranks

pytestmark = on_emulated_ranks

_EXAMPLES = (
    RANKS
    + """
import inspect
from torch.utils import _pytree as pytree
from npugraph_ex.operators import OPERATORS, together
from npugraph_ex.versions import operator_schemas

def of_rank(example, record, rank, group):
    # The example's call as this rank makes it, with numbers of its own; what is zeros stays so.
    given = inspect.signature(record.formula).bind(*example.args, **example.kwargs).arguments
    if given.get("world_size", given.get("ep_world_size", 2)) != 2:
        return None
    given |= {name: group for name in ("hcom", "group", "group_ep") if name in given}
    given |= {"ep_rank_id": rank} if "ep_rank_id" in given else {}
    return {name: value + 1 if rank and getattr(value, "dtype", None) in (torch.float16, torch.float32) and value.any() else value
            for name, value in given.items()}

def same(found, wanted):
    found, wanted = (pytree.tree_leaves(side, is_leaf=lambda leaf: leaf is None) for side in (found, wanted))
    return len(found) == len(wanted) and all(
        one is other or (other is not None and one.dtype == other.dtype and torch.equal(one.cpu(), other))
        for one, other in zip(found, wanted)
    )

def name_of(group):
    # The group's name in HCCL, which connects its ranks.
    return group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())

def races(group, ordered):
    # Which kernels race with work on an argument of one on a side stream, and what ran there.
    x, w, side = torch.ones(4, 16, device="npu"), torch.ones(16, 8, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()
    with npu_emulator.detect_races() as races, npu_emulator.kernel_log() as log:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            out = torch.ops.npu.npu_mm_all_reduce_base(x, w, group)
        if ordered:
            torch.npu.current_stream().wait_stream(side)
        x.mul_(1)
        torch.npu.synchronize()
    out.record_stream(torch.npu.current_stream())
    return sorted({race.first.name for race in races}), [ran.name for ran in log if ran.name != "aten.mul_.Tensor"]

def work(rank, ranks):
    group, wrong, checked = name_of(dist.group.WORLD), [], 0
    for name, record in OPERATORS.items():
        if record.across_ranks is None or record.overload is None or name in operator_schemas.others():
            continue
        for number, example in enumerate(record.calls()):
            calls = [of_rank(example, record, other, group) for other in range(2)]
            if calls[0] is None:
                continue
            wanted = together(record.across_ranks, [((), call) for call in calls])[rank]
            given = pytree.tree_map_only(torch.Tensor, lambda value: value.npu(), dict(calls[rank]))
            if not same(record.overload(**given), wanted):
                wrong.append(f"{name} {number}: eager")
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                results = record.overload(**given)
            floats = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            tensors = [t for t in floats if t.itemsize > 1]
            for factor in (2, 0.5):
                for tensor in tensors:
                    tensor.mul_(factor)
                graph.replay()
                eager = pytree.tree_map_only(torch.Tensor, lambda value: value.cpu(), record.overload(**given))
                if not same(results, eager):
                    wrong.append(f"{name} {number}: replayed")
            if not same(results, wanted):
                wrong.append(f"{name} {number}: replayed with the first numbers")
            checks = ("test_schema", "test_faketensor")[len(floats) > len(tensors) :]  # torch compares no 8-bit floats
            outcome = torch.library.opcheck(record.overload, (), given, test_utils=checks, raise_exception=False)
            wrong += [f"{name} {number}: {check}: {said}" for check, said in outcome.items() if said != "SUCCESS"]
            checked += 1
    found = [races(group, ordered) for ordered in (False, True)]
    dist.destroy_process_group()
    return wrong, checked, *found

answer = over_ranks(2, work)
"""
)


def test_each_record_s_examples_over_two_ranks(ask: Callable[..., Any]) -> None:
    """Results are those of the formula on what both ranks have; replays follow their inputs; opcheck passes on both ranks.

    Work on an argument beside the operator is a race, behind it none. The log has the kernels and the exchange between.
    """
    ran = ["npu.npu_mm_all_reduce_base.default", "hccl.all_gather", "npu.npu_mm_all_reduce_base.default (results)"]
    for wrong, checked, beside, behind in ask(_EXAMPLES, NPU_EMULATOR_DEVICES="2", NPU_EMULATOR_SCHEDULE="random:5"):
        assert wrong == []
        assert checked >= 20
        assert beside == [[ran[2]], ran]
        assert behind == [[], ran]


_FAULTS = (
    RANKS
    + """
npu = torch.ops.npu

def name_of(group):
    return group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())

x, w, ids = torch.ones(4, 32).half(), torch.ones(32, 8).half(), torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]]).int()

def sizes(rank, group, name):
    npu.npu_mm_all_reduce_base(x.npu()[rank:], w.npu(), name)

def dtypes(rank, group, name):
    like = torch.half if rank else torch.bfloat16
    npu.npu_mm_all_reduce_base(x.npu().to(like), w.npu().to(like), name)

def unfused(rank, group, name):
    if rank:
        npu.npu_mm_all_reduce_base(x.npu(), w.npu(), name)
    else:
        dist.all_reduce(x.npu() @ w.npu(), group=group)

def experts(rank, group, name):
    npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), name, 2, rank, 4 + 4 * rank)

def counts(rank, group, name):
    npu.npu_alltoallv_gmm(x.npu(), w.npu().unsqueeze(0), name, 2, [1, 3], [2, 2] if rank else [1, 3])

def nobody(rank, group, name):
    npu.npu_mm_all_reduce_base(x.npu(), w.npu(), "nobody")

def size(rank, group, name):
    npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), name, 4, rank, 4)

def place(rank, group, name):
    npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), name, 2, 1 - rank, 4)

def captured(rank, group, name):
    graph, fused = torch.npu.NPUGraph(), (x.npu(), w.npu())
    with torch.npu.graph(graph):
        npu.npu_mm_all_reduce_base(*fused, name)
        if rank:
            npu.npu_mm_all_reduce_base(*fused, name)
    graph.replay()
    npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), name, 2, rank, 4)

def choice(rank, group, name):
    npu.npu_moe_distribute_dispatch_v2(x.npu(), (ids + 3).npu(), name, 2, rank, 4)

faults = (sizes, dtypes, unfused, experts, counts, nobody, size, place, captured, choice)

def said(rank, ranks):
    found = {}
    for fault in faults:
        group = dist.new_group([0, 1])
        name = name_of(group)
        found[fault.__name__] = ""
        try:
            fault(rank, group, name)
            torch.npu.synchronize()
        except RuntimeError as error:
            found[fault.__name__] = str(error)
    return found

answer = over_ranks(2, said)
"""
)


@pytest.mark.slow
def test_wrong_calls_are_named_at_once(ask: Callable[..., Any]) -> None:
    """Ranks that differ show every rank's call; a group that is not as the arguments say is refused before the launch."""
    for rank, said in enumerate(ask(_FAULTS, NPU_EMULATOR_DEVICES="2", HCCL_ASYNC_ERROR_HANDLING="0")):
        assert "rank 0: npu_mm_all_reduce_base of float16[4, 8] number 1 at " in said["sizes"]
        assert "rank 1: npu_mm_all_reduce_base of float16[3, 8] number 1 at " in said["sizes"]
        assert "rank 0: npu_mm_all_reduce_base of bfloat16[4, 8]" in said["dtypes"]
        assert "rank 0: all_reduce number 1 of 64 bytes of float16 (sum) at " in said["unfused"]
        assert "rank 1: npu_mm_all_reduce_base of float16[4, 8] number 1 at " in said["unfused"]
        assert (
            "rank 1: npu_moe_distribute_dispatch_v2 of float16[4, 32], int32[4, 2] (moe_expert_num 8, "
            in said["experts"]
        )
        assert (
            "npu_alltoallv_gmm of rows float16[32] number 1 of 64+192 bytes of int8, taking 128 at " in said["counts"]
        )
        assert f"no group of npu:{rank} has the name 'nobody'" in said["nobody"]
        assert "error code is 561002" in said["nobody"]
        assert "the arguments say a group of 4 ranks, and this is a group of 2 ranks" in said["size"]
        assert f"say rank {1 - rank} of the group, and this is rank {rank} of the group" in said["place"]
        assert "rank 0: npu_moe_distribute_dispatch_v2 of float16[4, 32]" in said["captured"]
        assert "rank 1: npu_mm_all_reduce_base of float16[4, 8] number 2 at " in said["captured"]
        assert "expert_ids should be from 0 to 3; it is 'from 3 to 4'" in said["choice"]
