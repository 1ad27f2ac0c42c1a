"""The states of random generators around and inside captures, as torch_npu documents them for graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from npu_emulator import schedule
from npugraph_ex.versions import captured_generators


def _generator() -> torch.Generator:
    return torch.npu.default_generators[torch.npu.current_device()]


def test_a_state_set_back_inside_a_capture_draws_the_same_again() -> None:
    """`set_rng_state` to what `get_rng_state` gave: the next captured draw repeats, and a replay advances by one draw."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        state = torch.npu.get_rng_state()
        first = torch.rand(5, device="npu")
        other = torch.rand(5, device="npu")
        torch.npu.set_rng_state(state)
        again = torch.rand(5, device="npu")
    torch.npu.manual_seed(4)
    eager = [torch.rand(5, device="npu").cpu().tolist() for _ in range(3)]
    torch.npu.manual_seed(4)
    for step in range(2):
        graph.replay()
        assert first.cpu().tolist() == again.cpu().tolist() == eager[step]
        assert other.cpu().tolist() == eager[step + 1]
    assert torch.rand(5, device="npu").cpu().tolist() == eager[2]


def test_a_state_set_after_the_last_draw_counts() -> None:
    """Where the graph's offset stands at the end of the capture is how far each replay advances the generator."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        start = torch.npu.get_rng_state()
        drawn = torch.rand(3, device="npu")
        torch.npu.set_rng_state(start)
    torch.npu.manual_seed(6)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(drawn.cpu().tolist())
    assert found[0] == found[1] == torch.rand(3, device="npu").cpu().tolist()


def _noisy(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(torch.randn(3, device="npu") * scale)


def _two_checkpoints(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the gradient of two checkpointed blocks that draw."""
    y = checkpoint(_noisy, x, scale, use_reentrant=False, preserve_rng_state=True)
    y = checkpoint(_noisy, y, scale, use_reentrant=False, preserve_rng_state=True)
    return torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("order", ["fifo", "lazy", "random:2"])
def test_checkpointing_in_a_capture_recomputes_with_the_same_numbers(order: str) -> None:
    """The recomputation in the captured backward draws what the forward drew; numbers after a replay are eager's."""
    x, scale = torch.ones(3, device="npu", requires_grad=True), torch.ones(3, device="npu")
    torch.npu.manual_seed(42)
    expected = [_two_checkpoints(x, scale).cpu().tolist() for _ in range(2)]
    after = torch.rand(3, device="npu").cpu().tolist()
    graph = torch.npu.NPUGraph()
    with schedule(order):
        with torch.npu.graph(graph):
            gradient = _two_checkpoints(x, scale)
        torch.npu.manual_seed(42)
        for row in expected:
            graph.replay()
            assert gradient.cpu().tolist() == row
        assert torch.rand(3, device="npu").cpu().tolist() == after


def test_a_capture_refuses_another_seed_and_the_offset() -> None:
    """torch_npu lets a capture set a state of the same seed only, and reads no offset there; afterwards both work."""
    torch.npu.manual_seed(1)
    other = torch.npu.get_rng_state()
    torch.npu.manual_seed(0)
    refused: list[Callable[[], object]] = [
        lambda: torch.npu.set_rng_state(other),
        lambda: torch.npu.manual_seed(1),
        _generator().get_offset,
        lambda: _generator().set_offset(4),
        _generator().seed,
    ]
    with torch.npu.graph(torch.npu.NPUGraph()):
        for action in refused:
            with pytest.raises(RuntimeError, match="captur"):
                action()
        torch.npu.manual_seed(0)
    torch.npu.set_rng_state(other)
    assert _generator().initial_seed() == 1
    assert _generator().get_offset() == 0


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
@pytest.mark.parametrize("registered", [False, True])
def test_a_generator_of_the_program_s_own_needs_no_registering(*, registered: bool) -> None:
    """`register_generator_state` has become optional: a captured draw registers its generator, in inference mode too."""
    own, graph = torch.Generator(device="npu"), torch.npu.NPUGraph()
    if registered:
        with torch.inference_mode():
            graph.register_generator_state(own)
    with torch.npu.graph(graph):
        drawn = torch.rand(6, device="npu", generator=own)
    own.manual_seed(9)
    expected = [torch.rand(6, device="npu", generator=own).cpu().tolist() for _ in range(2)]
    end = own.get_offset()
    own.manual_seed(9)
    before = _generator().get_offset()
    for row in expected:
        graph.replay()
        assert drawn.cpu().tolist() == row
    assert own.get_offset() == end > 0
    assert _generator().get_offset() == before


def test_a_refused_read_in_a_capture_leaves_the_generator_usable() -> None:
    """After a capture in which something was refused, eager draws and a new capture draw as ever."""
    stream, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    x = torch.ones(1, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        graph.capture_begin()
        torch.rand(2, device="npu")
        with pytest.raises(RuntimeError, match="107030"):
            (x + 1).item()
        graph.capture_end()
    torch.npu.manual_seed(2)
    expected = [torch.rand(2, device="npu").cpu().tolist() for _ in range(2)]
    torch.npu.manual_seed(2)
    second = torch.npu.NPUGraph()
    with torch.npu.graph(second):
        drawn = torch.rand(2, device="npu")
    for row in expected:
        second.replay()
        assert drawn.cpu().tolist() == row


@pytest.mark.parametrize("order", ["fifo", "lazy", "random:1", "random:7"])
def test_replays_on_two_streams_draw_by_the_order_of_their_launch(order: str) -> None:
    """Two graphs replayed on streams that nothing orders get the numbers of two eager draws, whichever runs first."""
    graphs, drawn = [torch.npu.NPUGraph(), torch.npu.NPUGraph()], []
    for graph in graphs:
        with torch.npu.graph(graph):
            drawn.append(torch.randn(8, device="npu"))
    torch.npu.manual_seed(12)
    expected = [torch.randn(8, device="npu").cpu().tolist() for _ in range(2)]
    torch.npu.manual_seed(12)
    torch.npu.synchronize()
    with schedule(order):
        for graph in graphs:
            with torch.npu.stream(torch.npu.Stream()):
                graph.replay()
        torch.npu.synchronize()
        assert [numbers.cpu().tolist() for numbers in drawn] == expected
