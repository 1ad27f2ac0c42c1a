"""Keys and values that are written to the slots of a paged cache => `npu_scatter_pa_kv_cache`, one kernel for two.

::

    key_cache.view(-1, N, D).index_copy_(0, slots, key)
    value_cache.view(-1, N, D).index_copy_(0, slots, value)

`scatter_` with slots that are expanded over the rows is the same write. The operator takes keys and values [T, N, D] and caches
[blocks, size, N, D], all dense: an NPU reads tensors with gaps wrongly (operator documentation of
``torch_npu.npu_scatter_pa_kv_cache``). It leaves negative slots out. `index_copy_` and `scatter_` refuse them;
``cache[slots] = key`` counts them from the end, so it is another program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike

_aten = torch.ops.aten
INDEX_COPY = _aten.index_copy.default
_SCATTER = _aten.scatter.src
_INDEX_PUT = _aten.index_put.default
_VIEWS = (_aten.view.default, _aten.reshape.default)
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class CacheWrite:
    """``cache`` with new rows, as `index_copy` makes it.

    Attributes:
        node: the cache with the rows in it.
        cache: what it is a view of.
        dim: the dimension of the cache's view that ``index`` counts.
        index: where each row goes.
        rows: what is written.
    """

    node: fx.Node
    cache: fx.Node
    dim: int
    index: fx.Node
    rows: fx.Node

    @classmethod
    def of(cls, node: fx.Node) -> CacheWrite | None:
        """The write that ``node`` is; None where it is none."""
        if not terms.calls(node, INDEX_COPY, _SCATTER):
            return None
        view, dim, index, rows = node.args
        index = _expanded_over(rows, index, dim) if terms.calls(node, _SCATTER) else index
        cache = view.args[0] if terms.calls(view, *_VIEWS) else view
        value = terms.tensor(view)
        if value is None or not all(isinstance(one, fx.Node) for one in (cache, index, rows)):
            return None
        return cls(node, cache, dim % value.dim(), index, rows)  # type: ignore[arg-type,operator]

    def is_paged(self) -> bool:
        """Whether the cache is [blocks, size, ...], and each row a token of it."""
        cache, flat = self.cache.meta["val"], self.node.meta["val"]
        return (
            self.dim == 0
            and cache.dim() >= 3
            and terms.same_size(flat.shape[0], cache.shape[0] * cache.shape[1])
            and terms.same_size(math.prod(flat.shape[1:]), math.prod(cache.shape[2:]))
        )


def write_before(write: CacheWrite) -> CacheWrite | None:
    """The last write before this one that has the same index; None where there is none."""
    before = [one for one in map(CacheWrite.of, _writes_at(write.index)) if one is not None and one.node < write.node]
    return max(before, key=lambda one: one.node) if before else None


def _writes_at(index: fx.Node) -> Iterator[fx.Node]:
    """What writes at an index, or at an expansion of it."""
    for user in index.users:
        if terms.calls(user, *_VIEWS, _aten.unsqueeze.default, _aten.expand.default):
            yield from _writes_at(user)
        elif terms.calls(user, INDEX_COPY, _SCATTER):
            yield user


def _expanded_over(rows: Any, places: Any, dim: Any) -> fx.Node | None:
    """The index whose entries ``places`` repeats for all elements of a row; None where an element has a place of its own."""
    wide, whole = terms.tensor(places), terms.tensor(rows)
    if dim != 0 or wide is None or whole is None or not same_numbers(wide.shape, whole.shape):
        return None
    narrow: Any = places.args[0] if terms.calls(places, _aten.expand.default) else places
    value = terms.tensor(narrow)
    if value is None or not same_numbers(value.shape, (wide.shape[0], *[1] * (wide.dim() - 1))):
        return None
    return next((one for one in terms.reshaped_from(narrow) if one.meta["val"].dim() == 1), None)


def flat(emit: Emit, cache: fx.Node, like: fx.Node) -> fx.Node:
    """A paged cache in the shape of the view that the program wrote."""
    return emit(_aten.view.default, cache, [-1, *like.meta["val"].shape[1:]])


def is_dense(node: fx.Node) -> bool:
    """Whether the memory of the tensor has no gaps, in the order of its elements."""
    value = terms.tensor(node)
    return value is not None and value.is_contiguous()


class _PagedWrites:
    """The form."""

    name = "lift_paged_cache"
    ends_with = frozenset({INDEX_COPY, _SCATTER, _INDEX_PUT})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The two writes of which ``node`` is the second."""
        if terms.calls(node, _INDEX_PUT):
            return _by_index(node)
        value = CacheWrite.of(node)
        key = None if value is None else write_before(value)
        if value is None or key is None or not key.is_paged() or not value.is_paged():
            return None
        caches, rows = (key.cache, value.cache), (key.rows, value.rows)
        shapes = [one.meta["val"].shape for one in (*caches, *rows)]
        if any(len(shape) != rank for shape, rank in zip(shapes, (4, 4, 3, 3), strict=True)):
            return Unlike(node, f"caches and rows are {', '.join(str(list(shape)) for shape in shapes)}")
        dtypes = {one.meta["val"].dtype for one in (*caches, *rows)}
        if len(dtypes) > 1 or not dtypes <= set(_TAKEN):
            return Unlike(node, f"caches and rows are {', '.join(sorted(map(str, dtypes)))}")
        strided = [one.name for one in (*rows, *caches, key.index) if not is_dense(one)]
        if strided:
            return Unlike(node, f"{' and '.join(strided)} has gaps in memory; the operator takes dense tensors")
        if caches[0] is caches[1]:
            return None

        def build(emit: Emit, *operands: fx.Node) -> tuple[fx.Node, ...]:
            operator = torch.ops.npu.npu_scatter_pa_kv_cache_functional.default
            written = emit(operator, *operands, cache_mode="Norm")
            return tuple(flat(emit, emit(getitem, written, at), one.node) for at, one in enumerate((key, value)))

        inputs = (*rows, *caches, key.index)
        return Proposal(inputs, (key.node, value.node), (build,), rounds_alike=True, places=(key.index,))


def _by_index(node: fx.Node) -> Unlike | None:
    """Why the second of two writes ``cache[slots] = rows`` is left alone."""
    view, indices, *_ = node.args
    slots = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    if not isinstance(slots, fx.Node) or not terms.calls(view, *_VIEWS) or not isinstance(view.args[0], fx.Node):
        return None
    before = [user for user in slots.users if user < node and terms.calls(user, _INDEX_PUT)]
    write = CacheWrite(node, view.args[0], 0, slots, node)
    if not before or not write.is_paged() or slots.meta["val"].dtype != torch.int64:
        return None
    return Unlike(
        node, "a negative slot counts from the end in cache[slots] = rows; index_copy_(0, slots, rows) can be lifted",
        lines="cache.index_copy_(0, slots, rows)   # where no slot is negative",
    )  # fmt: skip


FORM = _PagedWrites()
