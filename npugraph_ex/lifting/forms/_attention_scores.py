"""Reads the scores of an attention: ``scale * q k^T + bias``, and a mask that fills some of them.

The scale may stand at q, at k or at the product, which may be spelled as `baddbmm` or `einsum`. Its largest score may be taken from
each row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from npugraph_ex.lifting import reductions, terms
from npugraph_ex.lifting.forms._matrices import Matrices, Moves, moves

_aten = torch.ops.aten
Sizes = tuple[int | torch.SymInt, ...]
MATMULS = (_aten.matmul.default, _aten.bmm.default)
_LEAST = -9984.0
"""A score as low as this is no longer one: its key has no weight. It is -1e4 in bfloat16."""
_NO_WEIGHT = 128.0
"""How much lower than another a score has no weight in float32, where exp(-104) is 0."""
_NO_PRODUCT = "the softmax is not of a product of queries and keys, and sums with it"
_HIDES_NONE = f"what stands in the place of some scores is no number as low as {_LEAST:.0f}, which would hide them"
_NOT_LARGEST = "what is subtracted from the scores is not the largest one of each row"


@dataclass(frozen=True)
class Filled:
    """Scores with ``value`` in the place of those that ``mask`` hides, or does not keep."""

    scores: fx.Node
    mask: fx.Node
    keeps: bool
    value: float

    @property
    def argument(self) -> str:
        """What `scaled_dot_product_attention` takes, where a mask is true where a score stays.

        The names say which one is meant, because a program's own `mask` may be either.
        """
        return "kept" if self.keeps else "~hidden"

    @property
    def remark(self) -> str:
        """What the name stands for."""
        return "  # kept is true where a score stays" if self.keeps else "  # hidden is true where a score is hidden"

    @property
    def least(self) -> float:
        """What the largest score of a row must be above, so that those in the mask's places have no weight."""
        return self.value + _NO_WEIGHT


@dataclass(frozen=True)
class ScoreProduct:
    """``scale * left right + added``, with a view of it.

    Attributes:
        left: its first operand.
        right: its second operand.
        seen: the view.
        scale: by which the product of the two is multiplied.
        added: what `baddbmm` adds to that.
        ignored: what `baddbmm` does not add: its first operand, where ``beta`` is 0.
    """

    left: fx.Node
    right: fx.Node
    seen: Matrices
    scale: float = 1.0
    added: fx.Node | None = None
    ignored: fx.Node | None = None


@dataclass(frozen=True)
class AddedToScores:
    """What is added to scores of this rank."""

    node: fx.Node
    rank: int


@dataclass(frozen=True)
class Scores:
    """``scale * q k^T + biases``, filled where a mask says so.

    Attributes:
        node: the scores, as they are before the largest one is taken from each row.
        seen: the product of queries and keys as a view that has the dimensions of the scores.
        q: queries, as the product reads them.
        k: keys, so that the columns are those of the queries.
        scale: of the product; queries and keys may have others.
        biases: what is added to the scores, or to a view of them.
        filled: the mask.
        ignored: what is read, and changes nothing.
        shifted: whether the largest score is taken from each row.
    """

    node: fx.Node
    seen: Matrices
    q: Matrices
    k: Matrices
    scale: float
    biases: tuple[AddedToScores, ...]
    filled: Filled | None
    ignored: fx.Node | None
    shifted: bool


def scores_of(softmax: fx.Node) -> Scores | str:
    """What the softmax is of, or why it is no attention's."""
    return scores_in(softmax.args[0])  # type: ignore[arg-type]


def scores_in(whole: fx.Node) -> Scores | str:
    """``whole`` as scores, or why it is none."""
    node = _unshifted(whole)
    if isinstance(node, str):
        return node
    filled = _filled(node)
    if isinstance(filled, str):
        return filled
    inner = terms.core(node if filled is None else filled.scores)
    added = terms.calls(inner, _aten.add.Tensor) and inner.kwargs.get("alpha", 1) == 1
    pairs = (inner.args[:2], inner.args[1::-1]) if added else ((inner, None),)
    reason = ""
    for one, bias in pairs:
        if not isinstance(one, fx.Node) or not isinstance(bias, (fx.Node, type(None))):
            continue
        product = product_behind(one)
        if isinstance(product, str):
            reason = reason or product
            continue
        rank = one.meta["val"].dim()
        turned = product.seen.rows == (rank - 1,)  # the product is of keys and queries
        if turned and product.added is not None:
            reason = "baddbmm adds a bias that has a row for each key"
            continue
        added_to = ((product.added, product.left.meta["val"].dim()), (bias, rank))
        biases = tuple(AddedToScores(added, its_rank) for added, its_rank in added_to if added is not None)
        left, right = Matrices.of(product.left), Matrices.of(product.right, turned=True)
        q, k = (right, left) if turned else (left, right)
        seen = product.seen.turned() if turned else product.seen
        shifted = node is not whole
        return Scores(node, seen, q, k, product.scale, biases, filled, product.ignored, shifted)
    return reason or _NO_PRODUCT


def product_behind(node: fx.Node) -> ScoreProduct | str:
    """The product of matrices that ``node`` is a view or a multiple of, or why it is none."""
    path: list[tuple[fx.Node, Moves]] = []
    scale, source = 1.0, node
    while True:
        source, by = _scaled(source)
        scale *= by
        inner = terms.core(source)
        found = _product(inner, scale)
        if found is not None:
            break
        move = moves(inner)
        if move is None:
            return _NO_PRODUCT
        path.append((source, move))
        source = inner.args[0]  # type: ignore[assignment]
    if isinstance(found, str):
        return found
    seen: Matrices | None = found.seen
    for view, move in reversed(path):
        seen = seen.moved(view, move) if seen is not None else None
    return _NO_PRODUCT if seen is None else replace(found, seen=replace(seen, node=node))


def _product(node: fx.Node, scale: float) -> ScoreProduct | str | None:
    """The product that ``node`` computes, which is multiplied by ``scale`` behind it; None where it is no product."""
    if terms.calls(node, *MATMULS, _aten.mm.default):
        left, right = node.args
        if min(one.meta["val"].dim() for one in (left, right)) < 2:  # type: ignore[union-attr]
            return None
        return ScoreProduct(left, right, Matrices.of(node), scale)  # type: ignore[arg-type]
    if not terms.calls(node, _aten.baddbmm.default):
        return None
    given = terms.arguments(node)
    alpha, beta = _factors(node)
    product = ScoreProduct(given["batch1"], given["batch2"], Matrices.of(node))
    if not alpha:
        return f"baddbmm multiplies the product by alpha={given.get('alpha')}; the operator scales by a number that is not 0"
    if beta == 0:
        return replace(product, scale=alpha * scale, ignored=given["self"])
    if beta != 1:
        return f"baddbmm multiplies what it adds by beta={given.get('beta', 1)}; the operator adds a bias as it is"
    if scale != 1:
        return f"the bias that baddbmm adds is multiplied by {scale}; the operator adds a bias as it is"
    return replace(product, scale=alpha, added=given["self"])


def _factors(node: fx.Node) -> tuple[float | None, float | None]:
    """By which `baddbmm` multiplies the product, and what it adds; None for one that is no number."""
    given = terms.arguments(node)
    return terms.number(given.get("alpha", 1)), terms.number(given.get("beta", 1))


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """``(x, c)`` where ``node`` is ``c * x``, and x is no product with a number."""
    scale = 1.0
    while True:
        inner = terms.core(node)
        by = terms.number(inner.args[1]) if len(inner.args) > 1 else None
        if by and terms.calls(inner, _aten.mul.Tensor, _aten.mul.Scalar):
            scale *= by
        elif by and terms.calls(inner, _aten.div.Tensor, _aten.div.Scalar) and not inner.kwargs:
            scale /= by
        else:
            return node, scale
        node = inner.args[0]  # type: ignore[assignment]


def _unshifted(node: fx.Node) -> fx.Node | str:
    """Scores from each row of which the largest one is taken, as they were before; other scores as they are.

    The softmax has the same weights, and NaN in the same rows: where the largest is infinite, or NaN.
    """
    inner = terms.core(node)
    if not terms.calls(inner, _aten.sub.Tensor) or inner.kwargs.get("alpha", 1) != 1:
        return node
    scores, taken = inner.args
    if not isinstance(scores, fx.Node) or not isinstance(taken, fx.Node):
        return node
    largest = reductions.over_one_dimension(taken, _aten.amax.default, _aten.max.dim)
    if largest is None or not terms.is_last(largest[1], scores):
        return _NOT_LARGEST
    return scores if terms.core(largest[0]) is terms.core(scores) else _NOT_LARGEST


@dataclass(frozen=True)
class HeadOperand:
    """Queries, keys or values in a node of rank 4 or 3, times ``scale``; ``order`` brings them to [B, N, S, D] or [N, S, D]."""

    node: fx.Node
    order: tuple[int, ...]
    scale: float = 1.0

    @property
    def sizes(self) -> Sizes:
        """Of their dimensions, ordered."""
        shape = self.node.meta["val"].shape
        return tuple(shape[dim] for dim in self.order)

    @property
    def is_ordered(self) -> bool:
        """Whether the order is that of the node."""
        return self.order == tuple(range(len(self.order)))


def operand(of: Matrices | None, rank: int, *, multiple: bool = False) -> HeadOperand | None:
    """The nearest node of this rank in the views and copies that make an operand; ``multiple``: which may be scaled, too."""
    scale = 1.0
    while of is not None:
        if multiple:
            node, by = _scaled(of.node)
            of, scale = replace(of, node=node), scale * by
        order = of.order(rank)
        if order is not None:
            return HeadOperand(of.node, order, scale)
        of = of.before()
    return None


def _filled(node: fx.Node) -> Filled | str | None:
    """``masked_fill(scores, mask, value)``, or a choice by a mask, with a value so low that it hides the score; or why not."""
    inner = terms.core(node)
    if terms.calls(inner, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor):
        scores, mask, value = inner.args
        choices = ((scores, mask, False, value),)
    elif terms.calls(inner, _aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf):
        mask, one, other = inner.args
        choices = ((one, mask, True, other), (other, mask, False, one))  # type: ignore[assignment]
    else:
        return None
    for scores, mask, keeps, value in choices:
        low = terms.constant(value)
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node) and low is not None and low <= _LEAST:
            return Filled(scores, mask, keeps, low)
    sources = [one for one, *_ in choices if isinstance(one, fx.Node)]
    return _HIDES_NONE if any(isinstance(product_behind(one), ScoreProduct) for one in sources) else None
