"""One canonical form for arguments that can be written in several ways and whose meaning depends on the node.

``transpose(x, -2, 0)`` of a batch of matrices is ``transpose(x, 0, 1)``; ``view(x, [-1, h])`` is ``view(x, [rows, h])``.
Each function here rewrites the argument values of one node to the canonical form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from npugraph_ex.operators import Canonical

Canonicaliser = Callable[[fx.Node, list[Any]], None]


def _rank(node: fx.Node) -> int | None:
    """The number of dimensions of the node's first argument; None if the graph does not know it."""
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else None


def _from_zero(dim: Any, rank: int) -> Any:
    return dim % rank if isinstance(dim, int) and -rank <= dim < rank else dim


def _sizes(node: fx.Node, values: list[Any]) -> None:
    """The sizes of a view, from its result: without -1, and with symbols instead of computed nodes."""
    result = node.meta.get("val")
    if isinstance(result, torch.Tensor):
        values[1] = tuple(result.shape)


def _swapped(node: fx.Node, values: list[Any]) -> None:
    """The two dimensions of a transposition, counted from 0, in ascending order."""
    rank = _rank(node)
    if rank and all(isinstance(dim, int) for dim in values[1:3]):
        values[1:3] = sorted(_from_zero(dim, rank) for dim in values[1:3])


def _permuted(node: fx.Node, values: list[Any]) -> None:
    """The dimensions of a permutation, counted from 0."""
    rank = _rank(node)
    if rank and isinstance(values[1], tuple):
        values[1] = tuple(_from_zero(dim, rank) for dim in values[1])


def _one_dimension(node: fx.Node, values: list[Any]) -> None:
    """The second argument is a dimension, counted from 0."""
    rank = _rank(node)
    if rank:
        values[1] = _from_zero(values[1], rank)


def _split_dimension(node: fx.Node, values: list[Any]) -> None:
    """The third argument is a dimension, counted from 0."""
    rank = _rank(node)
    if rank:
        values[2] = _from_zero(values[2], rank)


def from_record(canonical: Canonical, names: Sequence[str]) -> Canonicaliser:
    """The canonical form in an operator's record for its arguments ``names``."""

    def canonicalise(node: fx.Node, values: list[Any]) -> None:
        rank = _rank(node)
        if rank:
            for name, value in canonical(rank, dict(zip(names, values, strict=True))).items():
                values[names.index(name)] = value

    return canonicalise


CANONICALISERS: Mapping[str, Canonicaliser] = MappingProxyType(
    {
        "aten.view.default": _sizes,
        "aten.reshape.default": _sizes,
        "aten._unsafe_view.default": _sizes,
        "aten.expand.default": _sizes,
        "aten.transpose.int": _swapped,
        "aten.permute.default": _permuted,
        "aten.select.int": _one_dimension,
        "aten.slice.Tensor": _one_dimension,
        "aten._softmax.default": _one_dimension,
        "aten.split_with_sizes.default": _split_dimension,
        "aten.split.Tensor": _split_dimension,
    }
)
"""For torch's own operators, by ``str(overload)``. ``from_record`` makes the functions of other operators from their records."""
