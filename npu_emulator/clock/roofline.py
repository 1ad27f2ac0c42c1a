"""How long a kernel takes at least: the larger of its memory time and its arithmetic time, and what a launch costs.

The chip is the 910B with 24 cube and 48 vector cores. Its figures are those of the platform file Ascend910B2C.ini in the
public sources of CANN's runtime (src/platform/platform_config): cube_freq 1800 MHz, a cube of 16 x 16 x 16 multiply-adds a
cycle, ddr_rate 32, which is read here as bytes a cycle and core. They give 354 TFLOPS of float16 and 1.38 TB/s. Three
figures are assumptions of ours, for want of a public one: a task costs 2 us to start, float32 products run at a quarter of
float16's rate, int8 ones at twice.

A stream that is limited to some of the cube cores has that share of the arithmetic peak and, by assumption, the whole
bandwidth. Vector cores have no price: what they do is taken to be bound by memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ASCEND_910B", "Chip"]

_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "npu_quant_matmul": 0, "npu_transpose_batchmatmul": 0}
"""Matrix products, and which argument is the first factor: its last dimension is summed over."""
_RATE = {torch.int8: 2.0, torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 0.25}


@dataclass(frozen=True)
class Chip:
    """What a roofline needs to know of a chip."""

    name: str
    cube_cores: int
    half_flops: float
    """Floating-point operations a second in float16 of all cube cores, a multiply-add counted as two."""
    bandwidth: float
    """Bytes a second from and to device memory."""
    launch_us: float
    """Microseconds that starting a task costs."""

    def kernel_us(
        self,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        cube_cores: int | None = None,
    ) -> float:
        """Return the modelled microseconds of a kernel by what it reads and writes, on `cube_cores` of them or on all."""
        moved = sum(_bytes(tensor) for tensor in (*reads, *writes))
        share = (self.cube_cores if cube_cores is None else cube_cores) / self.cube_cores
        return self.launch_us + 1e6 * max(moved / self.bandwidth, self._arithmetic(name, reads, writes) / share)

    def copy_us(self, moved: int) -> float:
        """Return the modelled microseconds of moving or filling `moved` bytes."""
        return self.launch_us + 1e6 * moved / self.bandwidth

    def _arithmetic(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> float:
        """Return the seconds of a matrix product on all cores; everything else is bound by memory."""
        place = _FIRST_FACTOR.get(name.split(".")[1] if "." in name else name)
        if place is None or place >= len(reads) or not writes:
            return 0.0
        factor = reads[place]
        operations = 2.0 * writes[0].numel() * factor.shape[-1]
        return operations / (self.half_flops * _RATE.get(factor.dtype, 0.25))


def _bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor stands on: an expanded one is read once."""
    kept = [extent for extent, step in zip(tensor.size(), tensor.stride(), strict=True) if step != 0]
    return 0 if tensor.numel() == 0 else math.prod(kept) * tensor.element_size()


_HERTZ, _CORES = 1.8e9, 24
ASCEND_910B = Chip(f"Ascend910B, {_CORES} cube cores", _CORES, _CORES * _HERTZ * 2 * 16**3, _CORES * _HERTZ * 32, 2.0)
