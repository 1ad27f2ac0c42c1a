"""Dynamo's `aot_compile`, which vLLM uses: it lets AOT keep what a backend compiled, together with AOT's own wrapper."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd import autograd_cache

from npugraph_ex.errors import SavedGraphError
from npugraph_ex.report import captures
from npugraph_ex.report.graphs import graph_records
from npugraph_ex.versions import ahead_of_time
from tests.device_helpers import NPU

pytestmark = pytest.mark.skipif(ahead_of_time.DIFFERENCE.older, reason=ahead_of_time.DIFFERENCE.what)
Ahead = Callable[..., Any]


def ahead(function: Callable[..., Any], *example: Any, dynamic: bool = False, **options: object) -> Ahead:
    """Compile ahead of time, for such arguments."""
    torch.compiler.reset()
    return torch.compile(function, backend="npugraph_ex", fullgraph=True, dynamic=dynamic, options=options).aot_compile(
        (example, {})
    )


def reloaded(compiled: Ahead, folder: Path) -> Ahead:
    """Save and load, as a second process does."""
    path = str(folder / "compiled")
    compiled.save_compiled_function(path)
    return torch.compiler.load_compiled_function(io.BytesIO(Path(path).read_bytes()))


def layer(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Two operators, neither of which is fused."""
    return torch.relu(x @ weight) + 1


def store(cache: torch.Tensor, x: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes an input and returns a view of it, so that AOT's wrapper has work to do."""
    cache.index_copy_(0, slot, x)
    return cache[1:], cache.sum()


@pytest.mark.parametrize("loaded", [False, True], ids=["made", "loaded"])
def test_results_are_those_of_eager_mode_and_come_from_one_capture(loaded: bool, tmp_path: Path) -> None:
    """Weights may change in place between calls, and what was loaded is captured again."""
    weight, x = torch.randn(8, 8, device=NPU), torch.randn(4, 8, device=NPU)
    with torch.no_grad():
        compiled = ahead(layer, weight, x)
        compiled = reloaded(compiled, tmp_path) if loaded else compiled
        before = captures.captures_so_far()
        for _ in range(3):
            weight.add_(1)
            torch.testing.assert_close(compiled(weight, x).cpu(), layer(weight, x).cpu(), rtol=0, atol=0)
    assert captures.captures_so_far() - before == 1


@pytest.mark.parametrize("loaded", [False, True], ids=["made", "loaded"])
def test_a_written_input_and_a_view_of_it(loaded: bool, tmp_path: Path) -> None:
    """AOT's own wrapper is kept too."""
    cache, twin = torch.zeros(4, 2, device=NPU), torch.zeros(4, 2, device=NPU)
    with torch.no_grad():
        compiled = ahead(store, cache, torch.ones(1, 2, device=NPU), torch.tensor([0], device=NPU))
        compiled = reloaded(compiled, tmp_path) if loaded else compiled
        for step in range(3):
            x, slot = torch.full((1, 2), step + 1.0, device=NPU), torch.tensor([step], device=NPU)
            view, total = compiled(cache, x, slot)
            wanted, sum_wanted = store(twin, x, slot)
            assert view.data_ptr() == cache[1:].data_ptr()
            assert (view.tolist(), total.item()) == (wanted.tolist(), sum_wanted.item())


@pytest.mark.slow
def test_symbolic_sizes_stay_symbolic(tmp_path: Path) -> None:
    """One saved function serves several batch sizes."""
    weight = torch.randn(8, 8, device=NPU)
    with torch.no_grad():
        compiled = reloaded(ahead(layer, weight, torch.randn(4, 8, device=NPU), dynamic=True), tmp_path)
        for rows in (4, 7, 3):
            x = torch.randn(rows, 8, device=NPU)
            torch.testing.assert_close(compiled(weight, x).cpu(), layer(weight, x).cpu(), rtol=0, atol=0)


@pytest.mark.parametrize("loaded", [False, True], ids=["made", "loaded"])
def test_gradients(loaded: bool, tmp_path: Path) -> None:
    """Forward and backward are both kept."""
    weight = torch.randn(8, 8, device=NPU, requires_grad=True)
    x = torch.randn(4, 8, device=NPU)
    with torch.enable_grad():
        compiled = ahead(layer, weight, x)
        compiled = reloaded(compiled, tmp_path) if loaded else compiled
        (got,) = torch.autograd.grad(compiled(weight, x).sum(), weight)
        (wanted,) = torch.autograd.grad(layer(weight, x).sum(), weight)
    torch.testing.assert_close(got.cpu(), wanted.cpu())


def on_a_stream(x: torch.Tensor) -> torch.Tensor:
    """Work on a stream object of this process."""
    with torch.npu.stream(SIDE["stream"]):
        y = x + 1
    torch.npu.current_stream().wait_stream(SIDE["stream"])
    return y * 2


SIDE: dict[str, Any] = {}


def same_memory(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes one of two inputs."""
    x.add_(1)
    return x + y


def test_what_is_not_saved_runs_and_says_why(tmp_path: Path) -> None:
    """Inputs that share memory while one is written: nothing would notice that others share it otherwise."""
    memory = torch.zeros(8, device=NPU)
    with torch.no_grad():
        compiled = ahead(same_memory, memory[:4], memory[4:])
        assert compiled(memory[:4], memory[4:]).tolist() == [1] * 4
        with pytest.raises(SavedGraphError, match="share memory"):
            reloaded(compiled, tmp_path)


def made_by(options: dict[str, object]) -> str:
    """What became of the graph of one compilation; none at all where torch's cache gave one that was compiled before."""
    before = {record.number for record in graph_records()}
    x = torch.randn(8, 8, device=NPU)
    with torch.no_grad():
        ahead(layer, x, x, **options)
    return " ".join(record.fate for record in graph_records() if record.number not in before)


@pytest.mark.slow
def test_every_compilation_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own cache on disk gives no graph that was compiled with other options, or by another release of this library."""
    keys = autograd_cache.AOTAutogradCachePickler
    monkeypatch.setattr(
        keys, "get_hash", lambda _self, details: details.cache_key_tag
    )  # all else is equal in another process
    for options in ({}, {"force_eager": True}, {}):
        assert made_by(options) == ("force_eager" if options else "captured")


@pytest.mark.slow
def test_a_seeded_program_compiles_its_own_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a graph that torch cannot hash comes from Python's generator, which compiling leaves where it was."""

    def no_hash(_graph: object) -> None:
        raise RuntimeError("not hashed")

    monkeypatch.setattr(autograd_cache, "check_cacheable", no_hash)
    for options in ({}, {"force_eager": True}, {}):
        random.seed(5)
        state = random.getstate()
        assert made_by(options) == ("force_eager" if options else "captured")
        assert random.getstate() == state


def test_a_graph_that_has_no_text_runs(tmp_path: Path) -> None:
    """An option that writes files of this process; saving is refused."""
    x = torch.randn(8, 8, device=NPU)
    with torch.no_grad():
        compiled = ahead(layer, x, x, dump_tensor_data=True, data_dump_dir=str(tmp_path))
        assert torch.equal(compiled(x, x).cpu(), layer(x, x).cpu())
        with pytest.raises(SavedGraphError, match="dump_tensor_data"):
            reloaded(compiled, tmp_path)


@pytest.mark.slow
def test_streams_of_this_process_are_not_saved(tmp_path: Path) -> None:
    """The compiled function runs; saving it is refused in one sentence."""
    SIDE["stream"] = torch.npu.Stream()
    with torch.no_grad():
        compiled = ahead(on_a_stream, torch.ones(4, device=NPU))
        assert compiled(torch.ones(4, device=NPU)).tolist() == [4] * 4
        with pytest.raises(SavedGraphError, match=r"torch\.npu streams"):
            reloaded(compiled, tmp_path)
