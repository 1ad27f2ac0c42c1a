"""ATen operators that only move elements: the marks of unwritten bytes move with the elements.

The same operator runs on the marks. Each data tensor is replaced by one mark for each element, which is 1 if a byte of the element
is unwritten. Indices and masks keep their values, and a number counts as written. An operator that adds to earlier values keeps
their marks: an unknown value plus a number is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._ops import OpOverload

__all__ = ["Move", "is_mover"]

_COPIES = """
cat channel_shuffle constant_pad_nd copy copy_ flip _foreach_copy_ native_channel_shuffle pixel_shuffle pixel_unshuffle
reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
roll rot90 split_with_sizes_copy stack tril tril_ triu triu_
"""
_SELECTIONS = """
embedding gather index index_select masked_select take _unsafe_index where
"""
_PARTIAL_WRITES = """
as_strided_scatter diagonal_scatter fill_diagonal_ index_copy index_copy_ index_fill index_fill_ index_put index_put_
_index_put_impl_ masked_fill masked_fill_ masked_scatter masked_scatter_ put put_ scatter scatter_ select_scatter slice_scatter
_unsafe_index_put
"""
_ADDITIONS = frozenset(["index_add", "index_add_", "scatter_add", "scatter_add_"])
_REDUCTIONS = frozenset(["index_reduce", "index_reduce_", "scatter_reduce", "scatter_reduce_"])
"""They may ignore the earlier value of an element that they write. On marks they take the maximum."""
_MOVERS = frozenset((*_COPIES.split(), *_SELECTIONS.split(), *_PARTIAL_WRITES.split())) | _ADDITIONS | _REDUCTIONS
_SELECTORS = frozenset(["condition", "index", "indices", "mask", "repeats"])
"""The names of arguments that say which elements are moved, or how often."""
_NUMBERS = frozenset(["fill_value", "other", "value"])
"""The names of arguments that may be a number to write."""


def is_mover(op: OpOverload) -> bool:
    """Tell whether an operator only moves elements."""
    return op.namespace == "aten" and op.overloadpacket.__name__ in _MOVERS


class Move(NamedTuple):
    """One launch of such an operator, with CPU views in place of its device tensors."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def checked(self, reads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the `reads` that must be written: indices, masks, and what is added to other values."""
        moved = self.args[:1] if self._adds() else [value for name, value in self._named() if name not in _SELECTORS]
        ids = set(map(id, tree_leaves(moved)))
        return [tensor for tensor in reads if id(tensor) not in ids]

    def carry(self, writes: Sequence[torch.Tensor], marks_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Mark what was written as the operator, run on the marks of its arguments, says; `marks_of` is `Shadow.over`."""
        marks: dict[int, torch.Tensor] = {}

        def marked(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in marks:
                each_byte = marks_of(value)
                none = torch.zeros(value.shape, dtype=torch.uint8)  # a tensor of the host
                marks[id(value)] = none if each_byte is None else each_byte.any(-1)
            return marks[id(value)]

        def replaced(name: str, value: Any) -> Any:
            if name in _SELECTORS:
                return value
            if name in _NUMBERS and not isinstance(value, torch.Tensor):
                return 0
            return "amax" if name == "reduce" else tree_map(marked, value)

        given = [replaced(name, value) for name, value in self._named()]
        results: list[Any] = [torch.zeros(target.shape, dtype=torch.uint8) for target in writes]
        if self._adds() and self.op.overloadpacket.__name__ not in _REDUCTIONS:
            results = [marked(self.args[0])]
        elif any(mark.any() for mark in marks.values()):
            kwargs = dict(zip(self.kwargs, given[len(self.args) :], strict=True))
            returned = tree_leaves(self.op(*given[: len(self.args)], **kwargs))
            results = [
                marks[id(target)] if id(target) in marks else returned[place] for place, target in enumerate(writes)
            ]
        for target, now in zip(writes, results, strict=True):
            _store(now, marks_of(target))

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield the arguments with their names."""
        yield from zip((argument.name for argument in self.op._schema.arguments), self.args, strict=False)
        yield from self.kwargs.items()

    def _adds(self) -> bool:
        """Tell whether the earlier values of elements that are written count."""
        name, given = self.op.overloadpacket.__name__, dict(self._named())
        return name in _ADDITIONS or name in _REDUCTIONS or "reduce" in given or bool(given.get("accumulate"))


def _store(now: torch.Tensor, marks: torch.Tensor | None) -> None:
    """Mark all bytes of each element whose mark changes; an element that is unwritten in part, and is kept, stays so."""
    if marks is not None:
        changed = (now != marks.any(-1)).unsqueeze(-1)
        marks.copy_(torch.where(changed, now.unsqueeze(-1), marks))
