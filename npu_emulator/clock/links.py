"""The modelled time of a collective: the links between devices, and the steps of the algorithm.

Inside a server every two devices have a link (HCCS); between servers each device has one port (RoCE). The rates are measured ones,
from the public benchmarks of HIXL on Atlas A2 (benchmarks/A2_benchmark_performance.md of https://gitcode.com/cann/hixl, 4 MB from
device to device): 19.3 GB/s over HCCS between two devices, 22.6 GB/s over RoCE. The time of a step, 10 us inside a server and
20 us between servers, is our assumption, because no public figure exists, and so are servers of eight devices: 0 to 7, 8 to 15.

HCCL's documents name the algorithms: inside a server a mesh, in which each device sends to all others at once; between servers
a ring, or halving and doubling (a tree), whichever suits the size. Here the faster one is taken. With `S` bytes and `n` ranks:

=============== =============================== ==========================================
step            ring                            tree (halving and doubling)
=============== =============================== ==========================================
reduce-scatter  (n - 1) (a + S / (n B))         log2(n) a + (n - 1) / n S / B
all-gather      (n - 1) (a + S / (n B))         log2(n) a + (n - 1) / n S / B
all-reduce      both                            both
broadcast       (n - 1) a + S / B, in pieces    log2(n) (a + S / B)
=============== =============================== ==========================================

and a mesh takes a + S / (n B) a step. The memory of a device is faster than its links and not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HCCS", "PER_SERVER", "ROCE", "Link", "collective_us"]


@dataclass(frozen=True)
class Link:
    """A kind of link.

    Attributes:
        name: for a person.
        rate: bytes a microsecond in one direction.
        step_us: microseconds that a step takes beside its bytes.
    """

    name: str
    rate: float
    step_us: float

    def ring_us(self, ranks: int, size: float) -> float:
        """A reduce-scatter or an all-gather of `size` bytes in all, in a ring."""
        return (ranks - 1) * (self.step_us + size / (ranks * self.rate))

    def tree_us(self, ranks: int, size: float) -> float:
        """The same by halving and doubling."""
        return math.ceil(math.log2(ranks)) * self.step_us + (ranks - 1) / ranks * size / self.rate

    def mesh_us(self, ranks: int, size: float) -> float:
        """The same where every two ranks have a link of their own."""
        return self.step_us + size / (ranks * self.rate)


HCCS = Link("HCCS", 19.3e3, 10.0)
ROCE = Link("RoCE", 22.6e3, 20.0)
PER_SERVER = 8
"""Devices of a server."""

_HALVES = {
    "all_reduce": 2,
    "reduce": 2,
    "broadcast": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "all_to_all": 1,
    "scatter": 1,
}
"""How many reduce-scatters and all-gathers a collective is made of."""


def collective_us(name: str, devices: Sequence[int], size: float) -> float:
    """Return the modelled microseconds of a collective from the arrival of its last rank.

    Where servers have unequal numbers of the devices, the slowest server counts: in its mesh, and at each of its ports.

    Args:
        name: as HCCL's collectives are named here: `all_reduce`, `send_receive`, ...
        devices: the device of each rank of the communicator. Numbers below `PER_SERVER` are of one server, and so on. If several
            ranks have one number, each of its own process's devices, the ranks count instead.
        size: bytes of the whole: a reduction's tensor, what all ranks gather or scatter together, a message.
    """
    if len(devices) < 2:
        return 0.0
    numbers = devices if len(set(devices)) == len(devices) else range(len(devices))
    inside = Counter(number // PER_SERVER for number in numbers).values()
    servers, fewest = len(inside), min(inside)
    if name == "barrier":
        size = 0.0
    if name == "send_receive":
        link = HCCS if servers == 1 else ROCE
        return link.step_us + size / link.rate
    within = max((HCCS.mesh_us(ranks, size) for ranks in inside if ranks > 1), default=0.0)
    between = min(ROCE.ring_us(servers, size / fewest), ROCE.tree_us(servers, size / fewest)) if servers > 1 else 0.0
    return _HALVES.get(name, 1) * (within + between)
