"""No-op removal drops what nobody can tell from its input, and nothing else."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103, PLW0108

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_helpers import evaluate, optimise, targets
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.graph import noops

aten = torch.ops.aten


def traced(function: Callable[..., Any], count: int = 1) -> fx.GraphModule:
    """The graph of ``function`` on fake (4, 6) tensors, writes and no-ops kept as they are."""
    with FakeTensorMode():
        inputs = [torch.empty(4, 6, device="npu") for _ in range(count)]
    return make_fx(function)(*inputs)


REMOVED: dict[str, Callable[..., Any]] = {
    "view": lambda x: aten.view(x, [4, 6]) * 2,
    "slice": lambda x: aten.slice(x, 0, 0, 9223372036854775807) * 2,
    "expand": lambda x: aten.expand(x, [4, 6]) * 2,
    "permute": lambda x: aten.permute(x, [0, 1]) * 2,
    "alias": lambda x: aten.alias(x) * 2,
    "clone": lambda x: aten.clone(x) * 2,
    "_to_copy": lambda x: aten._to_copy(x, dtype=torch.float32) * 2,
    "constant_pad_nd": lambda x: aten.constant_pad_nd(x, [0, 0, 0, 0]) * 2,
}

KEPT: dict[str, Callable[..., Any]] = {
    "view": lambda x: aten.view(x, [6, 4]) * 2,
    "slice": lambda x: aten.slice(x, 0, 1, 9223372036854775807) * 2,
    "permute": lambda x: aten.permute(x, [1, 0]) * 2,
    "_to_copy": lambda x: aten._to_copy(x, dtype=torch.float16) * 2,
    "constant_pad_nd": lambda x: aten.constant_pad_nd(x, [1, -1]) * 2,
    "clone": lambda x: aten.clone(x),
    "alias": lambda x: aten.alias(x),
    "add": lambda x: torch.add(x, 0) * 2,
}


@pytest.mark.parametrize("name", REMOVED)
def test_identities_go(name: str) -> None:
    """An operator that changes neither values nor metadata is dropped."""
    gm = traced(REMOVED[name])
    assert name in targets(gm)
    optimise(gm)
    assert targets(gm) == ["mul"]


@pytest.mark.parametrize(("pad", "gone"), [([0, 0, 0, 0], True), ([1, -1], False)])
def test_a_pad_given_by_its_name(pad: list[int], gone: bool) -> None:
    """A user's pass may spell arguments as it likes."""
    gm = traced(KEPT["constant_pad_nd"])
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    node.args, node.kwargs = node.args[:1], {"pad": pad}
    noops.remove(gm.graph)
    assert (node not in gm.graph.nodes) is gone


@pytest.mark.parametrize("name", KEPT)
def test_everything_else_stays(name: str) -> None:
    """Another shape, offset, order or dtype; a result that must not be the input; ``x + 0``, which loses -0.0."""
    gm = traced(KEPT[name])
    before = targets(gm)
    optimise(gm)
    assert targets(gm) == before


def copy_then_write(x: Any, y: Any) -> Any:
    before = aten.clone(x)
    x.copy_(y)
    return before + 1


def copy_then_write_a_view(x: Any, y: Any) -> Any:
    before = aten.clone(x)
    aten.view(x, [24]).add_(1)
    return before + y


def write_the_copy(x: Any, y: Any) -> Any:
    scratch = aten.clone(x)
    scratch.add_(y)
    return scratch * x


def return_a_view_of_the_copy(x: Any, y: Any) -> Any:
    return aten.view(aten.clone(x), [24]), y + 1


@pytest.mark.parametrize(
    "function", [copy_then_write, copy_then_write_a_view, write_the_copy, return_a_view_of_the_copy],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_copy_that_a_write_or_a_caller_can_tell_stays(function: Callable[..., Any]) -> None:
    """Removing it would move a read past a write, or hand out the input's own memory."""
    gm = traced(function, 2)
    values = [torch.randn(4, 6) for _ in range(2)]
    expected = evaluate(gm, *(value.clone() for value in values))
    optimise(gm)
    assert "clone" in targets(gm)
    for old, new in zip(expected, evaluate(gm, *(value.clone() for value in values)), strict=True):
        torch.testing.assert_close(new, old)


def test_a_view_of_written_memory_goes() -> None:
    """Two names for one memory stay one name whatever is written."""

    def function(x: Any, y: Any) -> Any:
        same = aten.view(x, [4, 6])
        x.add_(y)
        return same * 2

    gm = traced(function, 2)
    values = [torch.randn(4, 6) for _ in range(2)]
    (expected,) = evaluate(gm, *(value.clone() for value in values))
    optimise(gm)
    assert "view" not in targets(gm)
    torch.testing.assert_close(evaluate(gm, *values)[0], expected)


def test_option_turns_it_off() -> None:
    """``remove_noop_ops=False`` keeps every operator."""
    gm = traced(REMOVED["clone"])
    optimise(gm, remove_noop_ops=False)
    assert targets(gm) == ["clone", "mul"]
