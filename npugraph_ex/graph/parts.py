"""Functional forms of writes into a part of a tensor: which operators they are, and which part each writes.

AOT turns `x[4:].copy_(y)` into `slice_scatter(x, y, 0, 4)`: new memory with the elements of `x`, except for the part, which
has those of `y`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.graph.metadata import executed
from npugraph_ex.graph.operators import schema_of
from npugraph_ex.operators import record_of

_aten = torch.ops.aten

SCATTERS: dict[object, OpOverload] = {
    _aten.select_scatter.default: _aten.select.int,
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
}
"""`x_scatter(base, source, *where)` is `x(base, *where).copy_(source)` on a base that nothing else needs."""

_WRITERS: dict[object, OpOverload] = {**SCATTERS, _aten.as_strided_scatter.default: _aten.as_strided.default}

_BY_INDEX = frozenset(
    f"aten::{name}"
    for name in (
        "index_put", "_unsafe_index_put", "index_copy", "index_add", "index_fill", "index_reduce", "masked_scatter",
        "scatter", "scatter_add", "scatter_reduce", "put",
    )
)  # fmt: skip
"""torch's operators that write elements by index tensors. Other operators have this fact in their records."""

MADE_COPY = "made_copy"
"""The key of ``node.meta`` that marks a copy which the compiler made because a custom operator writes in place."""


def writes_a_part(node: fx.Node) -> bool:
    """Whether ``node`` is a functional write into a part, which its arguments give."""
    return node.target in _WRITERS and len(node.args) > 1


def writes_by_index(node: fx.Node) -> bool:
    """Whether ``node`` writes elements that are known only at run time, in place or into a copy."""
    schema, record = schema_of(node), record_of(node.target)
    by_index = schema is not None and schema.name.removesuffix("_") in _BY_INDEX
    return (by_index or (record is not None and record.writes_by_index)) and isinstance(node.args[0], fx.Node)


def is_made_copy(node: fx.Node) -> bool:
    """Whether ``node`` is a copy that the compiler made for a write in place."""
    return MADE_COPY in node.meta and node.target is _aten.clone.default


def part_written(node: fx.Node, mode: FakeTensorMode | None, into: fx.Node | None = None) -> torch.Tensor:
    """The part that such a node writes, as a view of its base's fake tensor, or of the similar value ``into``."""
    base, _, *where = node.args
    base = base if into is None else into
    args, kwargs = fx.map_arg(((base, *where), node.kwargs), lambda argument: argument.meta["val"])
    part: Any = executed(_WRITERS[node.target], args, kwargs, mode)
    assert isinstance(part, torch.Tensor)  # noqa: S101 - for the type checker
    return part
