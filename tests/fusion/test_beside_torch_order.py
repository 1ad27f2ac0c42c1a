"""Beside torch's matcher: operands that come late, writes in between, other streams and scopes, values used elsewhere."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, D103, PLW0108

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_helpers import targets
from matchers import Case, add_mul, half, mul_add, pair, plain_torch, refused, traced
from torch import fx
from torch._inductor.pattern_matcher import CallFunction, KeywordArg

aten = torch.ops.aten


def doubled(x: Any, y: Any) -> Any:
    total = torch.add(x, x)
    return torch.mul(total, y), total


def doubled_otherwise(x: Any, y: Any) -> Any:
    total = torch.mul(x, 2)
    return torch.mul(y, total), total


def feeds_back(x: Any, y: Any) -> Any:
    total = torch.add(x, x)
    return torch.mul(total, torch.relu(total)), total


def late_input(x: Any, y: Any) -> Any:
    total = torch.add(x, x)
    early = torch.relu(total)
    return torch.mul(total, torch.neg(y)), early


@pytest.mark.parametrize("model", [feeds_back, late_input])
def test_operands_that_come_late(model: Any) -> None:
    """Torch's graph reads a value before it is made (pytorch#162019). Ours refuses a cycle; what is merely late, waits."""
    case = Case(model, doubled, doubled_otherwise, pair())
    count, gm = case.by_torch()
    assert count == 1
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        gm.graph.lint()
    if model is feeds_back:
        refused(case, "relu depends on a replaced output through relu: fusing would close a cycle")
    else:
        report, _ = case.by_us()
        assert report.fusions() == 1


@pytest.mark.parametrize("written", ["x", "a view of x", "a cache"])
def test_a_write_in_between(written: str) -> None:
    """Torch refuses these as well. A view is written; or an operator writes that only its schema tells of."""
    with torch.library._scoped_library("beside_torch", "DEF") as library:
        library.define("advance(Tensor(a!) cache) -> ()")
        library.impl("advance", lambda cache: None, "Meta")
        library.impl("advance", tripled, "CPU")

        def model(x: Any, y: Any) -> Any:
            total = torch.add(x, y)
            if written == "a cache":
                torch.ops.beside_torch.advance(x)
            else:
                (x[0] if "view" in written else x).mul_(3)
            return torch.mul(total, y)

        case = Case(model, add_mul, mul_add, pair())
        assert case.by_torch()[0] == 0
        refused(case, "writes x_1 between the matched operators")


def tripled(cache: torch.Tensor) -> None:
    cache.mul_(3)


def test_a_write_to_other_memory_is_no_obstacle() -> None:
    """Torch refuses every write in between; ours asks what is written."""

    def model(x: Any, y: Any, z: Any) -> Any:
        total = torch.add(x, y)
        z.mul_(3)
        return torch.mul(total, y)

    case = Case(model, add_mul, mul_add, [*pair(), half(4, 16)], pair())
    assert case.by_torch()[0] == 0
    assert case.by_us()[0].fusions() == 1


def marked(key: str, first: object, second: object) -> Callable[[fx.GraphModule], None]:
    """Says of the addition and of the product where, or how, they run."""

    def edit(gm: fx.GraphModule) -> None:
        for target, value in ((aten.add.Tensor, first), (aten.mul.Tensor, second)):
            for node in gm.graph.find_nodes(op="call_function", target=target):
                node.meta[key] = value

    return edit


MARKS = {"stream_label": ("a", "b"), "core_limit": ((4, 8), (8, 8)), "deterministic_level": (1, 2)}


@pytest.mark.parametrize("key", MARKS)
def test_one_stream_and_one_scope(key: str) -> None:
    """Torch fuses over two of them and its node has none (pytorch#189095); ours refuses, and inherits a common one."""
    first, second = MARKS[key]
    case = Case(add_mul, add_mul, mul_add, pair(), edit=marked(key, first, second))
    count, gm = case.by_torch()
    assert count == 1
    assert all(key not in node.meta for node in gm.graph.nodes)
    refused(case, f"add has {key} {first!r} and mul has {second!r}")
    report, gm = Case(add_mul, add_mul, mul_add, pair(), edit=marked(key, first, first)).by_us()
    assert report.fusions() == 1
    assert [node.meta.get(key) for node in gm.graph.nodes if node.op == "call_function"] == [first, first]


def test_a_value_that_is_used_elsewhere_stays() -> None:
    """With any number of users allowed, as hand-written patterns do, torch computes the sum twice; ours refuses."""

    def model(x: Any, y: Any) -> Any:
        total = torch.add(x, y)
        return torch.mul(total, y), total

    pattern = CallFunction(
        aten.mul.Tensor, CallFunction(aten.add.Tensor, KeywordArg("x"), KeywordArg("y"), _users=2), KeywordArg("y")
    )
    gm = traced(model, *pair())
    assert plain_torch(gm, add_mul, mul_add, lambda: pair(), pattern) == 1
    assert targets(gm).count("add") == 2
    refused(Case(model, add_mul, mul_add, pair()), "add is also a result of the graph")
