"""Replay where inputs and results share memory: views, other dtypes, lazy conjugates, writes, whatever aliases in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_helpers import check, compiled, random
from torch.fx.experimental.proxy_tensor import make_fx

import npugraph_ex


def test_outputs_that_share_memory() -> None:
    """Results that are views of one another in eager mode are so after replay, copied or lent."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = x * 2
        return whole, whole[1:], whole.t()

    for options in ({}, {"clone_output": True}):
        graph = check(function, [(random(4, 6),) for _ in range(4)], **options)
        whole, part, turned = graph(random(4, 6))
        whole.fill_(7)
        assert part.cpu().eq(7).all()
        assert turned.cpu().eq(7).all()


def test_output_that_is_an_input_or_a_view_of_one() -> None:
    """An output that aliases an input aliases this call's input, and no other caller's tensor changes."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, y.t(), x[1:] + y[1:]

    graph = check(function, [(random(4, 4), random(4, 4)) for _ in range(4)])
    x, y = random(4, 4), random(4, 4)
    same, turned, _ = graph(x, y)
    x.fill_(3)
    y.fill_(5)
    assert same.cpu().eq(3).all()
    assert turned.cpu().eq(5).all()


def test_mutated_inputs() -> None:
    """Inputs that the model writes change in place, also when their address changes between calls."""

    def function(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(x)
        state[0] = 1
        return state.sum(0)

    graph = check(function, [(random(4, 4), random(4, 4)) for _ in range(5)])
    state = random(4, 4)
    expected = state.clone()
    for _ in range(4):
        x = random(4, 4)
        torch.testing.assert_close(graph(state, x), function(expected, x), rtol=0, atol=0)
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


def test_swap_and_shift_of_inputs() -> None:
    """Writes that depend on one another's old values come out in the program's order."""

    def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old_x, old_y = x.clone(), y.clone()
        y.copy_(old_x)
        x.copy_(old_y)
        return x + 1

    def shift(previous: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        previous.copy_(current)
        current.copy_(current + 1)
        return previous * 2

    for function in (swap, shift):
        check(function, [(random(8), random(8)) for _ in range(4)])


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y[1:].copy_(y[:-1].clone()),
        lambda y: y[:-2].copy_(y[2:].clone()),
        lambda y: y.diagonal().copy_(y[0].clone()),
        lambda y: (y[0].copy_(y[1].clone()), y[1:3].copy_(y[0:2].clone())),
    ],
)
def test_a_part_overwritten_with_an_overlapping_one(write: Callable[[torch.Tensor], object]) -> None:
    """A shift by way of a clone, of an intermediate value and of an input: no copy reads what it overwrites."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        write(y)
        write(x)
        return y, x + 1

    check(function, [(random(4, 4),) for _ in range(3)])


def test_aliased_inputs_one_of_them_written() -> None:
    """Two arguments that are views of one tensor keep being so while one is written."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    graph = compiled(function)
    for _ in range(4):
        base = random(8)
        expected = base.cpu()
        result = graph(base[:6], base[2:])
        expected[:6] += 1
        torch.testing.assert_close(base.cpu(), expected)
        torch.testing.assert_close(result.cpu(), expected[2:] * 2)


def test_view_of_one_of_two_aliased_inputs() -> None:
    """A returned view of an argument that shares memory with a written one has the right elements (torch alone fails)."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(2)
        return y[::2]

    graph = compiled(function)
    for _ in range(3):
        base = random(4, 4)
        twin = base.clone()
        torch.testing.assert_close(graph(base, base[1:]), function(twin, twin[1:]), rtol=0, atol=0)
        torch.testing.assert_close(base, twin, rtol=0, atol=0)


def test_outputs_that_view_an_input_as_another_dtype() -> None:
    """A reinterpreting view of an input comes back with the right dtype and memory."""
    graph = check(lambda x: (x.view(torch.int16), x + 1), [(random(4, 4),) for _ in range(3)])
    x = random(4, 4)
    bits, _ = graph(x)
    x.zero_()
    assert not bits.any().item()


@pytest.mark.parametrize("options", [{}, {"clone_output": True}], ids=["lent", "copied"])
@pytest.mark.parametrize(
    "views",
    [
        lambda y: (y, y.conj()),
        lambda y: (y.conj(), y),
        lambda y: (y, torch.view_as_real(y)),
        lambda y: (torch.view_as_real(y), y),
        lambda y: (y.real, y.imag, y.conj().imag),
        lambda y: (y.conj().imag, y[1:]),
    ],
)
def test_outputs_that_read_one_memory_in_several_ways(
    views: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], options: dict[str, bool]
) -> None:
    """As complex or real numbers, conjugated, negated: each result keeps its way of reading, also where it is a copy."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return views(x * 2)

    graph, kept = compiled(function, **options), []
    with torch.no_grad():
        for _ in range(4):
            x = random(4, dtype=torch.complex64) + random(4) * 1j
            kept.append((function(x), graph(x)))
    for expected, got in kept:
        for want, have in zip(expected, got, strict=True):
            assert (want.is_conj(), want.is_neg()) == (have.is_conj(), have.is_neg())
            torch.testing.assert_close(have, want, rtol=0, atol=0)
        assert len({have.untyped_storage().data_ptr() for have in got}) == 1


def test_a_lazily_conjugated_view_of_an_input_without_aot() -> None:
    """Where no AOT puts the outputs together, the captured graph itself gives the conjugated view of the caller's tensor."""
    example = random(4, dtype=torch.complex64)
    traced = make_fx(lambda x: [x.conj(), x * 2], tracing_mode="fake")(example)
    graph = npugraph_ex.get_compiler()(traced, [example])
    for _ in range(3):
        x = random(4, dtype=torch.complex64) * 1j
        view, _ = graph(x)
        torch.testing.assert_close(view, x.conj(), rtol=0, atol=0)
        assert view.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.as_strided((3,), (1,), 1) + x[:3],
        lambda x: x[1:].as_strided((3,), (1,), 2) * 2,
        lambda x: x.as_strided((6,), (1,), 0) * 2,
        lambda x: torch.as_strided_copy(x, (6,), (1,), 0) * 2,
        lambda x: torch.as_strided_scatter(x, torch.zeros(2, dtype=x.dtype, device=x.device), (2,), (1,), 1) * 2,
    ],
)
def test_as_strided_counts_from_the_storage(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """It begins at the same element whichever part of the storage the argument is, which nobody guards."""
    graph = compiled(function)
    for start in (0, 1, 5, 0, 2):
        base = random(20)
        view = base[start : start + 6]
        torch.testing.assert_close(graph(view), function(view), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.as_strided_scatter(x.clone(), x[:2] * 2, (2,), (1,), 1),
        lambda x: x.clone().as_strided((3,), (1,), 1) * 2,
        lambda x: ((x * 2)[1:5] + 1).as_strided((3,), (1,), 1) * 2,
        lambda x: torch.select_scatter(x, x[0], 0, 1).as_strided((3,), (1,), 1) * 2,
        lambda x: torch.select_scatter(x.clone(), x[0], 0, 1).as_strided((3,), (1,), 1) * 2,
    ],
)
def test_as_strided_of_a_value_counts_from_its_own_storage(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A pass puts nothing in the place of that value that begins elsewhere in its storage."""
    graph = compiled(function)
    for start in (5, 0, 1, 5):
        base = random(20)
        view = base[start : start + 6]
        torch.testing.assert_close(graph(view), function(view), rtol=0, atol=0)


def test_as_strided_of_a_copy_of_an_input_that_is_overwritten_later() -> None:
    """The copy does not move into the input, which begins elsewhere; a traced graph has such writes before AOT adds its own."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.as_strided_copy(x.clone(), (6,), (1,), 0) * 2
        x.copy_(y)
        return found

    traced = make_fx(function, tracing_mode="fake")(random(6), random(6))
    graph = npugraph_ex.compile_fx(traced, None, {})
    for start in (5, 0, 1):
        views = [random(20)[start : start + 6] for _ in range(2)]
        expected = views[0] * 2
        (found,) = graph(*views)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(views[0], views[1], rtol=0, atol=0)


@pytest.mark.parametrize("last", [lambda own: own, torch.neg])
def test_a_copy_that_is_written_in_part_begins_its_own_storage(last: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A copy of an input that is written, too: what the caller counts from the result's storage is not the input's storage."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        own = x.clone()
        own[1:].zero_()
        return last(own)

    view = random(20)[5:11]
    found = compiled(function)(view)
    assert (found.storage_offset(), found.untyped_storage().nbytes()) == (0, found.nbytes)
    torch.testing.assert_close(
        found.abs(), torch.where(torch.arange(6, device=view.device) > 0, 0, view.abs()), rtol=0, atol=0
    )


@pytest.mark.parametrize("first", [True, False])
def test_as_strided_of_one_of_two_inputs_in_a_storage(first: bool) -> None:
    """Both inputs lie in one storage, and nobody guards where; whichever the graph takes the view of, it moves with that one."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x if first else y).as_strided((6,), (1,), 0) + x * y

    graph = compiled(function)
    for start in (0, 0, 1, 5, 2):
        base = random(20)
        views = base[start : start + 6], base[start : start + 6]
        torch.testing.assert_close(graph(*views), function(*views), rtol=0, atol=0)
