"""Operands and results of products of matrices, seen through views and copies, such as those that `torch.einsum` makes.

Of a node each dimension of the product is known: which dimensions of the node it consists of. Dimensions of one element tell
nothing, and get lost on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Emit

_aten = torch.ops.aten
_MATRIX = 2
_Dims = tuple[int, ...]
Moves = list[tuple[_Dims, _Dims]]
"""Dimensions before a view, and those behind it that have the same elements in the same order."""


def moves(node: fx.Node) -> Moves | None:
    """Where the dimensions go of what ``node`` views; None where it is no view, or cuts across them."""
    value, source = terms.tensor(node), terms.tensor(node.args[0]) if node.args else None
    if value is None or source is None:
        return None
    if terms.calls(node, _aten.permute.default):
        return [((dim % value.dim(),), (place,)) for place, dim in enumerate(node.args[1])]  # type: ignore[arg-type]
    if terms.calls(node, _aten.transpose.int):
        places = [*range(value.dim())]
        one, other = node.args[1:3]
        places[one], places[other] = places[other], places[one]  # type: ignore[index]
        return [((dim,), (place,)) for place, dim in enumerate(places)]
    return _regrouped(source.shape, value.shape) if terms.calls(node, *terms.RESHAPES) else None


def _regrouped(before: Sequence[Any], behind: Sequence[Any]) -> Moves | None:
    """Where dimensions go in a reshape that joins some and cuts others."""
    old, new = ([at for at, size in enumerate(sizes) if not terms.same_size(size, 1)] for sizes in (before, behind))
    found: Moves = [((at,), ()) for at in range(len(before)) if at not in old]
    found += [((), (at,)) for at in range(len(behind)) if at not in new]
    while old and new:
        joined = _first_of(old, before, behind[new[0]])
        cut = _first_of(new, behind, before[old[0]])
        if joined is None and cut is None:
            return None
        pair = (joined, (new[0],)) if joined is not None else ((old[0],), cut)
        found.append(pair)  # type: ignore[arg-type]
        old, new = old[len(pair[0]) :], new[len(pair[1]) :]  # type: ignore[arg-type]
    return None if old or new else found


def _first_of(dims: list[int], sizes: Sequence[Any], whole: Any) -> _Dims | None:
    """So many of the first dimensions as have this number of elements."""
    counts = range(1, len(dims) + 1)
    return next(
        (tuple(dims[:count]) for count in counts if terms.same_size(prod(sizes[at] for at in dims[:count]), whole)),
        None,
    )


def _renamed(dims: _Dims, by: Moves) -> _Dims | None:
    """These dimensions behind the moves; None where one of them is there a part of a dimension."""
    found: list[int] = []
    while dims:
        old, new = next((pair for pair in by if pair[0][:1] == dims[:1]), ((), ()))
        if not old or dims[: len(old)] != old:
            return None
        found += new
        dims = dims[len(old) :]
    return tuple(found)


@dataclass(frozen=True)
class Matrices:
    """A node with the elements of some matrices.

    Attributes:
        node: it, or what it is a view or a copy of, or a view of it.
        lead: dimensions that tell which matrix, the slowest one first.
        rows: that of the rows.
        columns: that of the columns.
    """

    node: fx.Node
    lead: _Dims
    rows: _Dims
    columns: _Dims

    @classmethod
    def of(cls, node: fx.Node, *, turned: bool = False) -> Matrices:
        """A node as a product reads or makes it; ``turned``: with rows and columns in each other's place."""
        rank = node.meta["val"].dim()
        rows, columns = (rank - 2,), (rank - 1,)
        return cls(node, tuple(range(rank - 2)), *((columns, rows) if turned else (rows, columns)))

    def turned(self) -> Matrices:
        """Rows and columns in each other's place."""
        return Matrices(self.node, self.lead, self.columns, self.rows)

    def moved(self, node: fx.Node, by: Moves) -> Matrices | None:
        """The same of a view."""
        lead, rows, columns = (_renamed(dims, by) for dims in (self.lead, self.rows, self.columns))
        return None if lead is None or rows is None or columns is None else Matrices(node, lead, rows, columns)

    def before(self) -> Matrices | None:
        """The same of what the node is a view of, or a copy of a view of."""
        inner = terms.core(self.node)
        by = moves(inner)
        return None if by is None else self.moved(inner.args[0], [(new, old) for old, new in by])  # type: ignore[arg-type]

    def behind(self) -> Matrices | None:
        """The same of the view of it, which alone uses it."""
        users = list(self.node.users)
        by = moves(users[0]) if len(users) == 1 else None
        return None if by is None else self.moved(users[0], by)

    def order(self, rank: int) -> _Dims | None:
        """The dimensions of a node of this rank: first the matrices', then rows and columns; None where others mingle with them.

        Columns are the last dimension. Those of one element stand where one is missing.
        """
        value = terms.tensor(self.node)
        if value is None or value.dim() != rank or len(self.rows) > 1 or len(self.columns) > 1:
            return None
        free = [dim for dim in range(rank) if dim not in {*self.lead, *self.rows, *self.columns}]
        columns = self.columns or tuple(free[-1:])
        free = [dim for dim in free if dim not in columns]
        rows = self.rows or tuple(free[-1:])
        free = [dim for dim in free if dim not in rows]
        lead = tuple(sorted((*self.lead, *free))) if free else self.lead
        order = (*lead, *rows, *columns)
        return order if len(order) == rank and columns == (rank - 1,) else None

    def is_same(self, other: Matrices) -> bool:
        """Whether the other one has the same matrices in dimensions of the same node, but for those of one element."""
        sizes = self.node.meta["val"].shape
        both = [
            [[dim for dim in dims if not terms.same_size(sizes[dim], 1)] for dims in (one.lead, one.rows, one.columns)]
            for one in (self, other)
        ]
        return both[0] == both[1]


def as_matrix(emit: Emit, node: fx.Node) -> fx.Node:
    """All rows of its matrices in one."""
    value = node.meta["val"]
    return node if value.dim() == _MATRIX else emit(_aten.reshape.default, node, [-1, _size(emit, node, -1)])


def with_sizes_of(node: fx.Node, shape: Sequence[Any]) -> fx.Node | None:
    """The node, or what it reshapes, by which ``as_matrices`` gives a matrix with its rows this shape; None if there is none."""
    if sum(not isinstance(size, int) for size in shape) <= 1:
        return node
    while not same_numbers(node.meta["val"].shape[:-1], shape[:-1]):
        source = node.args[0] if terms.calls(node, *terms.RESHAPES) else None
        if not isinstance(source, fx.Node) or not terms.keeps_rows(node, source):
            return None
        node = source
    return node


def as_matrices(emit: Emit, made: fx.Node, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """``made``, a matrix with the rows of ``node``, in this shape."""
    if same_numbers(made.meta["val"].shape, shape):
        return made
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    if sizes.count(-1) > 1:
        sizes = [*(_size(emit, node, at) for at in range(len(shape) - 1)), _size(emit, made, -1)]
    return emit(_aten.view.default, made, sizes)


def _size(emit: Emit, node: fx.Node, dim: int) -> Any:
    """A size; a node that reads it where it is a symbol."""
    size = node.meta["val"].shape[dim]
    return size if isinstance(size, int) else emit(_aten.sym_size.int, node, dim % node.meta["val"].dim())
