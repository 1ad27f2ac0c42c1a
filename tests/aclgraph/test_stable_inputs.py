"""Inputs that keep their address are read there; whatever happens to them later, values are those of eager mode."""

from __future__ import annotations

import pytest
import torch
from device_helpers import compiled, random

import npu_emulator
from npugraph_ex.aclgraph.stable_inputs import MAX_CAPTURES, WATCHED_CALLS
from npugraph_ex.errors import CaptureError
from npugraph_ex.report.captures import capture_records, captures_so_far


def _launches(graph: object, *inputs: torch.Tensor) -> int:
    """What one call launches besides the replay: the copies of its inputs."""
    with npu_emulator.kernel_log() as log:
        graph(*inputs)  # type: ignore[operator]
        torch.npu.synchronize()
    return sum(ran.name in {"memcpy", "aten.copy_.default"} for ran in log)


def test_stable_inputs_cost_no_copy_and_new_contents_count() -> None:
    """After the watched calls nothing is copied, and each call sees what the tensors hold then."""
    graph = compiled(lambda x, y: (x * y).sum(0), dynamic=False)
    x, y, held = random(4, 4), random(4, 4), []
    for step in range(3 * WATCHED_CALLS):
        x.copy_(random(4, 4))
        y.add_(step)
        held.append((graph(x, y), (x * y).sum(0)))
    for got, expected in held:
        assert torch.equal(got.cpu(), expected.cpu())
    del got, expected, held
    assert _launches(graph, x, y) == 0


def test_without_the_option_inputs_are_copied_for_ever() -> None:
    """The option off: two copies a call, one capture."""
    graph = compiled(lambda x, y: x * y, dynamic=False, stable_inputs_in_place=False)
    x, y, mark = random(4), random(4), captures_so_far()
    for _ in range(3 * WATCHED_CALLS):
        graph(x, y)
    assert _launches(graph, x, y) == 2
    assert len(capture_records(after=mark)) == 1


def test_one_moving_input_is_copied_and_the_other_is_not() -> None:
    """Each input is judged by itself; the reason for the capture names the stable one."""
    graph = compiled(lambda table, index: table[index] * 2, dynamic=False)
    table, mark, alive = random(16, 4), captures_so_far(), []
    for step in range(2 * WATCHED_CALLS):
        index = torch.tensor([step % 16, 3]).to("npu")
        alive.append(index)  # so that no two have the same address
        assert torch.equal(graph(table, index).cpu(), (table[index] * 2).cpu())
    alive.append(torch.tensor([5, 6]).to("npu"))
    assert _launches(graph, table, alive[-1]) == 1
    assert "L['table']" in capture_records(after=mark)[-1].reason


@pytest.mark.parametrize("change", ["address", "strides of a direct caller"])
def test_an_input_that_moves_later_is_copied_again(change: str) -> None:
    """A tensor elsewhere, or laid out otherwise, is not read where the captured one was."""
    from npugraph_ex import compile_fx

    example = random(4, 4)
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (x * 3 + 1,), tracing_mode="fake")(example)
    graph = compile_fx(gm, [example])
    for _ in range(2 * WATCHED_CALLS):
        assert torch.equal(graph(example)[0].cpu(), example.cpu() * 3 + 1)
    other = random(4, 4) if change == "address" else example.t()
    assert torch.equal(graph(other)[0].cpu(), other.cpu() * 3 + 1)
    assert torch.equal(graph(example)[0].cpu(), example.cpu() * 3 + 1)


def test_an_input_in_the_memory_of_a_written_one_stays_copied() -> None:
    """What the graph writes must not change what it reads later in the call."""
    from npugraph_ex import compile_fx

    def program(x: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor]:
        torch.ops.aten.add_.Tensor(x, 1)
        return (window * 2,)

    base, other = random(8), random(4)
    gm = torch.fx.experimental.proxy_tensor.make_fx(program, tracing_mode="fake")(base, other)
    graph = compile_fx(gm, [base, other])
    window = base[2:6]
    for _ in range(3 * WATCHED_CALLS):
        before = window.cpu()
        result = graph(base, window)[0]
        assert torch.equal(result.cpu(), before * 2)


def test_a_result_fed_back_is_never_overwritten_while_read() -> None:
    """`x = f(x)` for many steps, all results kept for some of them, equals eager mode."""
    graph = compiled(lambda x: torch.sin(x) + x, dynamic=False)
    start = random(8)
    x, expected, kept = start, start.clone(), []
    for step in range(4 * WATCHED_CALLS):
        x, expected = graph(x), torch.sin(expected) + expected
        if step % 3 == 0:
            kept.append((x, expected))
    for got, wanted in [*kept, (x, expected)]:
        assert torch.equal(got.cpu(), wanted.cpu())


def test_captures_for_new_addresses_are_bounded() -> None:
    """Buffers that move every so often cost a few captures and no more."""
    graph = compiled(lambda x: x + 1, dynamic=False)
    mark, alive = captures_so_far(), []
    for _ in range(2 * MAX_CAPTURES):
        x = random(4)
        alive.append(x)
        for _ in range(WATCHED_CALLS + 1):
            assert torch.equal(graph(x).cpu(), x.cpu() + 1)
    assert len(capture_records(after=mark)) <= 1 + 2 * MAX_CAPTURES


def test_reading_in_place_takes_no_memory_beside_what_copied() -> None:
    """The capture that reads in place gets the memory of the one that copies: no call needs more than the first did."""
    graph = compiled(lambda x, y: ((x * y).relu() @ x).exp(), dynamic=False)
    x, y, peaks = random(128, 128), random(128, 128), []
    expected = ((x * y).relu() @ x).exp()
    mark = captures_so_far()
    for _ in range(2 * WATCHED_CALLS):
        torch.npu.synchronize()
        torch.npu.reset_peak_memory_stats()
        torch.testing.assert_close(graph(x, y), expected)
        peaks.append(torch.npu.max_memory_allocated())
    assert len(capture_records(after=mark)) == 2
    assert max(peaks[1:]) <= peaks[0]


def test_a_refused_capture_in_place_leaves_a_graph_that_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture that copied is given up by then; its pool still takes the next one, and results that are held stay."""
    graph = compiled(lambda x: (x + 1).relu(), dynamic=False, require_capture=True)
    x, held, pools, make_pool = random(4, 4), [], [], torch.npu.graph_pool_handle
    monkeypatch.setattr(torch.npu, "graph_pool_handle", lambda: pools.append(make_pool()) or pools[-1])
    expected = (x + 1).relu().cpu()
    held += [graph(x) for _ in range(WATCHED_CALLS - 1)]
    end = torch.npu.NPUGraph.capture_end

    def refuse(self: torch.npu.NPUGraph) -> None:
        end(self)
        raise RuntimeError("refused")

    monkeypatch.setattr(torch.npu.NPUGraph, "capture_end", refuse)
    with pytest.raises(CaptureError, match="refused"):
        graph(x)
    monkeypatch.setattr(torch.npu.NPUGraph, "capture_end", end)
    held += [graph(x) for _ in range(2 * WATCHED_CALLS)]
    for got in held:
        torch.testing.assert_close(got.cpu(), expected)
    assert len(pools) == 3  # one of the captures and two of their results
