"""Operators that read some rows of a table, which another argument names: the other rows may be unwritten."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch._ops import OpOverload

__all__ = ["RowReads", "reads_rows"]

_TABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "aten::_embedding_bag": ("weight", "indices"),
        "aten::_embedding_bag_forward_only": ("weight", "indices"),
        "aten::_embedding_bag_per_sample_weights_backward": ("weight", "indices"),
        "aten::embedding_renorm_": ("self", "indices"),
        "atb::_npu_rotary_embedding": ("cos_sin_cache", "positions"),
    }
)
"""By operator: the table, and the argument with the numbers of the rows."""


def reads_rows(op: OpOverload) -> bool:
    """Tell whether an operator reads rows of a table."""
    return op._schema.name in _TABLES


class RowReads(NamedTuple):
    """One launch of such an operator, with CPU views in place of its device tensors."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def checked(self, reads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what must be written: the other arguments, and then the rows that are read."""
        given = self._given()
        table, numbers = (given[name] for name in _TABLES[self.op._schema.name])
        named = [row for row in numbers.unique().tolist() if row != given.get("padding_idx", -1)]
        rows = [row for row in named if 0 <= row < len(table)]  # a wrong number is an error of its own
        return [tensor for tensor in reads if tensor is not table] + [table[row : row + 1] for row in rows]

    def carry(self, writes: Sequence[torch.Tensor], marks_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Mark what was written; of a table only rows are, which had been written before."""
        table = self._given()[_TABLES[self.op._schema.name][0]]
        for target in writes:
            marks = marks_of(target)
            if marks is not None and target.data_ptr() != table.data_ptr():
                marks.zero_()

    def _given(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return (
            dict(zip((argument.name for argument in self.op._schema.arguments), self.args, strict=False)) | self.kwargs
        )
