"""All that fused attention takes, as it is read from a spelling, and the views that bring it into the operator's order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._attention_scores import AddedToScores, Filled, HeadOperand, Sizes
from npugraph_ex.lifting.proposal import Emit

_aten = torch.ops.aten
RANKS = (3, 4)


@dataclass(frozen=True)
class ReadAttention:
    """All that the operator takes, and where its result goes.

    Attributes:
        operands: queries, keys and values.
        result: the result.
        scale: of the scores.
        biases: what is added to the scores.
        filled: the mask.
        order: that of the scores' dimensions; with a bias or a mask it is their own.
    """

    operands: tuple[HeadOperand, ...]
    result: HeadOperand
    scale: float
    biases: tuple[AddedToScores, ...]
    filled: Filled | None
    order: tuple[int, ...]

    @property
    def added(self) -> tuple[AddedToScores, ...]:
        """The biases, and the mask."""
        return self.biases if self.filled is None else (*self.biases, AddedToScores(self.filled.mask, len(self.order)))

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What the operator reads."""
        return (*(one.node for one in self.operands), *(one.node for one in self.added))

    @property
    def sizes(self) -> Sizes:
        """The shape of the scores, [B, N, S, S] or [N, S, S]."""
        queries, keys = (one.sizes for one in self.operands[:2])
        return (*queries[:-1], keys[-2])

    def cut(self, added: AddedToScores) -> Sizes:
        """The sizes of a bias or a mask; batches and heads are two dimensions, where the scores have one for both."""
        shape = added.node.meta["val"].shape
        joined = len(shape) == added.rank < len(self.sizes) and not terms.same_size(shape[0], 1)
        return (*self.sizes[:2], *shape[1:]) if joined else (*shape,)


def viewed(emit: Emit, given: fx.Node, sizes: Sizes) -> fx.Node:
    """A bias or a mask of these sizes, of which at most one is a symbol."""
    if len(sizes) == given.meta["val"].dim():
        return given
    return emit(_aten.view.default, given, [size if isinstance(size, int) else -1 for size in sizes])


def ordered(emit: Emit, x: fx.Node, order: tuple[int, ...]) -> fx.Node:
    """Of [B, N, S, D], from a node in another order, or without a batch."""
    if order != tuple(range(len(order))):
        x = emit(_aten.permute.default, x, [*order])
    return emit(_aten.unsqueeze.default, x, 0) if len(order) < RANKS[-1] else x
