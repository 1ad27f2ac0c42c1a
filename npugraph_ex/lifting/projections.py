"""Projections: products of a value with a transposed parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from npugraph_ex.graph.source import source_line
from npugraph_ex.lifting import terms

_aten = torch.ops.aten
_PRODUCTS = (_aten.matmul.default, _aten.mm.default, _aten.addmm.default, _aten.linear.default)


@dataclass(frozen=True)
class Projection:
    """``node`` is ``x @ weight.T + bias``; the parameters are inputs of the graph."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def projected(node: fx.Node) -> Projection | None:
    """A product with a transposed parameter; None for anything else."""
    if not terms.calls(node, *_PRODUCTS) or node.kwargs:
        return None
    bias: Any = None
    if node.target is _aten.addmm.default:
        bias, x, weight = node.args
    else:
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else _added(node)
    if node.target is not _aten.linear.default:
        if not terms.calls(weight, _aten.t.default, _aten.transpose.int, _aten.permute.default):
            return None
        weight = weight.args[0]
    source: Any = x
    while terms.calls(source, _aten.view.default, _aten.reshape.default):
        source = source.args[0]
    if not (isinstance(source, fx.Node) and _is_parameter(weight, 2) and (bias is None or _is_parameter(bias, 1))):
        return None
    return Projection(node, source, weight, bias)


def _added(node: fx.Node) -> fx.Node | None:
    """The bias that the same line adds to a product."""
    for user in node.users:
        if terms.calls(user, _aten.add.Tensor, _aten.add_.Tensor) and source_line(user) == source_line(node):
            return next((other for other in user.args if _is_parameter(other, 1)), None)
    return None


def _is_parameter(value: object, dimensions: int) -> TypeGuard[fx.Node]:
    if not isinstance(value, fx.Node) or value.op not in {"placeholder", "get_attr"}:
        return False
    tensor = terms.tensor(value)
    return tensor is not None and tensor.dim() == dimensions
