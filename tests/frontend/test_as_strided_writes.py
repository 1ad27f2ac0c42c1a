"""Programs that write an input and reach its storage through `as_strided`: inputs at several places of their storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device_helpers import NPU, compiled

from npugraph_ex.errors import CaptureError, SavedGraphError
from npugraph_ex.inference import cache_compile
from npugraph_ex.versions import ahead_of_time


def _clear(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((2,), (1,), 0).zero_()
    return x + 1


def _count_and_scale(x: torch.Tensor) -> torch.Tensor:
    part = x.as_strided((2,), (1,), 4)
    part.add_(1)
    x.mul_(2)
    return part * 2


def _scale_and_count(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    x.as_strided((2,), (1,), 4).add_(1)
    return x + 1


def _between_the_elements(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((3,), (1,)).zero_()
    return x + 1


def _read_between_two_writes(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    read = x.as_strided((3,), (1,), 1) * 1
    x.add_(1)
    return read


def _view_and_write(x: torch.Tensor) -> torch.Tensor:
    part = x.as_strided((2,), (1,), 1)
    x[:1] = 1
    return part


PROGRAMS = (
    _view_and_write,
    _clear,
    _count_and_scale,
    _scale_and_count,
    _between_the_elements,
    _read_between_two_writes,
)
DENSE, GAPS = (6, 1), (12, 2)


def _check(
    program: Callable[..., torch.Tensor], fast: Callable[..., torch.Tensor], strides: tuple[int, int], offset: int
) -> None:
    """Call both on a part of a larger memory; compare the result and all of that memory."""
    memory = torch.arange(60.0)
    on_device = memory.to(NPU)
    expected = program(memory.as_strided((4, 6), strides, offset))
    found = fast(on_device.as_strided((4, 6), strides, offset))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(on_device.cpu(), memory)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"input_inplace_pass": False}, {"dynamic": True}], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_inputs_at_several_places(program: Callable[..., torch.Tensor], options: dict[str, bool]) -> None:
    """Wherever the first call's input begins in its storage, it and the next ones are written where eager mode writes."""
    for strides, offsets in ((DENSE, (0, 3, 0, 5)), (DENSE, (3, 3, 0)), (GAPS, (0, 3))):
        fast = compiled(program, **options)
        for offset in offsets:
            _check(program, fast, strides, offset)


@torch.no_grad()
def test_a_known_place_stays_compiled() -> None:
    """An input that begins where the compiled one did is served by the graph, elsewhere under `require_capture` it is an error."""
    fast = compiled(_clear, require_capture=True)
    for _ in range(3):
        _check(_clear, fast, DENSE, 0)
    with pytest.raises(CaptureError, match="at other offsets"):
        _check(_clear, fast, DENSE, 3)


@pytest.mark.skipif(ahead_of_time.DIFFERENCE.older, reason=ahead_of_time.DIFFERENCE.what)
@torch.no_grad()
def test_such_a_graph_is_not_saved(tmp_path: Path) -> None:
    """Nothing would check the place of the input in the other process."""
    torch.compiler.reset()
    example = torch.zeros(4, 6, device=NPU)
    fast = torch.compile(_clear, backend="npugraph_ex", fullgraph=True).aot_compile(((example,), {}))
    with pytest.raises(SavedGraphError, match="as_strided"):
        fast.save_compiled_function(str(tmp_path / "saved"))


@torch.no_grad()
def test_such_a_graph_is_not_cached(tmp_path: Path) -> None:
    """For the same reason; the second time, too, inputs at both places give eager's values."""
    for _ in range(2):
        torch.compiler.reset()
        kept = cache_compile(_clear, dynamic=False, cache_dir=tmp_path)
        for offset in (0, 3):
            _check(_clear, kept, DENSE, offset)


WITHIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all of it": lambda x: x.as_strided(x.shape, x.stride()),
    "as one row": lambda x: x.as_strided((x.numel(),), (1,)),
    "a column": lambda x: x.as_strided((x.shape[0],), (8,)),
    "a corner": lambda x: x.as_strided((2, 2), (8, 1)),
    "all but the first row": lambda x: x.as_strided((x.shape[0] - 1, 8), (8, 1), 8),
}


@pytest.mark.parametrize("part", WITHIN.values(), ids=WITHIN)
def test_a_write_inside_of_an_input_is_captured_for_any_size(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Where the sizes are symbols, too: for all values of them the part is one of the input."""

    def program(x: torch.Tensor) -> torch.Tensor:
        part(x).add_(1)
        return x * 2

    torch.compiler.reset()
    fast = torch.compile(program, backend="npugraph_ex", options={"require_capture": True})
    for rows in (4, 6, 9, 4):
        x = torch.arange(rows * 8.0).view(rows, 8)
        on_device = x.to(NPU)
        expected = program(x)
        assert torch.equal(fast(on_device).cpu(), expected)
        assert torch.equal(on_device.cpu(), x)
