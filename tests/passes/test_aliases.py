"""The alias analysis: which bytes nodes lie in, read and write, told apart within a storage and assumed where not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.graph.memory.aliases import AliasFacts
from npugraph_ex.graph.memory.regions import UNKNOWN, Region

FLOAT = 4


def analysed(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[AliasFacts, dict[str, fx.Node]]:
    """The facts of a traced function, and its nodes by name."""
    gm = make_fx(function)(*inputs)
    return AliasFacts(gm.graph), {node.name: node for node in gm.graph.nodes}


def may_overlap(facts: AliasFacts, first: fx.Node, second: fx.Node) -> bool:
    """Whether any region of one node may share a byte with any of the other."""
    return any(one.overlaps(other) for one in facts.regions(first) for other in facts.regions(second))


def zeros(*size: int) -> torch.Tensor:
    """A fake input of its own."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.zeros(*size)


def test_parts_of_one_storage_are_told_apart() -> None:
    """Two halves share a storage and no byte; each overlaps the whole; a transposed view spans the same bytes."""
    facts, node = analysed(lambda x: (x[:2] + 1, x[2:] + 1, x.t() + 1), zeros(4, 4))
    top, bottom, turned, whole = node["slice_1"], node["slice_2"], node["t"], node["x_1"]
    assert facts.share_storage(top, bottom)
    assert not may_overlap(facts, top, bottom)
    assert may_overlap(facts, top, whole)
    assert may_overlap(facts, bottom, turned)
    (region,) = facts.regions(bottom)
    assert (region.start, region.stop) == (8 * FLOAT, 16 * FLOAT)
    assert facts.storage_bytes(region.root) == 16 * FLOAT


def test_reads_and_writes_name_bytes() -> None:
    """A view reads nothing, a copy reads its source and not what it fills, an in-place operator reads what it writes."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[2:].copy_(y)
        x[:1].mul_(2)
        return x[:2] + y

    facts, node = analysed(function, zeros(4, 4), zeros(2, 4))
    x, y = facts.regions(node["x_1"])[0], facts.regions(node["y_1"])[0]
    assert facts.reads(node["slice_1"]) == ()
    assert facts.reads(node["copy_"]) == (y,)
    assert facts.writes(node["copy_"]) == (Region(x.root, 8 * FLOAT, 16 * FLOAT),)
    first_row = (Region(x.root, 0, 4 * FLOAT),)
    assert facts.reads(node["mul_"]) == facts.writes(node["mul_"]) == first_row
    assert facts.reads(node["add"]) == (Region(x.root, 0, 8 * FLOAT), y)
    assert facts.is_written(node["x_1"])
    assert not facts.is_written(node["y_1"])


def test_what_lies_between_two_writes_is_not_written() -> None:
    """Written bytes are kept as ranges, not as one span from the first to the last."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x[3:].zero_()
        x[:1].zero_()
        return x[1:3] + x[:2]

    facts, node = analysed(function, zeros(4, 4))
    assert not facts.is_written(node["slice_3"])
    assert facts.is_written(node["slice_4"])
    assert facts.touches(node["zero_"], [node["slice_4"], node["slice_1"]]) is node["slice_1"]


def test_memory_that_only_a_schema_joins() -> None:
    """An operator that declares an alias, and whose fake result says otherwise: bytes are not told apart there."""
    with torch.library._scoped_library("npugraph_ex_tests", "FRAGMENT") as library:
        library.define("tail(Tensor(a) x) -> Tensor(a)")
        library.impl("tail", lambda x: x.new_empty(2, 4), "Meta")
        facts, node = analysed(lambda x: (torch.ops.npugraph_ex_tests.tail(x) + 1, x[2:] + 1), zeros(4, 4))
        assert may_overlap(facts, node["tail"], node["slice_1"])
        assert not facts.regions(node["tail"])[0].is_exact


def test_memory_of_which_nothing_is_known() -> None:
    """A value without metadata may lie anywhere, and so may what is declared to be an alias of it."""
    facts, node = analysed(lambda x: (x * 2).t() + x, zeros(4, 4))
    del node["mul"].meta["val"]
    facts = AliasFacts(node["mul"].graph)
    assert facts.roots(node["mul"]) == facts.roots(node["t"]) == {UNKNOWN}
    assert may_overlap(facts, node["t"], node["x_1"])
    assert facts.share_storage(node["t"], node["x_1"])


@pytest.mark.parametrize("copies", [True, False])
def test_an_operator_that_may_copy(copies: bool) -> None:
    """`reshape` declares an alias whether it copies or not; it reads its argument where it copies."""
    _, node = analysed(lambda x: (x.t() if copies else x[1:]) + 1, zeros(4, 4))
    view = node["t" if copies else "slice_1"]
    with view.graph.inserting_after(view):
        reshape = view.graph.call_function(torch.ops.aten.reshape.default, (view, [-1]))
    reshape.meta["val"] = view.meta["val"].reshape(-1)
    facts = AliasFacts(view.graph)
    assert bool(facts.reads(reshape)) == copies
