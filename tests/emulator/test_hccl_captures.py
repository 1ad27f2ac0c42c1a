"""Collectives within a capture: a chain of all of them on a side stream, and what a capture refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hccl_ranks import RANKS, on_emulated_ranks, with_all_interfaces

pytestmark = [on_emulated_ranks, with_all_interfaces]

_CAPTURES = (
    RANKS
    + """
def chained(x, rank, ranks):                 # on the CPU: x has the values of all ranks, one a row
    gathered = x.flatten().repeat(ranks, 1)
    summed = gathered.sum(0).view(ranks, -1)
    scattered = (summed[1] + torch.arange(ranks)[:, None] * 10 + 1).view(ranks, -1)  # rank 1 scatters
    passed = scattered.roll(1, 0)
    turned = passed.view(ranks, ranks, -1).transpose(0, 1).reshape(ranks, -1)
    return turned[rank] + turned[0]

def chain(x, rank, ranks):
    gathered = x.new_empty(ranks * len(x))
    dist.all_gather_into_tensor(gathered, x)
    summed = torch.empty_like(x)
    dist.reduce_scatter_tensor(summed, gathered)
    dist.broadcast(summed, 1)
    scattered = torch.empty_like(x)
    dist.scatter(scattered, [summed + 10 * to + 1 for to in range(ranks)] if rank == 1 else None, 1)
    passed = torch.empty_like(x)
    messages = [dist.P2POp(dist.isend, scattered, (rank + 1) % ranks), dist.P2POp(dist.irecv, passed, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    turned = torch.empty_like(x)
    dist.all_to_all_single(turned, passed)
    first = turned.clone()
    dist.broadcast(first, 0)
    return turned + first

def captures(rank, ranks):
    found, side = {}, torch.npu.Stream()
    x = torch.zeros(ranks * 2, device="npu")
    chain(x, rank, ranks)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = x * 2
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            result = chain(doubled, rank, ranks)
        torch.npu.current_stream().wait_stream(side)
        result = result + 1
    for turn in range(3):
        given = torch.arange(ranks * ranks * 2.0).view(ranks, -1) * (turn + 1) + turn
        x.copy_(given[rank])
        graph.replay()
        found[f"replay {turn}"] = torch.equal(result.cpu(), chained(given * 2, rank, ranks) + 1)

    def refused(work):
        try:
            with torch.npu.graph(torch.npu.NPUGraph()):
                kept = work()
        except RuntimeError as error:
            return str(error)
        finally:
            torch.npu.synchronize()
    found["no wait"] = refused(lambda: dist.all_reduce(x * 2, async_op=True))
    found["objects"] = refused(lambda: dist.all_gather_object([None] * ranks, rank))
    found["item"] = refused(lambda: dist.all_reduce(x) or x.sum().item())
    found["barrier"] = refused(dist.barrier)
    dist.all_reduce(x)                       # the group still works
    torch.npu.synchronize()
    return found

answer = over_ranks(2, captures)
"""
)


def test_a_chain_of_collectives_is_captured_and_what_blocks_the_host_is_refused(ask: Callable[..., Any]) -> None:
    """Three replays with other numbers agree with arithmetic; each refusal has its code and cause."""
    for found in ask(_CAPTURES, NPU_EMULATOR_DEVICES="2"):
        assert {name: same for name, same in found.items() if name.startswith("replay")} == {
            f"replay {turn}": True for turn in range(3)
        }
        assert "107025" in found["no wait"]
        assert "was drawn into the capture and never joined" in found["no wait"]
        for name, cause in {
            "objects": "blocks the host",
            "item": "item() reads device memory from the host",
            "barrier": "waiting for the device",
        }.items():
            assert "107030" in found[name], name
            assert cause in found[name], name
