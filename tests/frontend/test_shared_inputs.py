"""Inputs that share memory otherwise than in the compiled call: results, the caller's memory and views are those of eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_helpers import NPU, compiled

from npugraph_ex.errors import CaptureError
from npugraph_ex.inference import session

Inputs = tuple[torch.Tensor, ...]


def _write_one(x: torch.Tensor, y: torch.Tensor) -> Inputs:
    x.add_(1)
    return y * 2 + x, x


def _write_both(x: torch.Tensor, y: torch.Tensor) -> Inputs:
    x.mul_(2)
    y.add_(x.sum(0))
    return x.sum(0), y[1:]


def _write_the_second(x: torch.Tensor, y: torch.Tensor) -> Inputs:
    total = x.sum(0)
    y.add_(total)
    return x + total, y.t()


PLACES: dict[str, Callable[[torch.Tensor, int], Inputs]] = {
    "apart": lambda base, at: (_matrix(base, at), torch.arange(16.0, device=base.device).view(4, 4)),
    "same": lambda base, at: (_matrix(base, at), _matrix(base, at)),
    "overlap": lambda base, at: (_matrix(base, at), _matrix(base, at + 5)),
    "disjoint": lambda base, at: (_matrix(base, at), _matrix(base, at + 100)),
    "interleaved": lambda base, at: (_matrix(base, at, (8, 2)), _matrix(base, at + 1, (8, 2))),
}
CHANGES = (
    ("apart", 0, "same", 0),
    ("apart", 0, "overlap", 0),
    ("apart", 0, "interleaved", 0),
    ("same", 0, "same", 8),
    ("overlap", 0, "overlap", 8),
    ("interleaved", 0, "interleaved", 8),
    ("same", 0, "apart", 0),
    ("overlap", 0, "apart", 0),
    ("same", 8, "overlap", 8),
    ("same", 0, "disjoint", 0),
    ("disjoint", 0, "overlap", 0),
    ("disjoint", 8, "same", 8),
)


def _matrix(base: torch.Tensor, at: int, stride: tuple[int, int] = (4, 1)) -> torch.Tensor:
    return torch.as_strided(base, (4, 4), stride, at)


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch.compiler.reset()


def _check(function: Callable[..., Inputs], fast: Callable[..., Inputs], how: str, at: int, values: int = 0) -> None:
    """Call both on inputs of the same places; compare results, where they begin, and all of the caller's memory."""
    memory = torch.arange(float(values), values + 400.0)
    on_device = memory.to(NPU)
    expected = function(*PLACES[how](memory, at))
    results = fast(*PLACES[how](on_device, at))
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result.cpu(), right)
        assert (result.stride(), result.storage_offset()) == (right.stride(), right.storage_offset())
    assert torch.equal(on_device.cpu(), memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "dynamic", "force_eager"),
    [
        *((function, None, False) for function in (_write_one, _write_both, _write_the_second)),
        *((_write_both, dynamic, force_eager) for dynamic, force_eager in ((True, False), (None, True), (True, True))),
    ],
)
def test_other_places_than_compiled(function: Callable[..., Inputs], dynamic: bool | None, force_eager: bool) -> None:
    """Whatever the first call's inputs shared, the next ones may share more, less, or the same elsewhere; and back again."""
    changes = CHANGES[1::2] if dynamic else CHANGES  # a symbolic compilation takes four times as long
    for first, at, then, there in changes:
        torch.compiler.reset()
        fast = compiled(function, dynamic=dynamic, force_eager=force_eager)
        for call, place in enumerate([(first, at), (then, there), (first, at), (then, there)]):
            _check(function, fast, *place, values=call)


def _step(row: torch.Tensor, cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    row.copy_(new)
    return cache.sum(0)


@pytest.mark.parametrize("force_eager", [False, True])
@pytest.mark.parametrize("apart_first", [False, True])
def test_a_row_of_the_cache(force_eager: bool, apart_first: bool) -> None:
    """A loop that hands over a cache and a row of it writes that row, and sums what it wrote."""
    fast = compiled(_step, force_eager=force_eager)
    cache, on_device = torch.zeros(4, 8), torch.zeros(4, 8, device=NPU)
    if apart_first:
        fast(torch.zeros(8, device=NPU), on_device, torch.zeros(8, device=NPU))
    for position in range(4):
        new = torch.full((8,), position + 1.0)
        right, result = _step(cache[position], cache, new), fast(on_device[position], on_device, new.to(NPU))
        assert torch.equal(result.cpu(), right)
        assert torch.equal(on_device.cpu(), cache)


def test_another_storage() -> None:
    """Inputs that are one memory as before, but of a longer storage than the compiled one."""
    fast = compiled(_write_one)
    for length in (16, 400, 16):
        memory = torch.arange(float(length))
        on_device = memory.to(NPU)
        right, result = _write_one(*PLACES["same"](memory, 0)), fast(*PLACES["same"](on_device, 0))
        assert torch.equal(result[0].cpu(), right[0])
        assert torch.equal(on_device.cpu(), memory)


def test_a_buffer_assigned_into_a_written_input() -> None:
    """The input stays where it was; the model's buffer alone moves, to where the graph writes."""

    class Model(torch.nn.Module):
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(3, device=NPU))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.copy_(x.roll(1))
            return x + self.shift

    model, twin = Model(), Model()
    graph = compiled(model, input_inplace_pass=False)  # so that the write comes last
    memory, other = torch.arange(4.0, device=NPU), torch.arange(4.0, device=NPU)
    for call in range(6):
        if call == 3:
            model.shift, twin.shift = memory[1:], other[1:]
        assert graph(memory[:3]).tolist() == twin(other[:3]).tolist()
        assert memory.tolist() == other.tolist()


@pytest.mark.slow
def test_known_places_stay_compiled() -> None:
    """Calls that share memory as the compiled one did, or share none as it, are served by the compiled graph."""
    for how in PLACES:
        torch.compiler.reset()
        fast = compiled(_write_one, require_capture=True)
        for call in range(3):
            _check(_write_one, fast, how, 8, values=call)
    fast = compiled(_write_one, require_capture=True)
    for how, at in (("apart", 0), ("apart", 8), ("disjoint", 0), ("disjoint", 8)):
        _check(_write_one, fast, how, at)


def test_the_user_is_told() -> None:
    """Under `require_capture` such a call is an error that names the inputs, and nothing has been written."""
    fast = compiled(_write_one, require_capture=True)
    _check(_write_one, fast, "apart", 0)
    memory = torch.arange(400.0, device=NPU)
    with pytest.raises(CaptureError, match=r"(?i)L\['x'\], L\['y'\].*clone"):
        fast(*PLACES["overlap"](memory, 0))
    assert torch.equal(memory.cpu(), torch.arange(400.0))


@torch.enable_grad()
def test_training() -> None:
    """Where a gradient is wanted the same holds: the weight's gradient comes from what the overlapping input became."""

    def function(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return ((y * 2 + x) * weight).sum()

    fast = compiled(function)
    for how in ("apart", "overlap", "same", "apart"):
        memory = torch.arange(400.0)
        on_device = memory.to(NPU)
        weights = [torch.ones(4, 4, device=device, requires_grad=True) for device in ("cpu", NPU)]
        right = function(*PLACES[how](memory, 0), weights[0])
        result = fast(*PLACES[how](on_device, 0), weights[1])
        right.backward()
        result.backward()
        assert torch.equal(result.detach().cpu(), right.detach())
        assert weights[0].grad is not None
        assert weights[1].grad is not None
        assert torch.equal(weights[1].grad.cpu(), weights[0].grad)
        assert torch.equal(on_device.cpu(), memory)


def _add_to_all(x: torch.Tensor, y: torch.Tensor) -> Inputs:
    y.add_(1)
    return (x * 2 + y,)


def _with_many_rows(rows: int, **options: bool) -> Callable[..., Inputs]:
    """The function compiled for any number of rows; the second call, which made it so, had ``rows``."""
    fast = compiled(_add_to_all, dynamic=None, **options)
    for count in (3, rows):
        fast(torch.zeros(count, 4, device=NPU), torch.zeros(4, device=NPU))
    return fast


@pytest.mark.slow
def test_fewer_rows_end_earlier() -> None:
    """What lies right behind an input with fewer rows than the compiled one had is not a part of it."""
    fast = _with_many_rows(8, require_capture=True)  # which refuses a call that would run as traced
    memory = torch.arange(16.0, device=NPU)
    (result,) = fast(memory[:8].view(2, 4), memory[8:12])
    assert torch.equal(result.cpu(), torch.arange(8.0).view(2, 4) * 2 + torch.arange(9.0, 13.0))


@pytest.mark.slow
def test_more_rows_end_later() -> None:
    """A written input that lies in a row beyond those that the compiled call had is seen."""
    fast = _with_many_rows(2)
    memory = torch.arange(32.0)
    on_device = memory.to(NPU)
    (expected,), (result,) = (f(m.view(8, 4), m[28:]) for f, m in ((_add_to_all, memory), (fast, on_device)))
    assert torch.equal(result.cpu(), expected)
    assert torch.equal(on_device.cpu(), memory)


def _write_a_row(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[1].add_(x.sum(0))
    return x * 2 + cache.sum(0)


def _calls_in_a_cache(called: Callable[..., torch.Tensor], cache: torch.Tensor) -> list[torch.Tensor]:
    return [called(cache[:rows], cache).cpu() for rows in (4, 6, 3)] + [cache.cpu()]


@torch.inference_mode()
def test_inference_tensors_of_any_size_in_a_cache() -> None:
    """AOT fails on them where sizes are symbols; so they run as in eager mode, in a session too."""
    expected = _calls_in_a_cache(_write_a_row, torch.arange(32.0).view(8, 4))
    fast = compiled(_write_a_row, dynamic=True)
    at_once = _calls_in_a_cache(fast, torch.arange(32.0, device=NPU).view(8, 4))
    assert all(map(torch.equal, at_once, expected))
    apart = torch.zeros(8, 4, device=NPU)
    step = session(_write_a_row, (torch.zeros(4, 4, device=NPU), apart))
    step(torch.zeros(5, 4, device=NPU), apart)
    in_session = _calls_in_a_cache(step, torch.arange(32.0, device=NPU).view(8, 4))
    assert all(map(torch.equal, in_session, expected))
    with pytest.raises(Exception, match=r"share memory that the graph writes.*pass a clone"):
        _calls_in_a_cache(compiled(_write_a_row, dynamic=True, require_capture=True), torch.zeros(8, 4, device=NPU))
