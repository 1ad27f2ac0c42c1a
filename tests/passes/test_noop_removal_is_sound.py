"""No-op removal drops what nobody can tell from its input, and nothing else."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103, PLW0108

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


NEUTRAL: dict[str, Callable[..., Any]] = {
    "x * 1": lambda x: x * 1, "x * 1.0": lambda x: x * 1.0, "x / 1": lambda x: x / 1, "x + 0": lambda x: x + 0,
    "x - 0": lambda x: x - 0, "x + 3 * 0": lambda x: torch.add(x, 0, alpha=3),
    "floor(x / 1)": lambda x: torch.div(x, 1, rounding_mode="floor"), "x * True": lambda x: x * True,
    "x * 2": lambda x: x * 2, "1 - x": lambda x: 1 - x,
}  # fmt: skip
FACTORS, TERMS = {"x * 1", "x * 1.0", "x / 1"}, {"x + 0", "x - 0", "x + 3 * 0"}


def _copied(function: Callable[..., Any], x: Any) -> Any:
    return function(x).clone()


@pytest.mark.parametrize(
    ("dtype", "gone"),
    [(torch.float16, FACTORS), (torch.float32, FACTORS), (torch.int64, {"x * 1"} | TERMS), (torch.complex64, set())],
    ids=["float16", "float32", "int64", "complex64"],
)
def test_identity_arithmetic(dtype: torch.dtype, gone: set[str]) -> None:
    """What goes changes no bit, of -0.0 and infinities neither; it stays by default, because a pattern may spell it."""
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), 7.0])
    values = torch.complex(values, values.flip(0)) if dtype.is_complex else values
    given = values[:4].to(dtype) if dtype == torch.int64 else values.to(dtype)
    for name, function in NEUTRAL.items():
        if dtype.is_complex and "floor" in name:
            continue
        gm = make_fx(partial(_copied, function))(given)
        before, expected = targets(gm), gm(given)
        noops.remove(gm.graph)
        assert targets(gm)[0] == before[0]
        noops.remove(gm.graph, arithmetic=True)
        gm.recompile()
        assert (targets(gm) == ["clone"]) is (name in gone), name
        found = gm(given)
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name


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
