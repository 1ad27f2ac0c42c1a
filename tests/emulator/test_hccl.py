"""HCCL between emulated processes: torch_npu's own process group, its collectives, models over several ranks, and faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hccl_ranks import RANKS, on_emulated_ranks, with_all_interfaces

pytestmark = on_emulated_ranks

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - no file of ours, where files with names would be

_COLLECTIVES = (
    RANKS
    + """
def own(rank, dtype, count):
    torch.manual_seed(rank)
    return torch.randint(1, 4, (count,)).to(dtype)

def wrong(rank, ranks):
    found = []
    def same(name, have, want):
        if not torch.equal(have.cpu(), want):
            found.append(f"{name}: {have.cpu()} instead of {want}")

    numbers = [torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
    reduced = {"sum": lambda x: x.sum(0), "product": lambda x: x.prod(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
    operations = dict(zip(reduced, [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN]))
    for dtype in numbers:
        for count in (0, 1, 5, 12):
            all_of_them = torch.stack([own(other, dtype, count * ranks) for other in range(ranks)])
            mine = all_of_them[rank].npu()
            for name, operation in operations.items():
                value = mine.clone()
                dist.all_reduce(value, operation)
                same(f"all_reduce {name} {dtype} {count}", value, reduced[name](all_of_them).to(dtype))
            value = mine.clone()
            dist.broadcast(value, ranks - 1)
            same(f"broadcast {dtype} {count}", value, all_of_them[-1])
            value = mine.clone()
            dist.reduce(value, 1)
            same(f"reduce {dtype} {count}", value, all_of_them.sum(0).to(dtype) if rank == 1 else value.cpu())
            flat = torch.empty(ranks * ranks * count, dtype=dtype, device="npu")
            dist.all_gather_into_tensor(flat, mine)
            same(f"all_gather_into_tensor {dtype} {count}", flat, all_of_them.flatten())
            parts = [torch.empty(ranks * count, dtype=dtype, device="npu") for _ in range(ranks)]
            dist.all_gather(parts, mine)
            same(f"all_gather {dtype} {count}", torch.stack(parts), all_of_them)
            part = torch.empty(count, dtype=dtype, device="npu")
            dist.reduce_scatter_tensor(part, mine)
            columns = all_of_them.view(ranks, ranks, count)
            same(f"reduce_scatter {dtype} {count}", part, columns[:, rank].sum(0).to(dtype))
            turned = torch.empty_like(mine)
            dist.all_to_all_single(turned, mine)
            same(f"all_to_all {dtype} {count}", turned, columns[:, rank].flatten())
            dist.scatter(part, list(mine.chunk(ranks)) if rank == 0 and count else [part] * ranks if rank == 0 else None, 0)
            if count:
                same(f"scatter {dtype} {count}", part, columns[0, rank])

    for dtype in numbers[3:]:                # rounded after each rank, 0 first
        floats = [torch.randn(1001, generator=torch.Generator().manual_seed(other)).to(dtype) for other in range(ranks)]
        value = floats[rank].npu()
        dist.all_reduce(value)
        same(f"sum in order {dtype}", value, sum(floats[1:], floats[0]))
    unequal = [torch.empty(1 + other, device="npu") for other in range(ranks)]
    dist.all_gather(unequal, torch.full((1 + rank,), float(rank), device="npu"))
    for other, part in enumerate(unequal):
        same("all_gather of unequal parts", part, torch.full((1 + other,), float(other)))
    sizes = [rank + other for other in range(ranks)]
    into = torch.empty(sum(sizes), device="npu")
    dist.all_to_all_single(into, torch.full((sum(sizes),), float(rank), device="npu"), sizes, sizes)
    same("all_to_all of unequal parts", into, torch.cat([torch.full((size,), float(other)) for other, size in enumerate(sizes)]))
    large = torch.full((2_500_001,), float(rank + 1), device="npu")  # several windows of the shared memory
    dist.all_reduce(large)
    same("large all_reduce", large, torch.full((2_500_001,), float(sum(range(ranks + 1)))))
    flags = [torch.empty(5, dtype=torch.bool, device="npu") for _ in range(ranks)]
    dist.all_gather(flags, torch.arange(5, device="npu") == rank)
    same("flags", torch.stack(flags), torch.eye(5)[:ranks].bool())
    gathered = [None] * ranks
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 100 * rank})
    if gathered != [{"rank": other, "text": "x" * 100 * other} for other in range(ranks)]:
        found.append(f"objects: {gathered}")
    halves = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for number, group in enumerate(halves):  # rank 1 belongs to both
        if rank in (number, number + 1):
            value = torch.full((3,), float(rank), device="npu")
            dist.all_reduce(value, group=group)
            same(f"group {number}", value, torch.full((3,), float(2 * number + 1)))
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    ring = torch.empty(100_000, device="npu")
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full_like(ring, rank), to), dist.P2POp(dist.irecv, ring, source)]
    ):
        work.wait()
    same("ring", ring, torch.full((100_000,), float(source)))
    dist.barrier()
    dist.destroy_process_group()
    return found

answer = over_ranks(3, wrong)
"""
)


@pytest.mark.parametrize("schedule", ["fifo", "random:4"])
def test_every_collective_is_what_arithmetic_says(ask: Callable[..., Any], schedule: str) -> None:
    """All collectives over three ranks, dtypes, operations, sizes from 0 to several windows; objects, groups, messages."""
    answers = ask(_COLLECTIVES, NPU_EMULATOR_DEVICES="3", NPU_EMULATOR_SCHEDULE=schedule)
    assert answers == [[], [], []]


_MODELS = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def made():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).npu()

def trained(model, given, steps=3):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        model(given).square().mean().backward()
        optimiser.step()

def far(one, other):
    return (one - other).abs().max().item()

def distances(rank, ranks):
    mesh, found = init_device_mesh("npu", (ranks,)), {}
    torch.manual_seed(1)
    given = torch.randn(4, 8).npu()
    mine = given.chunk(ranks)[rank]
    alone = made()
    trained(alone, given)
    expected = alone(given)

    replicated = torch.nn.parallel.DistributedDataParallel(made())
    trained(replicated, mine)
    found["DistributedDataParallel"] = far(replicated(given), expected)
    sharded = made()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    trained(sharded, mine)
    found["fully_shard"] = far(sharded(given), expected)

    compiled = {"DistributedDataParallel": torch.nn.parallel.DistributedDataParallel(made()), "fully_shard": made()}
    for layer in (compiled["fully_shard"][0], compiled["fully_shard"][2], compiled["fully_shard"]):
        fully_shard(layer, mesh=mesh)
    for name, model in compiled.items():
        fast = torch.compile(model, backend="npugraph_ex")
        trained(fast, mine)
        found[f"compiled {name}"] = far(fast(given), expected)

    expected = made()(given)
    parallel = parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found["tensor parallel"] = far(parallel(given), expected)
    rows = distribute_tensor(torch.arange(12.0).reshape(4, 3).npu(), mesh, [Shard(0)])
    product, whole = (rows @ rows.T).redistribute(mesh, [Shard(1)]), rows.full_tensor()
    found["DTensor"] = far(product.full_tensor(), whole @ whole.T)
    stage = PipelineStage(made()[:2] if rank == 0 else made()[2], rank, ranks, torch.device("npu", rank))
    given_here = [given] if rank == 0 else []
    last = ScheduleGPipe(stage, 2).step(*given_here)
    found["pipeline"] = far(last, expected) if rank == 1 else 0.0

    graph, moving = torch.npu.NPUGraph(), torch.zeros(4, device="npu")
    with torch.npu.graph(graph):
        doubled = moving * 2
        dist.all_reduce(doubled)
        result = doubled + 1
    for turn in range(3):
        moving.fill_(turn + rank)
        graph.replay()
        found[f"replay {turn}"] = far(result, torch.full((4,), 4.0 * turn + 3).npu())
    return found

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    found = distances(rank, dist.get_world_size())
    dist.destroy_process_group()
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.slow
def test_models_over_two_ranks_agree_with_one(tmp_path: Path) -> None:
    """Three training steps of DDP and FSDP2, tensor parallelism, DTensor, a pipeline, and a captured collective.

    The script knows nothing of the emulator; the command is that of the page.
    """
    script = tmp_path / "train.py"
    script.write_text(_MODELS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "npu_emulator", "--devices", "2", *launcher, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)):
        assert set(rank) >= {
            "compiled DistributedDataParallel",
            "compiled fully_shard",
            "tensor parallel",
            "DTensor",
            "pipeline",
            "replay 2",
        }
        assert {name: far for name, far in rank.items() if not far <= 1e-6} == {}


_FAULTS = (
    RANKS
    + """
def sizes(rank):
    dist.all_reduce(torch.ones(4 + rank, device="npu"))

def kinds(rank):
    value = torch.ones(4, device="npu")
    dist.all_reduce(value) if rank == 0 else dist.broadcast(value, 0)

def order(rank):                             # the two calls of rank 1 are the other way round
    value = torch.ones(4, device="npu")
    calls = [lambda: dist.all_reduce(value), lambda: dist.broadcast(value, 1)]
    for call in calls[:: 1 if rank == 0 else -1]:
        call()

def types(rank):                             # of equally many bytes
    dist.all_reduce(torch.ones(4 + 4 * rank, device="npu", dtype=torch.float16 if rank else torch.float32))

def operations(rank):
    dist.all_reduce(torch.ones(4, device="npu"), dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)

def roots(rank):
    dist.broadcast(torch.ones(4, device="npu"), rank)

def gathered(rank):
    part = torch.ones(2 + rank, device="npu")
    dist.all_gather_into_tensor(torch.empty(2 * len(part), device="npu"), part)

def turned(rank):
    dist.all_to_all_single(torch.empty(5, device="npu"), torch.ones(5, device="npu"), [2, 3], [2, 3])

def ended(rank):
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(4, device="npu"))

def late(rank):                              # rank 1 lives, and comes only after rank 0 has given up
    os.environ["HCCL_EXEC_TIMEOUT"] = "2"
    if rank == 1:
        import time
        while not os.path.exists(mark):
            time.sleep(0.05)
        return
    try:
        dist.all_reduce(torch.ones(4, device="npu"))
        torch.npu.synchronize()
    finally:
        open(mark, "w").close()

mark, launched = tempfile.mktemp(), tempfile.mktemp()

def messages(rank):
    value = torch.ones(3 + rank, device="npu")
    dist.send(value, 1) if rank == 0 else dist.recv(value, 0)

def typed(rank):                             # messages of equally many bytes
    value = torch.ones(4 + 4 * rank, device="npu", dtype=torch.float16 if rank else torch.float32)
    dist.send(value, 1) if rank == 0 else dist.recv(value, 0)

def unattended(rank, ranks):                 # rank 0 never asks its device again, so only torch_npu's watchdog can end it
    value = torch.ones(4, device="npu")
    dist.all_reduce(value)
    torch.npu.synchronize()
    import time
    if rank == 1:
        while not os.path.exists(launched):
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
    try:
        dist.all_reduce(value)
    except RuntimeError as error:
        return str(error)
    open(launched, "w").close()
    time.sleep(1000)
    return "the watchdog did nothing"

def said_by(fault):
    def work(rank, ranks):
        dist.all_reduce(torch.ones(2, device="npu"))
        torch.npu.synchronize()
        try:
            fault(rank)
            torch.npu.synchronize()
        except RuntimeError as error:
            return str(error)
        return ""
    return work

faults = (sizes, kinds, order, types, operations, roots, gathered, turned, ended, late, messages, typed)
answer = {fault.__name__: over_ranks(2, said_by(fault)) for fault in faults}
del os.environ["HCCL_ASYNC_ERROR_HANDLING"]
answer["unattended"] = over_ranks(2, unattended)
"""
)


@with_all_interfaces
def test_faults_are_named_at_once(ask: Callable[..., Any]) -> None:
    """Different collectives show every rank's, with its line; a rank that has ended is an error for those that wait for it.

    That rank is killed by SIGKILL, and nothing of it stays.
    """
    before = set(_SHARED_MEMORY.glob("*npu_emulator*"))
    said = ask(_FAULTS, NPU_EMULATOR_DEVICES="2", HCCL_ASYNC_ERROR_HANDLING="0")
    assert set(_SHARED_MEMORY.glob("*npu_emulator*")) <= before
    for rank in range(2):
        assert "rank 0: all_reduce number 2 of 16 bytes of float32 (sum) at " in said["sizes"][rank]
        assert "rank 1: all_reduce number 2 of 20 bytes of float32 (sum) at " in said["sizes"][rank]
        assert "rank 1: broadcast number 2 of 16 bytes of float32 with root 0" in said["kinds"][rank]
        for fault, calls in {
            "order": (
                "all_reduce number 2 of 16 bytes of float32 (sum)",
                "broadcast number 2 of 16 bytes of float32 with root 1",
            ),
            "types": (
                "all_reduce number 2 of 16 bytes of float32 (sum)",
                "all_reduce number 2 of 16 bytes of float16 (sum)",
            ),
        }.items():
            for other, call in enumerate(calls):
                place = rf" at \S+:\d+ in [^\n]*\b{fault}, from \S+:\d+ in work, [^\n]*, on stream \d+"
                assert re.search(f"^  rank {other}: {re.escape(call)}{place}", said[fault][rank], re.MULTILINE), said[
                    fault
                ]
        assert "rank 0: all_reduce number 2 of 16 bytes of float32 (maximum)" in said["operations"][rank]
        for other in range(2):
            assert (
                f"rank {other}: broadcast number 2 of 16 bytes of float32 with root {other} at " in said["roots"][rank]
            )
        assert "rank 1: all_gather number 2 of 12 bytes of float32 at " in said["gathered"][rank]
        assert "rank 0: all_to_all number 2 of 8+12 bytes of float32, taking 8+12 at " in said["turned"][rank]
    assert "rank 0 waits for rank 1" in said["ended"][0]
    assert "which has ended" in said["ended"][0]
    assert "507057" in said["ended"][0]
    assert said["ended"][1] is None
    assert "507048" in said["late"][0]
    assert "has waited 2 s for rank 1" in said["late"][0]
    place = r"\(\S+:\d+ in messages, [^\n]*, on stream [1-9]\d*\)"
    text = f"rank 0 of .* sends 12 bytes of float32 {place}, and rank 1 .*receives 16 bytes of float32 {place}"
    for answer in said["messages"]:
        assert re.search(text, answer), answer
    for answer in said["typed"]:
        assert re.search(r"sends 16 bytes of float32 .*, and rank 1 .*receives 16 bytes of float16 ", answer), answer
    assert said["unattended"] == [None, None]


_RACE = (
    RANKS
    + """
def races(rank, ranks):
    value = torch.ones(100, device="npu")
    dist.all_reduce(torch.ones(1, device="npu"))
    torch.npu.synchronize()
    with npu_emulator.detect_races() as early, npu_emulator.kernel_log("hccl.*") as log:
        started = dist.all_reduce(value, async_op=True)
        value.mul_(2)
        started.wait()
    with npu_emulator.detect_races() as late:
        started = dist.all_reduce(value, async_op=True)
        started.wait()
        value.mul_(2)
    dist.destroy_process_group()
    return [{race.first.name for race in early} == {"hccl.all_reduce"}, len(late), [run.written_bytes for run in log]]

answer = over_ranks(2, races)
"""
)


def test_the_race_detector_sees_a_collective(ask: Callable[..., Any]) -> None:
    """Work on its tensor before the wait is a race; after the wait it is none. The log has the collective."""
    assert ask(_RACE, NPU_EMULATOR_DEVICES="2") == 2 * [[True, 0, [400]]]
