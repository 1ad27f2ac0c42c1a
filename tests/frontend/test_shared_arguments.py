"""An operator that writes an argument sees the write in another argument that shares its memory, compiled as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from device_helpers import NPU, compiled
from torch._dynamo.exc import BackendCompilerFailed

from npugraph_ex import explain
from npugraph_ex.graph.memory.overlap import may_share_elements
from npugraph_ex.report.graphs import graph_records, graphs_so_far


def _told(x: torch.Tensor, *, state: torch.Tensor) -> torch.Tensor:
    state.add_(x.sum())
    return x * 1


def _both(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(1)
    y.mul_(2)


def _lists(xs: Sequence[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    xs[0].mul_(2)
    return y * 1


def _like_first(x: torch.Tensor, *, state: torch.Tensor) -> torch.Tensor:
    del state
    return torch.empty_like(x)


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    """Registered as C++ extensions do it; the kernels read again after they have written."""
    with torch.library._scoped_library("npugraph_ex_shared", "DEF") as library:
        for schema, kernel, fake in (
            ("told(Tensor x, *, Tensor(a!) state) -> Tensor", _told, _like_first),
            ("both(Tensor(a!) x, Tensor(b!) y) -> ()", _both, lambda *_: None),
            ("lists(Tensor(a!)[] xs, Tensor y) -> Tensor", _lists, lambda _, y: torch.empty_like(y)),
        ):
            name = library.define(schema)
            library.impl(name, kernel, "PrivateUse1")
            torch.library.register_fake(f"npugraph_ex_shared::{name}", fake, lib=library)
        yield


_ops: Any = torch.ops.npugraph_ex_shared


@torch.compiler.nested_compile_region
def _region(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _ops.told(x, state=x[0]) + x
    return result


SHARED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "element": lambda _, y: _ops.told(y, state=y[0, 0]),
    "slice": lambda _, y: _ops.told(y[1:], state=y[:2]),
    "expand": lambda _, y: _ops.told(y[0].expand(4, 2), state=y[0]),
    "transpose": lambda _, y: _ops.told(y.t(), state=y[0]),
    "one tensor": lambda _, y: _ops.told(y, state=y),
    "two inputs": lambda x, y: _ops.told(x, state=y),
    "in a written list": lambda x, y: _ops.lists([y, x + 1], y[0]),
    "beside a written list, detached": lambda x, y: _ops.lists([y, x * 1], y.detach()[1:]),
    "both written, one detached": lambda _, y: (_ops.both(y[0], y.detach()[1:]), y + 1)[1],
    "both written, both detached": lambda _, y: (_ops.both(y.detach()[0], y.detach()[1:]), y + 1)[1],
    "region": lambda _, y: _region(y),
}


def _values(function: Callable[..., Any], *, trained: bool) -> list[Any]:
    """Results, arguments and gradients of three calls; the second argument shares the first one's memory."""
    found: list[Any] = []
    for call in range(3):
        base = torch.arange(8.0, device=NPU).view(4, 2) + call
        weight = torch.ones(2, device=NPU, requires_grad=trained)
        with torch.set_grad_enabled(trained):
            result = function(base, base[1:], weight)
            if trained:
                result.sum().backward()
        found += [one if one is None else one.tolist() for one in (result, base, weight.grad)]
    return found


@pytest.mark.parametrize("memory", ["temporary", "input"])
@pytest.mark.parametrize(("dynamic", "trained"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("form", SHARED)
def test_what_is_written_is_read(form: str, memory: str, *, dynamic: bool, trained: bool) -> None:
    """The results, the arguments and the gradients are eager mode's, in every call."""

    def program(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if memory == "temporary":
            x, y = x * 1, y * 1
            if form == "two inputs":
                y = x[2:]
        result: torch.Tensor = SHARED[form](x, y)
        return (result.sum() + y) * weight

    assert _values(compiled(program, dynamic=dynamic), trained=trained) == _values(program, trained=trained)


def test_inputs_that_share_memory_at_a_later_call() -> None:
    """A graph that was compiled for separate inputs reads what it writes, too."""
    given: list[tuple[torch.Tensor, ...]] = []

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return _ops.told(x, state=y) + y

    function = compiled(program)
    for shared in (False, True):
        for one in (function, program):
            base = torch.arange(8.0, device=NPU).view(4, 2)
            other = base[1] if shared else base[1].clone()
            given.append((one(base, other), base))
        assert all(map(torch.equal, given[-1], given[-2]))


def _fates(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    before = graphs_so_far()
    with torch.no_grad():
        function(*inputs)
    return [record.fate for record in graph_records(after=before)]


def _columns(x: torch.Tensor) -> Any:
    query, key = x.view(-1, 3, 4)[:, :2].unbind(1)
    return _ops.told(query, state=key) + x.view(-1, 12)[:, 8:]


def _halves(x: torch.Tensor) -> Any:
    return _ops.told(x[0], state=x[1]) + x[1]


def _both_written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    _ops.both(y[:, 1:], y)
    return y + x


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [_columns, _halves, _both_written])
def test_separate_elements_of_one_storage_are_captured(program: Callable[..., torch.Tensor], *, dynamic: bool) -> None:
    """So are two views that are both written, of which torch makes views of one copy."""
    function = compiled(program)
    x, own = (torch.arange(72.0, device=NPU).view(2, 3, 12) for _ in range(2))
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    assert _fates(function, x) == ["captured"]
    assert torch.equal(function(x), (program(own), program(own))[1])
    assert torch.equal(x, own)


def test_the_reason_is_shown() -> None:
    """It names the operator, the two arguments and the line, in the explanation and in the error of ``require_capture``."""
    y = torch.ones(4, 2, device=NPU)
    reason = (
        r"told.default writes its argument 'state', which shares memory with 'x' \(.*test_shared_arguments.py:\d+\)"
    )
    found = explain(lambda y: _ops.told(y, state=y[0]), y)
    (graph,) = found.graphs
    assert graph.graph.fate == "not capturable"
    assert "writes its argument 'state', which shares memory with 'x'" in str(found)
    with pytest.raises(BackendCompilerFailed, match=f"CaptureError.*{reason}"):
        compiled(lambda y: _ops.told(y, state=y[0]), require_capture=True)(y)


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        (lambda x: x[0], lambda x: x[1], False),
        (lambda x: x[:, :2], lambda x: x[:, 2:], False),
        (lambda x: x[:, :3], lambda x: x[:, 2:], True),
        (lambda x: x[:, ::2], lambda x: x[:, 1::2], False),
        (lambda x: x[:0], lambda x: x, False),
        (lambda x: x.t()[:2], lambda x: x.t()[2:], False),
        (lambda x: x.view(torch.int16)[:, 4:], lambda x: x[:, :2], False),
        (lambda x: x.view(torch.int16)[:, 3:], lambda x: x[:, :2], True),
        (lambda x: x, lambda x: x.clone(), False),
    ],
)
def test_common_elements(first: Callable[..., Any], second: Callable[..., Any], *, meet: bool) -> None:
    """By rows, by columns, by bytes; in both orders."""
    x = torch.zeros(4, 4, dtype=torch.int32)
    assert may_share_elements(first(x), second(x)) is meet
    assert may_share_elements(second(x), first(x)) is meet
