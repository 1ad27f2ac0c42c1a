"""What each option of capture, memory and results changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from option_effects import bump, chain, compiled, fresh, ones, shows, told

from npugraph_ex.errors import OptionValueError
from npugraph_ex.frontend.entry.explain import Watch


@shows("force_eager")
def test_force_eager() -> None:
    """Nothing is captured."""
    assert told(chain, *fresh(2)).captures
    entry = told(chain, *fresh(2), force_eager=True)
    assert (entry.graph.fate, entry.captures) == ("force_eager", ())


@shows("require_capture")
def test_require_capture() -> None:
    """A graph that cannot be captured runs all the same, or raises."""

    def function(x: torch.Tensor, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, host + 1

    entry = told(function, (ones(), torch.ones(3)))
    assert entry.graph.fate == "not capturable"
    with pytest.raises(Exception, match="require_capture is on"):
        compiled(function, require_capture=True)(ones(), torch.ones(3))


@shows("stable_inputs_in_place")
def test_stable_inputs_in_place() -> None:
    """An input that keeps its address gets a graph of its own that reads it there; off, there is only the first graph."""
    calls = fresh(1) * 10
    for stable in (True, False):
        captures = told(chain, *calls, stable_inputs_in_place=stable).captures
        assert any("at the same address" in capture.reason for capture in captures) == stable


def _segments(pool: tuple[int, int]) -> int:
    return sum(tuple(segment["segment_pool_id"]) == tuple(pool) for segment in torch.npu.memory_snapshot())


@shows("use_graph_pool")
def test_use_graph_pool() -> None:
    """The memory of what the capture computes on the way is in the caller's pool."""
    pool = torch.npu.graph_pool_handle()
    fast = compiled(lambda x: x.roll(1).roll(1), use_graph_pool=pool)
    fast(ones())
    assert _segments(pool) > 0


@shows("reuse_graph_pool_in_same_fx")
def test_reuse_graph_pool_in_same_fx() -> None:
    """Two captures share one pool by default, and with False each has its own."""
    shared = told(bump, *fresh(2), reuse_graph_pool_in_same_fx=True)
    apart = told(bump, *fresh(2), reuse_graph_pool_in_same_fx=False)
    assert len(shared.captures) == len(apart.captures) == 2
    with pytest.raises(OptionValueError, match="Leave one of them out"):
        compiled(bump, reuse_graph_pool_in_same_fx=False, use_graph_pool=(0, 1))


def test_pools_apart_hold_more_memory() -> None:
    """Each pool of its own reserves memory of its own while all captures live."""
    held = {}
    for reuse in (True, False):
        watch, fast = Watch(), compiled(bump, reuse_graph_pool_in_same_fx=reuse)
        inputs = [ones() for _ in range(4)]
        for x in inputs:
            fast(x)
        (entry,) = watch.explanation().graphs
        held[reuse] = entry.pool_bytes or 0
    assert held[False] == 2 * held[True] > 0


@shows("capture_limit")
def test_capture_limit() -> None:
    """A limit of one makes two addresses in turn capture at every call; the default keeps both."""
    counts = {}
    for limit in (64, 1):
        a, b = ones(), ones()
        watch, fast = Watch(), compiled(bump, capture_limit=limit)
        for x in (a, b, a, b):
            fast(x)
        counts[limit] = len(watch.explanation().graphs[0].captures)
    assert counts == {64: 2, 1: 4}


@shows("clone_input")
def test_clone_input() -> None:
    """Without copies the first caller's tensor is the buffer, so the second call's values appear in it."""
    for clone, seen in ((True, 1.0), (False, 5.0)):
        first, fast = ones(), compiled(chain, clone_input=clone)
        fast(first)
        fast(ones() * 5)
        assert first[0].item() == seen


@pytest.mark.slow
@shows("clone_output")
def test_clone_output() -> None:
    """True captures once however many results are held; False hands out memory that the next call overwrites."""
    held = {value: compiled(chain, clone_output=value) for value in (True, False)}
    copies = [held[True](ones() * factor) for factor in range(4)]
    assert [result[0].item() for result in copies] == [2.0, 4.0, 6.0, 8.0]
    assert len(told(chain, *fresh(4), clone_output=True).captures) == 1
    assert len(told(chain, *fresh(4)).captures) == 3
    lent = held[False](ones())
    held[False](ones() * 9)
    assert lent[0].item() == 20.0


@shows("poison_results")
def test_poison_results() -> None:
    """What clone_output=False gives up is spoilt at the next call instead of looking right by chance."""
    fast = compiled(chain, clone_output=False, poison_results=True)
    first = fast(ones())
    fast(ones())
    assert first.isnan().all().item()


@pytest.mark.slow
@shows("frozen_parameter")
def test_frozen_parameter() -> None:
    """A parameter's address is not compared: where it moves, nothing is captured anew, as it otherwise would be."""
    for frozen, captures in ((False, 2), (True, 1)):
        scale = torch.nn.Parameter(ones(), requires_grad=False)
        watch, fast = Watch(), compiled(lambda x, scale=scale: x * scale, frozen_parameter=frozen)
        fast(ones())
        scale.data = ones()
        fast(ones())
        (entry,) = watch.explanation().graphs
        assert len(entry.captures) == captures


@pytest.mark.slow
@shows("capture_error_mode")
def test_capture_error_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode reaches the device's capture."""
    begin, modes = torch.npu.NPUGraph.capture_begin, []

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        modes.append(kwargs["capture_error_mode"])
        begin(self, *args, **kwargs)

    monkeypatch.setattr(torch.npu.NPUGraph, "capture_begin", note)
    for mode in ("global", "thread_local", "relaxed"):
        told(chain, *fresh(1), capture_error_mode=mode)
    assert modes == ["global", "thread_local", "relaxed"]


@shows("force_recapture")
def test_force_recapture() -> None:
    """Each call captures anew, says so, and results of earlier calls stay as they were."""
    entry = told(chain, *fresh(4), force_recapture=True)
    assert [capture.reason for capture in entry.captures] == ["the first call"] + 3 * ["the option force_recapture"]


@pytest.mark.slow
def test_force_recapture_does_not_count_against_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    """A recapture of a known key is no new graph: nothing is dropped for it."""
    told(chain, *fresh(4), force_recapture=True, capture_limit=1)
    assert "capture_limit" not in caplog.text
