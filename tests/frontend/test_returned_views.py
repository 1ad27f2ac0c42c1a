"""A result that is a view of an input which the program wrote is that view: its elements, strides, offset and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from device_helpers import NPU, compiled, describe

from npugraph_ex import explain

Results = tuple[torch.Tensor, ...]


def _parts(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    rows = x.shape[0]
    x.add_(1)
    return x[rows // 2 :], x.view(-1, rows).t(), x.narrow(0, rows - 2, 1), (a + b).sum(0)


def _two_inputs_share_memory(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    turned = x.t()
    turned.add_(1)
    a.mul_(3)
    return turned, b + 1, x[1:]


def _parts_of_what_is_shared(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    a.mul_(3)
    return a.t(), b[1:], b[b.shape[0] // 2 :], x[1:]


def _other_dtypes(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    x.add_(1)
    a.add_(1)
    return (
        x[x.shape[0] - 2 :].view(torch.int16),
        b.t().view(torch.int16),
        a.view(torch.int8)[:, 2:],
        x.view(torch.int16),
    )


def _lazily_conjugated(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    numbers = torch.view_as_complex(x.float().view(x.shape[0], -1, 2)) + (a + b).sum()
    numbers.mul_(2)
    return numbers.conj()[x.shape[0] // 2 :], numbers.conj().imag[1:]


def _written_twice(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Results:
    part = x[1:]
    part.mul_(2)
    x.t().add_(a.sum())
    first, second = x.split(4, 1)
    return part, first, second, second[x.shape[0] - 1 :], b.t()


DENSE = (_parts, _lazily_conjugated)
"""Programs whose views a matrix with gaps does not have, in eager mode neither."""

PROGRAMS = (*DENSE, _two_inputs_share_memory, _parts_of_what_is_shared, _other_dtypes, _written_twice)


def _inputs(start: int, gap: int) -> list[torch.Tensor]:
    """A matrix that begins somewhere in its storage, with gaps between its rows, and two that are one memory."""
    storage = torch.arange(100, dtype=torch.int32, device=NPU)
    shared = torch.arange(30, dtype=torch.int32, device=NPU)
    return [storage.as_strided((3, 8), (8 + gap, 1), start), shared[:24].view(3, 8), shared[:24].view(8, 3).t()]


def _shared(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Which tensors lie in one storage, and where in it each begins."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [
        (storages.index(storage), tensor.storage_offset()) for storage, tensor in zip(storages, tensors, strict=True)
    ]


def _elements(tensor: torch.Tensor) -> list[int]:
    """Bit by bit, as numbers that other dtypes give are not always equal to themselves."""
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().view(torch.int8).flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("program", "gap"), [(program, gap) for program in PROGRAMS for gap in (0, 3) if not (gap and program in DENSE)]
)
def test_results_are_views_of_the_callers_input(
    program: Callable[..., Results], mode: Callable[[], AbstractContextManager[None]], *, dynamic: bool, gap: int
) -> None:
    """Over four calls, of which some begin elsewhere in the storage than the one that was compiled for."""
    graph = compiled(program, dynamic=dynamic)
    for start in (6, 6, 2, 10):
        mine, eagers = _inputs(start, gap), _inputs(start, gap)
        with mode():
            got, expected = [*graph(*mine), *mine], [*program(*eagers), *eagers]
        assert [describe(tensor) for tensor in got] == [describe(tensor) for tensor in expected]
        assert [_elements(tensor) for tensor in got] == [_elements(tensor) for tensor in expected]
        assert _shared(got) == _shared(expected)


@pytest.mark.parametrize("views", [1, 3])
def test_what_is_returned_costs_no_copy(views: int) -> None:
    """The input is written in place, although it is a part of a storage and views of it are returned."""

    def program(x: torch.Tensor) -> Results:
        x.add_(1)
        return tuple(x[part:] for part in range(1, 1 + views))

    seen = explain(program, torch.zeros(20, device=NPU)[2:])
    assert [graph.graph.kernels_after for graph in seen.graphs] == [1]


@pytest.mark.slow
def test_training_returns_views_of_a_written_buffer() -> None:
    """Where a gradient is wanted too, a view of a written input is one of the caller's."""

    def program(x: torch.Tensor, weight: torch.Tensor) -> Results:
        x.add_(1)
        return (x * weight).sum(), x[x.shape[0] // 2 :]

    weight = torch.ones(3, 8, device=NPU, requires_grad=True)
    x = torch.arange(40.0, device=NPU)[6:30].view(3, 8)
    with torch.enable_grad():
        loss, part = compiled(program, dynamic=True)(x, weight)
        loss.backward()
    assert torch.equal(part.cpu(), x[1:].cpu())
    assert part.data_ptr() == x[1:].data_ptr()
    assert weight.grad is not None
    assert torch.equal(weight.grad.cpu(), x.cpu())
