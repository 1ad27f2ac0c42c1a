"""Random numbers: settled by the host at a launch, as on the device, so that no schedule changes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import npu_emulator
from npu_emulator import schedule

ORDERS = ["fifo", "lazy", "random:1", "random:2", "random:5", "pct:3:2"]
LIKE = torch.zeros(7)


def _eager(draws: int) -> list[list[float]]:
    """What so many draws give, one by one, on one stream."""
    like = LIKE.npu()
    return [torch.rand_like(like).cpu().tolist() for _ in range(draws)]


def _captured(draw: Callable[[torch.Tensor], torch.Tensor], draws: int) -> tuple[torch.npu.NPUGraph, torch.Tensor]:
    like, graph = LIKE.npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        found = torch.stack([draw(like) for _ in range(draws)])
    return graph, found


def _mixed() -> list[list[float]]:
    """Two replays of two draws each, on a stream, among eager draws on another that nothing orders with it."""
    like = LIKE.npu()
    graph, captured = _captured(torch.rand_like, 2)
    side = torch.npu.Stream()
    torch.npu.synchronize()
    torch.npu.manual_seed(11)
    eager, replayed = [], []
    for _ in range(3):
        eager.append(torch.rand_like(like))
        with torch.npu.stream(side):
            graph.replay()
            replayed.append(captured.clone())
    eager.append(torch.rand_like(like))
    torch.npu.synchronize()
    numbers = []
    for drawn, of_graph in zip(eager, [*replayed, torch.zeros(0, 7)], strict=True):
        numbers += [drawn.cpu().tolist(), *of_graph.cpu().tolist()]
    return numbers


@pytest.mark.parametrize("order", ORDERS)
def test_replays_and_eager_draws_give_the_seeded_eager_sequence(order: str) -> None:
    """Draws of replays take their place among eager ones by when the host launched them, whenever they run."""
    torch.npu.manual_seed(11)
    expected = _eager(10)
    assert len({tuple(row) for row in expected}) == 10
    with schedule(order):
        assert _mixed() == expected
        assert _mixed() == expected


@pytest.mark.parametrize("order", ["fifo", "lazy", "random:4"])
def test_a_seed_set_after_a_launch_does_not_change_it(order: str) -> None:
    """Work that is queued when the program seeds anew keeps the numbers of its launch."""
    graph, found = _captured(torch.rand_like, 1)
    torch.npu.manual_seed(3)
    expected = _eager(2)
    with schedule(order):
        torch.npu.manual_seed(3)
        graph.replay()
        first = found.clone()
        second = torch.rand_like(LIKE.npu())
        torch.npu.manual_seed(99)
        assert [first[0].cpu().tolist(), second.cpu().tolist()] == expected


@pytest.mark.parametrize("order", ["fifo", "random:6"])
def test_lanes_of_a_graph_draw_in_the_order_of_capture(order: str) -> None:
    """Two streams of one graph draw by capture order, although either may run first."""
    like, graph, side = LIKE.npu(), torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            first = torch.rand_like(like)
        second = torch.rand_like(like)
        torch.npu.current_stream().wait_stream(side)
    torch.npu.manual_seed(5)
    expected = _eager(4)
    torch.npu.manual_seed(5)
    found = []
    with schedule(order):
        for _ in range(2):
            graph.replay()
            torch.npu.synchronize()
            found += [first.cpu().tolist(), second.cpu().tolist()]
    assert found == expected


def test_a_graph_draws_from_each_of_its_generators() -> None:
    """A generator of the program's own, registered with the graph, advances beside the device's, each on its own."""
    own = torch.Generator(device="npu")
    like, graph = LIKE.npu(), torch.npu.NPUGraph()
    graph.register_generator_state(own)
    with torch.npu.graph(graph):
        of_device = torch.rand(7, device="npu")
        of_own = torch.rand(7, device="npu", generator=own)
    torch.npu.manual_seed(21)
    expected = _eager(2)
    torch.npu.manual_seed(21)
    own.manual_seed(21)
    with schedule("lazy"):
        for row in expected:
            graph.replay()
            assert of_device.cpu().tolist() == row
            assert of_own.cpu().tolist() == row
    assert own.get_offset() == torch.npu.default_generators[torch.npu.current_device()].get_offset() > 0
    assert not like.any()


def test_capture_draws_nothing_and_a_dead_graph_is_forgotten() -> None:
    """A capture does not advance the generator; what is kept for its replays goes with the graph."""
    launcher = npu_emulator.current().launcher
    launcher.sweep()
    kept = launcher.draws._graphs
    before = len(kept)
    torch.npu.manual_seed(8)
    expected = _eager(3)
    torch.npu.manual_seed(8)
    graph, found = _captured(torch.rand_like, 3)
    assert torch.npu.default_generators[torch.npu.current_device()].get_offset() == 0
    assert len(kept) == before + 1
    graph.replay()
    assert found.cpu().tolist() == expected
    del graph, found
    launcher.sweep()
    assert len(kept) == before
