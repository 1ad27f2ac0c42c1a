"""Projections: products of a value with a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from npugraph_ex.graph.source import source_line
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Emit

_aten = torch.ops.aten
_PRODUCTS = (_aten.matmul.default, _aten.mm.default, _aten.addmm.default, _aten.linear.default)


@dataclass(frozen=True)
class Projection:
    """``node`` is ``x @ weight.T + bias``; the parameters are inputs of the graph.

    ``inputs_first``: the weight is [in, out], so that it is ``x @ weight + bias``, as GPT-2 has it.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    inputs_first: bool = False

    @property
    def size(self) -> Any:
        """Of the last dimension of the result."""
        return self.node.meta["val"].shape[-1]


def joined_weight(emit: Emit, weights: Sequence[fx.Node], *, inputs_first: bool) -> fx.Node:
    """The weights of several projections in one, as a product takes it."""
    whole = emit(_aten.cat.default, list(weights), int(inputs_first))
    return whole if inputs_first else emit(_aten.t.default, whole)


def projected(node: fx.Node) -> Projection | None:
    """A product with a parameter; None for anything else."""
    if not terms.calls(node, *_PRODUCTS) or node.kwargs:
        return None
    bias: Any = None
    if node.target is _aten.addmm.default:
        bias, x, weight = node.args
    else:
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else _added(node)
    inputs_first = node.target is not _aten.linear.default
    if inputs_first and terms.calls(weight, _aten.t.default, _aten.transpose.int, _aten.permute.default):
        weight, inputs_first = weight.args[0], False
    source: Any = x
    while terms.calls(source, _aten.view.default, _aten.reshape.default):
        source = source.args[0]
    if not (isinstance(source, fx.Node) and _is_parameter(weight, 2) and (bias is None or _is_parameter(bias, 1))):
        return None
    return Projection(node, source, weight, bias, inputs_first)


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
