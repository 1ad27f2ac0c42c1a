"""Moves what a graph computes in float64 by as much as rounding might.

How far the results move shows the size of eager mode's rounding errors (stochastic arithmetic: Vignes, 1993).

These are moved:

* each result that eager mode would round to dtype d: multiplied by 1 + u*xi, u the unit roundoff of d and xi uniform in [-1, 1];
* a sum: by roundoffs of float32 of the magnitudes of its terms, because where terms cancel, its error is large beside its result;
* the arguments of other operators that add terms: by a roundoff of float32 (backward stability: Wilkinson, 1963);
* a number that float32 has not, as 0.7: by a roundoff of float32, because a kernel computes with the rounded number.

These are not moved:

* what eager mode computes without rounding anything, where an operator jumps, as a comparison does;
* what it computes so of integers and masks alone: of a mask's ``(1 - mask) * -1e9`` nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.testing.oracle.exactness import REINTERPRETS, only_moves
from npugraph_ex.testing.oracle.formats import FORMATS, Format

_aten = torch.ops.aten
_WIDE = torch.float64
_FLOAT32 = FORMATS[torch.float32].roundoff
_PRODUCTS = frozenset({
    _aten.mm.default, _aten.bmm.default, _aten.matmul.default, _aten.addmm.default, _aten.baddbmm.default,
})  # fmt: skip
_SELECTS = frozenset({
    "amax", "amin", "aminmax", "max", "min", "cummax", "cummin", "sort", "topk", "kthvalue", "median",
})  # fmt: skip
"""What gives some of its values is as exact as these: the largest one equals one of them."""
_SUMS = frozenset({_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.cumsum.default})
_CANCELLING = frozenset({
    _aten.native_layer_norm.default, _aten.native_group_norm.default, _aten.convolution.default,
    _aten.var.correction, _aten.std.correction, _aten.var_mean.correction, _aten.std_mean.correction,
})  # fmt: skip
"""Other operators that add terms, which may cancel, and whose result is smooth in their arguments."""


class Noise:
    """Random movements of one run.

    Args:
        generator: where they come from.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def numbers(self, given: Any) -> Any:
        """The arguments of an operator, with each number a roundoff of float32 away."""

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, float):
                return leaf
            xi = float(torch.rand((), generator=self._generator, dtype=_WIDE)) * 2 - 1
            return leaf * (1 + _FLOAT32 * xi)

        return pytree.tree_map(moved, given)

    def argument(self, value: Any) -> Any:
        """An argument that is a roundoff of float32 away."""
        if not isinstance(value, torch.Tensor) or value.dtype != _WIDE:
            return value
        return value + value * (_FLOAT32 * self._xi(value.shape))

    def accumulation(self, size: torch.Tensor, terms: float) -> torch.Tensor:
        """How adding terms in float32 moves their sum.

        By a roundoff of the sum of their magnitudes, and for many terms by as many of them as a quarter of the root of
        their number: rounding errors of one sum go their way as a random walk does (Higham and Mary, 2019).

        In half of the runs all elements are moved by the same share, because independent movements of what is added up
        afterwards would average out.

        Args:
            size: the sums of the magnitudes.
            terms: how many were added.
        """
        together = bool(torch.rand((), generator=self._generator) < 0.5)
        xi = self._xi(() if together else size.shape)
        roundoffs = max(1.0, math.sqrt(terms) / 4)
        return size.to(_WIDE).abs() * (_FLOAT32 * roundoffs * xi)

    def round(self, value: Any, formats: Sequence[Format | None], exact: torch.Tensor | None = None) -> None:
        """Move each element of a result, in place, as rounding to these formats might, but for those that are exact."""
        for leaf, format_ in zip(pytree.tree_leaves(value), formats, strict=True):
            if format_ is None or leaf.dtype != _WIDE or leaf.numel() == 0:
                continue
            xi = self._xi(leaf.shape)
            if exact is not None:
                xi = xi.masked_fill(exact, 0)
            leaf.add_(leaf * (format_.roundoff * xi) + format_.tiniest * xi / 2)

    def _xi(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, dtype=_WIDE) * 2 - 1


def adds_that_cancel(node: fx.Node) -> bool:
    """Whether the arguments of an operator are moved, because terms of its sums may cancel."""
    return node.target in _CANCELLING


def rounded_results(node: fx.Node) -> list[Format | None] | None:
    """The formats that eager mode rounds the results of ``node`` to; None where it rounds nothing."""
    if not isinstance(node.target, torch._ops.OpOverload) or only_moves(node.target) or node.target is REINTERPRETS:
        return None
    if node.target._schema.name.removeprefix("aten::") in _SELECTS:
        return None
    fakes = pytree.tree_leaves(node.meta.get("val"))
    formats = [FORMATS.get(fake.dtype) if isinstance(fake, torch.Tensor) else None for fake in fakes]
    return formats if any(formats) else None


def magnitude(value: Any) -> Any:
    """The magnitudes of a floating-point tensor; anything else as it is."""
    return value.abs() if isinstance(value, torch.Tensor) and value.dtype == _WIDE else value


def terms_added(node: fx.Node, values: Mapping[fx.Node, Any], terms: Mapping[fx.Node, float]) -> float | None:
    """How many terms each element of a sum, of a product of matrices, or of a view of one is the sum of; None for others.

    The terms of a sum of sums are those of all of them, because a replacement may add them one after another.
    """
    if node.target in _PRODUCTS:
        return values[node.args[-2]].shape[-1]  # type: ignore[index, no-any-return]
    if not node.args or not isinstance(source := node.args[0], fx.Node):
        return None
    if node.target in _SUMS:
        given, results = values[source], values[node].numel()
        added = given.numel() / results if results else 0
        if node.target is _aten.cumsum.default:
            added = given.shape[node.args[1]] if given.dim() else 1
        return added * terms.get(source, 1)
    moves = isinstance(node.target, torch._ops.OpOverload) and only_moves(node.target)
    return terms.get(source) if moves else None
