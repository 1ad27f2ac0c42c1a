"""The metadata that a saved graph gets is that of an execution node by node, though equal calls are executed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from npugraph_ex import _torch_private
from npugraph_ex.graph import metadata
from npugraph_ex.graph.operators import tensor_leaves

aten = torch.ops.aten
_LIBRARY = torch.library.Library("derived_metadata", "DEF")
_LIBRARY.define("two_in_one(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.impl("two_in_one", lambda x: (whole := torch.empty_like(x), whole.t()), "Meta")
"""What it returns lies in one new memory, and the schema does not say so."""
Program = Callable[..., Any]


def _layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = aten.silu_(aten.mul_(aten.add(x, x), aten.mm(x, aten.t(w))))
    return x


def _several_results(x: torch.Tensor, w: torch.Tensor) -> Any:
    first, second = aten.topk(x, 2), aten.topk(x, 2)
    return [*first, *second, *aten.split(x, 2), *aten.split(x, 2)]


def _numbers_of_other_types(x: torch.Tensor, w: torch.Tensor) -> Any:
    whole = (
        aten.full([2], 1, device=x.device),
        aten.full([2], True, device=x.device),
        aten.full([2], 1.0, device=x.device),
    )
    return [*whole, aten.sum(x, [1]), aten.sum(x, [True]), aten.sum(x, [1], False), aten.sum(x, [1], True)]


def _forms_that_change(x: torch.Tensor, w: torch.Tensor) -> Any:
    one, other = x + 1, x + 1
    one.t_()
    other.t_()
    return [one, other, one + one, other + other]


def _results_that_grow(x: torch.Tensor, w: torch.Tensor) -> Any:
    one, other = aten.empty([0], device=x.device), aten.empty([0], device=x.device)
    aten.add.out(x, x, out=one)
    aten.add.out(x, x, out=other)
    return [one, other, one + one, other + other]


def _undeclared_views(x: torch.Tensor, w: torch.Tensor) -> Any:
    one, other = aten.dropout(x, 0.0, False), aten.dropout(x, 0.0, False)
    return [
        one,
        other,
        aten._unsafe_view(x, [12]),
        aten._unsafe_view(x, [12]),
        aten.contiguous(x),
        aten.contiguous(x.t()),
    ]


def _flags(x: torch.Tensor, w: torch.Tensor) -> Any:
    one, other = torch.complex(x, x), torch.complex(x, x)
    turned, other_turned = one.conj(), other.conj()
    return [
        aten.resolve_conj(turned),
        aten.resolve_conj(one),
        aten.resolve_conj(other_turned),
        aten.resolve_conj(other),
    ]


def _strides_and_offsets(x: torch.Tensor, w: torch.Tensor) -> Any:
    again = [aten.mul(w, w), aten.mul(w.t(), w.t()), aten.mul(w.t(), w.t())]
    return [*again, aten.relu(x[1:]), aten.relu(x[1:]), aten.relu(x[:2])]


def _several_in_one_memory(x: torch.Tensor, w: torch.Tensor) -> Any:
    return [*torch.ops.derived_metadata.two_in_one(x), *torch.ops.derived_metadata.two_in_one(x)]


_PROGRAMS = [
    _layers, _several_results, _numbers_of_other_types, _forms_that_change, _undeclared_views, _flags, _strides_and_offsets,
]  # fmt: skip
_OF_KNOWN_SIZES = [_results_that_grow, _several_in_one_memory]
"""torch executes these with no symbols."""


def _storages(nodes: Sequence[fx.Node]) -> list[int]:
    """For each tensor of the nodes, the number of the first one that lies in the same storage."""
    keys = [_torch_private.storage_key(leaf) for node in nodes for leaf in tensor_leaves(node)]
    return [keys.index(key) for key in keys]


@pytest.mark.parametrize(
    ("program", "dynamic"),
    [*((one, True) for one in _PROGRAMS), *((one, False) for one in (*_PROGRAMS, *_OF_KNOWN_SIZES))],
)
def test_equal_calls_are_executed_once(program: Program, dynamic: bool) -> None:
    """Forms, flags and shared storages are those of each node's own execution."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    real = torch.ones(3, 4, device="npu"), torch.ones(4, 4, device="npu")
    inputs = [mode.from_tensor(value, static_shapes=not dynamic) for value in real]
    with mode:
        gm = make_fx(program, decomposition_table={})(*inputs)
    nodes = list(gm.graph.nodes)
    for node in nodes:
        node.meta.pop("val", None)
    found: list[list[Any]] = []
    for derive in (lambda: metadata.refresh(gm.graph, nodes), lambda: metadata.derive_all(gm.graph, mode)):
        fresh = [mode.from_tensor(value, static_shapes=not dynamic) for value in real]
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), fresh, strict=True):
            node.meta["val"] = value
        derive()
        found.append([node.meta.get("val") for node in nodes])
        found.append(_storages(nodes))
        for node in nodes:
            node.meta.pop("val", None)
    expected, storages, values, own_storages = found
    assert [metadata.difference(a, b) for a, b in zip(expected, values, strict=True)] == [None] * len(nodes)
    assert own_storages == storages


def test_layers_are_executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thirty equal layers each operator runs once, and each view, which lies in memory of its own."""
    ran: list[str] = []
    derive = metadata.derive

    def noted(node: fx.Node, mode: FakeTensorMode | None) -> Any:
        ran.append(str(node.target))
        return derive(node, mode)

    monkeypatch.setattr(metadata, "derive", noted)

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = aten.silu_(aten.mul(x, x))
        return x

    mode = FakeTensorMode()
    with mode:
        x = torch.ones(3, device="npu")
        gm = make_fx(layers)(x)
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    next(iter(gm.graph.nodes)).meta["val"] = x
    metadata.derive_all(gm.graph, mode)
    assert sorted(ran) == ["aten.mul.Tensor", "aten.silu_.default"]
