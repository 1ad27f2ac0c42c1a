"""Replays and memory: what a graph reads after its caller freed it, and what is its own."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from npu_emulator import check_memory, schedule
from npu_emulator.memory.report import FaultKind


def test_a_replay_over_freed_memory() -> None:
    """A graph whose input died is told apart from one whose input's memory went to somebody else."""
    with check_memory() as faults:
        x = torch.ones(1 << 16, device="npu")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = (x + 1) * 2
        graph.replay()
        torch.npu.synchronize()
        assert faults == []
        del x
        graph.replay()
        torch.npu.synchronize()
        assert [fault.kind for fault in faults] == [FaultKind.FREED]
        assert torch.isnan(y).all()
        other = torch.zeros(1 << 16, device="npu")
        graph.replay()
        torch.npu.synchronize()
        del other
    assert [fault.kind for fault in faults] == [FaultKind.FREED, FaultKind.REUSED]
    assert faults[0].operator == "aten.add.Tensor"
    assert all("test_replayed_memory.py" in line for line in (faults[0].allocated[0], faults[0].freed[0]))


def test_a_graphs_own_memory_is_no_fault() -> None:
    """Intermediate results, and outputs that the program dropped, belong to the graph; a replay may write them again."""
    with check_memory(stop_at_first=True):
        x = torch.ones(64, device="npu")
        first, second = torch.npu.NPUGraph(), torch.npu.NPUGraph()
        with torch.npu.graph(first):
            middle = (x + 1) * 3
        with torch.npu.graph(second, pool=first.pool()):
            result = middle - 1
        del middle
        for _ in range(2):
            first.replay()
            second.replay()
            assert result.sum().item() == 5 * 64


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("order", ["fifo", "lazy"])
def test_a_result_before_the_first_replay(order: str, *, poison: bool) -> None:
    """A capture runs nothing. The report says so; the first replay writes the result."""
    with schedule(order), check_memory(poison=poison) as faults:
        x = torch.ones(64, device="npu")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            middle = x + 1
            result = middle * 2
        early = result + 1
        assert early.isnan().all() or not poison
        assert [(fault.kind, fault.bytes) for fault in faults] == [(FaultKind.UNWRITTEN, 256)]
        assert "a capture runs nothing" in str(faults[0])
        graph.replay()
        assert (result + 1).eq(5).all()
    assert len(faults) == 1


def test_a_capture_keeps_what_another_graph_has_written() -> None:
    """Where a result lies in the memory of another graph's result, that one is still read through a weak reference."""
    with check_memory(stop_at_first=True):
        x = torch.ones(64, device="npu")
        first, second = torch.npu.NPUGraph(), torch.npu.NPUGraph()
        with torch.npu.graph(first):
            result = x + 1
        weak = torch_npu._C._weak_ref_tensor(result)
        del result
        first.replay()
        with torch.npu.graph(second, pool=first.pool()):
            other = x + 2
        assert other.data_ptr() == weak.data_ptr()
        assert (weak + 1).eq(3).all()
        second.replay()
        assert (other + 1).eq(4).all()


def test_a_capture_keeps_what_was_written_during_it() -> None:
    """Eager work that is launched during the capture may write what the capture has allocated."""
    with check_memory(stop_at_first=True):
        graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
        with torch.npu.graph(graph, capture_error_mode="relaxed"):
            buffer = torch.empty(64, device="npu")
            with torch.npu.stream(side):
                buffer.fill_(3.0)
            buffer.add(1)  # uses it
        assert (buffer + 1).eq(4).all()


def test_a_capture_keeps_what_queued_work_reads() -> None:
    """The memory of a graph that is gone may still be read by work that is queued."""
    with schedule("lazy"), check_memory(stop_at_first=True):
        x = torch.ones(64, device="npu")
        keeps, first, second = (torch.npu.NPUGraph() for _ in range(3))
        stream = torch.npu.Stream()
        with torch.npu.graph(keeps, stream=stream):
            kept = x + 1
        with torch.npu.graph(first, pool=keeps.pool(), stream=stream):
            result = x + 2
        place = result.data_ptr()
        first.replay()
        torch.npu.synchronize()
        copied = result + 1
        del result, first
        with torch.npu.stream(stream):
            second.capture_begin(pool=keeps.pool())
            other = x + 3
            second.capture_end()
        assert other.data_ptr() == place
        assert copied.eq(4).all()
        assert kept.data_ptr() != place


@pytest.mark.parametrize("order", ["fifo", "lazy", "random:3"])
def test_a_replay_spoils_only_what_its_kernels_use(order: str) -> None:
    """It leaves memory that its capture only allocated, and values that an earlier graph of the pool left for it."""
    with schedule(order), check_memory(stop_at_first=True):
        x = torch.ones(64, device="npu")
        first, second = torch.npu.NPUGraph(), torch.npu.NPUGraph()
        with torch.npu.graph(first):
            middle = x + 1
            unused = torch.empty(3000, device="npu")
        places = [middle.data_ptr(), unused.data_ptr()]
        del unused
        with torch.npu.graph(second, pool=first.pool()):
            result = torch.full((3000,), 7.0, device="npu")
            doubled = middle * 2
            del middle
            last = doubled + 1
        assert [last.data_ptr(), result.data_ptr()] == places
        for _ in range(2):
            first.replay()
            second.replay()
            first.replay()
            assert result.sum().item() == 7 * 3000
            second.replay()
            assert last.sum().item() == 5 * 64


def test_a_replay_over_the_memory_of_another_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a module says that it compares addresses, a whole tensor at the address is right, and a part of one is not."""
    monkeypatch.setitem(globals(), "__npu_emulator_compares_addresses__", True)
    # A pool of its own: which free block the shared one hands out depends on the tests before.
    with check_memory() as faults, torch.npu.use_mem_pool(torch.npu.MemPool()):
        x = torch.ones(96, 512, device="npu")[32:]  # begins inside its block
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x + 1
        place = x.data_ptr()
        del x
        again = torch.full((96, 512), 4.0, device="npu")
        assert again[32].data_ptr() == place
        graph.replay()
        assert y.sum().item() == 5 * 64 * 512
        assert faults == []
        del again
        short = torch.full((40, 512), 4.0, device="npu")
        assert short[32].data_ptr() == place
        graph.replay()
        torch.npu.synchronize()
    assert [fault.kind for fault in faults] == [FaultKind.REUSED]


def test_rows_of_padding_between_two_graphs() -> None:
    """Eager attention writes the rows of its tokens into what the graph before allocated; the graph after reads all rows."""
    with check_memory(stop_at_first=True):
        x, w = torch.ones(8, 4, device="npu"), torch.ones(4, 4, device="npu")
        before, after = torch.npu.NPUGraph(), torch.npu.NPUGraph()
        with torch.npu.graph(before):
            q, attended = x + 1, torch.empty(8, 4, device="npu")
        with torch.npu.graph(after, pool=before.pool()):
            projected = attended @ w
        for tokens in (5, 3):
            before.replay()
            attended[:tokens] = q[:tokens] * tokens
            after.replay()
            assert projected[:tokens].cpu().eq(8 * tokens).all()


def test_a_queued_replay_outlives_its_input() -> None:
    """Memory that is freed after the launch of a replay, and allocated again, gets its new values after the replay."""
    with schedule("lazy"), check_memory(stop_at_first=True):
        x = torch.ones(64, device="npu")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x + 1
        place = x.data_ptr()
        graph.replay()
        del x
        others = []  # earlier tests may have left other free blocks
        while place not in {other.data_ptr() for other in others}:
            others.append(torch.full((64,), 5.0, device="npu"))
            assert len(others) < 10_000
        assert y.sum().item() == 2 * 64
