"""Projections that read one input, each in a kernel of its own, where one projection with a longer weight would do.

Joining weights costs memory or the model's parameters, so no pass does it: the model's author can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex.graph.launches import Launched
from npugraph_ex.graph.source import source_line
from npugraph_ex.lifting import terms

_aten = torch.ops.aten
_PRODUCTS = (_aten.matmul.default, _aten.mm.default, _aten.addmm.default, _aten.linear.default)
_GATED = 2


@dataclass(frozen=True)
class SharedInput:
    """Projections of one input.

    Attributes:
        source: the lines of the projections.
        times: how often these lines occur.
        saves: kernels and bytes of all of them together.
        change: the lines that join them.
    """

    source: str
    times: int
    saves: Launched
    change: str


def shared_projections(graph: fx.Graph) -> list[SharedInput]:
    """The groups of projections of one input, those of equal lines together."""
    groups: dict[tuple[fx.Node, object], list[fx.Node]] = {}
    for node in graph.nodes:
        x = _projected(node)
        if x is not None:
            groups.setdefault((x, node.target), []).append(node)
    found: dict[str, SharedInput] = {}
    for (x, _), nodes in groups.items():
        if len(nodes) < 2:
            continue
        one = _joined(x, nodes)
        old = found.get(one.source)
        found[one.source] = (
            one if old is None else SharedInput(one.source, old.times + 1, old.saves + one.saves, one.change)
        )
    return list(found.values())


def _projected(node: fx.Node) -> fx.Node | None:
    """What a product with a transposed parameter reads; None for anything else."""
    if not terms.calls(node, *_PRODUCTS):
        return None
    x, weight = node.args[1:3] if node.target is _aten.addmm.default else node.args[:2]
    turned = weight
    if node.target is not _aten.linear.default:
        if not terms.calls(weight, _aten.t.default, _aten.transpose.int, _aten.permute.default):
            return None
        turned = weight.args[0]
    is_parameter = isinstance(turned, fx.Node) and turned.op in {"placeholder", "get_attr"}
    source = x
    while terms.calls(source, _aten.view.default, _aten.reshape.default):
        source = source.args[0]
    return source if is_parameter and isinstance(source, fx.Node) else None


def _joined(x: fx.Node, nodes: Sequence[fx.Node]) -> SharedInput:
    gates = _gate_and_up(nodes)
    # One product instead of several: x is read once.
    saves = Launched(len(nodes) - 1, (len(nodes) - 1) * _read(x))
    lines = list(dict.fromkeys(source_line(node) for node in nodes))
    sizes = ", ".join(str(node.meta["val"].shape[-1]) for node in nodes)
    weight = "weight = torch.cat((" + ", ".join(f"w{at}" for at in range(len(nodes))) + "))   # once"
    if gates is None:
        names = ", ".join(f"y{at}" for at in range(len(nodes)))
        split = f"{names} = torch.nn.functional.linear(x, weight).split(({sizes}), dim=-1)"
    else:
        saves += Launched.of(gates) - Launched(1, Launched.of(gates[1:]).bytes)
        split = "gate, up = torch.nn.functional.linear(x, weight).chunk(2, dim=-1)   # then npu_swiglu is lifted"
    return SharedInput(", ".join(lines), 1, saves, f"{weight}\n{split}")


def _read(x: fx.Node) -> int:
    value = terms.tensor(x)
    return 0 if value is None else value.untyped_storage().nbytes() if isinstance(value.numel(), int) else 0


def _gate_and_up(nodes: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """The activation and the product ``silu(gate) * up`` of two projections; None where they are no such pair."""
    if len(nodes) != _GATED:
        return None
    for gate, up in (nodes, nodes[::-1]):
        for active in gate.users:
            if terms.calls(active, _aten.silu.default, _aten.silu_.default):
                for product in active.users:
                    if terms.calls(product, _aten.mul.Tensor, _aten.mul_.Tensor) and up in product.args:
                        return active, product
    return None
