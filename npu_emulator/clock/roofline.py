"""The least time of a kernel: the largest of its memory, matrix and vector times, plus the cost of a launch.

`npu_emulator.chips` has the chip's figures and their sources. Two more are our assumptions, because no public figure exists:
a task takes 2 us to start, and float32 products run at a quarter of float16's rate.

The time of a matrix product follows from the cube cores of its stream, the time of every other kernel from the vector cores:
one operation for each element of the largest tensor, which is a lower bound. A kernel that reports its operations, or whose
products were counted as it ran (`products`), such as attention, takes the longer of its two times, because both kinds of cores
run side by side. By assumption a stream that is
limited to some cores still has the whole bandwidth. Of an operand of which a kernel takes or writes some rows only, such as a
cache or an embedding's table, those rows count; which experts a grouped product needs nobody knows before, so all of them count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_emulator.chips import Chip

__all__ = ["LAUNCH_US", "Roofline", "bytes_of"]

LAUNCH_US = 2.0
"""Microseconds to start a task."""
_FIRST_FACTORS: Mapping[str, int] = MappingProxyType(
    {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
)
"""torch's matrix products, and the position of the first factor, over whose last dimension the product sums."""
_TAKING_ROWS = frozenset(
    {"aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::_unsafe_index"}
)
"""Operators that read as much of their first operand as they write."""
_WRITING_ROWS = frozenset(
    ["aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_", "aten::scatter_", "npu::npu_scatter_nd_update_"]
)
"""Operators that write as much of their first operand as they are given for it."""
_RATE = {torch.int8: 2.0, torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 0.25}
_NARROWEST = 2
"""Bytes of the narrowest element for vector units; they widen single bytes first."""


@dataclass(frozen=True)
class Roofline:
    """Modelled times on one chip.

    Attributes:
        chip: its figures.
        first_factors: the matrix products besides torch's own, and the position of the first factor.
    """

    chip: Chip
    first_factors: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The chip and its size."""
        return f"{self.chip.name}, {self.chip.cube_cores} cube cores"

    def kernel_us(
        self,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        work: tuple[float, float] | None = None,
        cube_cores: int | None = None,
        vector_cores: int | None = None,
    ) -> float:
        """Return the modelled microseconds of a kernel from its reads and writes, on the given number of cores or on all.

        `work` has the numbers of its matrix operations and of its operations on single elements, if the kernel reports them.
        """
        chip = self.chip
        moved = self.kernel_bytes(name, reads, writes)
        reads, writes = _touched(name, reads, writes)
        product = self._product_operations(name, reads, writes)
        elements = 0.0 if product is not None else max(map(_computed_bytes, (*reads, *writes)), default=0)
        if work is not None:
            product = work[0] / (_RATE.get(reads[0].dtype, 0.25) if reads else 1.0)
            elements = work[1] * (max(reads[0].element_size(), _NARROWEST) if reads else _NARROWEST)
        cubes = (chip.cube_cores if cube_cores is None else cube_cores) / chip.cube_cores
        vectors = (chip.vector_cores if vector_cores is None else vector_cores) / chip.vector_cores
        arithmetic = max((product or 0.0) / (chip.half_flops * cubes), elements / (chip.vector_bytes * vectors))
        return LAUNCH_US + 1e6 * max(moved / chip.bandwidth, arithmetic)

    def kernel_bytes(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> int:
        """Return the bytes that a kernel moves from and to memory."""
        reads, writes = _touched(name, reads, writes)
        return sum(bytes_of(tensor) for tensor in (*reads, *writes))

    def counted_us(self, name: str, reads: Sequence[torch.Tensor], *, cube_cores: int) -> float:
        """Return the microseconds of one operation of a counted product; 0 for a kernel whose first factor is known.

        It takes the rate of the first tensor's dtype.
        """
        if self._position_of(name) is not None:
            return 0.0
        rate = _RATE.get(reads[0].dtype, 0.25) if reads else 1.0
        return 1e6 * self.chip.cube_cores / (rate * self.chip.half_flops * cube_cores)

    def copy_us(self, moved: int) -> float:
        """Return the modelled microseconds of moving or filling `moved` bytes."""
        return LAUNCH_US + 1e6 * moved / self.chip.bandwidth

    def _product_operations(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> float | None:
        """Return the operations of a matrix product, in float16 operations; None for another kernel."""
        position = self._position_of(name)
        if position is None or position >= len(reads) or not writes:
            return None
        factor = reads[position]
        return 2.0 * writes[0].numel() * factor.shape[-1] / _RATE.get(factor.dtype, 0.25)

    def _position_of(self, name: str) -> int | None:
        operator = _operator(name)
        return self.first_factors.get(operator, _FIRST_FACTORS.get(operator))


def _operator(name: str) -> str:
    return "::".join(name.split(".")[:2])


def _touched(
    name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the operands with, for one of which only rows are read or written, those rows."""
    operator = _operator(name)
    if operator in _TAKING_ROWS and reads and writes:
        return (min(reads[0], writes[0], key=bytes_of), *reads[1:]), writes
    if operator in _WRITING_ROWS and len(reads) > 1:
        rows = max(reads[1:], key=bytes_of)
        if bytes_of(rows) < bytes_of(reads[0]):
            return reads[1:], (rows,)
    return reads, writes


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of memory under a tensor; an expanded tensor is read once."""
    kept = [extent for extent, step in zip(tensor.size(), tensor.stride(), strict=True) if step != 0]
    return 0 if tensor.numel() == 0 else math.prod(kept) * tensor.element_size()


def _computed_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that vector units process for a tensor; an expanded tensor is processed in full."""
    return tensor.numel() * max(tensor.element_size(), _NARROWEST)
