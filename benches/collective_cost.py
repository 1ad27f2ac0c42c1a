"""What an all-reduce between two emulated processes costs beside gloo's: `python benches/collective_cost.py` prints both.

Each size is measured with both in turn, in one run of two processes, and the least of several calls counts: on a busy machine a
call now and then waits for a processor. With the argument `progress` it makes eight ranks reduce on the machine's cores, and
prints the processor time that a rank takes while it waits.
"""

from __future__ import annotations

import json
import sys
import time

import npu_emulator
from npugraph_ex_conformance.forked import over_ranks

SIZES = tuple(4 << power for power in range(0, 25, 4))
"""Bytes: 4 to 64 MiB."""
BAR = 2.0
"""How many times gloo's time an all-reduce may take."""
WAITING_RANKS = 8


def times(rank: int, ranks: int) -> list[tuple[int, float, float]]:
    """For each size: bytes, and the least microseconds of HCCL's and of gloo's all-reduce."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    rows = []
    for size in SIZES:
        ours, theirs = torch.ones(size // 4, device="npu"), torch.ones(size // 4)

        def emulated(value: torch.Tensor = ours) -> None:
            dist.all_reduce(value)
            torch.npu.synchronize()

        def plain(value: torch.Tensor = theirs) -> None:
            dist.all_reduce(value, group=gloo)

        least = {emulated: float("inf"), plain: float("inf")}
        for _ in range(100 if size < 1 << 20 else 12):
            for call, so_far in list(least.items()):
                start = time.perf_counter()
                call()
                least[call] = min(so_far, time.perf_counter() - start)
        rows.append((size, 1e6 * least[emulated], 1e6 * least[plain]))
    return rows


def waiting(rank: int, ranks: int) -> float:
    """Processor seconds of a rank that waits a second for rank 0."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    value = torch.ones(1024, device="npu")
    for _ in range(20):
        dist.all_reduce(value)
    torch.npu.synchronize()
    before = time.process_time()
    if rank == 0:
        time.sleep(1)
    dist.all_reduce(value)
    torch.npu.synchronize()
    return time.process_time() - before


def main() -> None:
    """Measure, and print one JSON value."""
    npu_emulator.activate(quiet=True, devices=WAITING_RANKS)
    if sys.argv[1:] == ["progress"]:
        print(json.dumps(over_ranks(WAITING_RANKS, waiting)))
    else:
        print(json.dumps(over_ranks(2, times)[0]))


if __name__ == "__main__":
    main()
