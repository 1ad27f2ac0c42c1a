"""Keys and values that are stored in int8, brought back; attention wholly in int8; results that are handed out in 8 bits.

Formula (operator documentation of ``torch_npu.npu_fused_infer_attention_score``)::

    operand = (stored + offset) * scale         output = round(result * scale + offset)

Whose scale it is, the mode says:

===== ==================================== ==========================================
mode  each has its own                     shape of scale and offset
===== ==================================== ==========================================
0     channel, or none                     [N, D], [N * D], [1, N, 1, D]; [1]
1     token                                [B, S] or [1, B, S]
2     head                                 [N]
3     token and head                       [B, N, S]
4     token, in pages                      [blocks, size]
5     token and head, in pages             [blocks, N, size]
===== ==================================== ==========================================

Wholly in int8 (the same document; CANN's published kernels and op-plugin's test show that the exponentials are rounded before
they are divided by their sum; a device does so block by block, with the maximum so far)::

    scores = (Q K^T) * dequant_scale1 * scale           e = exp(scores - max(scores))
    output = (round(e * quant_scale1) V) * dequant_scale2 / sum(e)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._integers import scale_of
from npugraph_ex.operators._precision import refused, round_to, round_to_int8, unsupported

__all__ = ["Dequantiser", "Int8Products", "OutputQuantiser", "of_both"]


class Dequantiser(NamedTuple):
    """How one operand is brought back."""

    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    mode: int = 0

    def __call__(self, operator: str, operand: torch.Tensor, block_table: torch.Tensor | None) -> torch.Tensor:
        """The operand [B, N, S, D] in its precision, of what was stored."""
        if self.scale is None:
            return operand
        scale = self._shaped(operator, self.scale.to(operand.dtype), operand, block_table)
        if self.offset is not None:
            operand = operand + self._shaped(operator, self.offset.to(operand.dtype), operand, block_table)
        return operand * scale

    def _shaped(
        self, operator: str, given: torch.Tensor, operand: torch.Tensor, block_table: torch.Tensor | None
    ) -> torch.Tensor:
        """A scale or offset that broadcasts to [B, N, S, D]."""
        batch, heads, rows, size = operand.shape
        if self.mode in {4, 5} and block_table is not None:
            blocks = block_table.long().clamp(0, given.shape[0] - 1)
            if self.mode == 4:
                return given.reshape(given.shape[0], -1)[blocks].reshape(batch, 1, -1, 1)
            return given[blocks].transpose(1, 2).reshape(batch, heads, -1, 1)
        if self.mode == 1:
            return given.reshape(-1, given.shape[-1])[:, None, :rows, None]
        if self.mode == 3:
            return given.reshape(batch, heads, -1)[..., :rows].unsqueeze(-1)
        if self.mode == 2:
            return given.reshape(heads, 1, 1)
        if self.mode == 0:
            return given.reshape(()) if given.numel() == 1 else given.reshape(heads, 1, size)
        raise unsupported(operator, "antiquant_mode", self.mode, "0 to 5, of which 4 and 5 need a block_table")


class Int8Products(NamedTuple):
    """The three numbers [1] of attention wholly in int8: after the first product, before the second, and after it."""

    first: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    second: torch.Tensor | None = None

    @property
    def there(self) -> bool:
        """Whether the call has them."""
        return self.first is not None

    def check(self, operator: str, names: Sequence[str]) -> None:
        """Raise if only some are given, or if one has several elements."""
        missing = [name for name, value in zip(names, self, strict=True) if value is None]
        if 0 < len(missing) < len(self):
            raise refused(operator, missing[0], None, f"a tensor beside the others of {', '.join(names)}")
        for name, value in zip(names, self, strict=True):
            if value is not None and value.numel() != 1:
                raise refused(operator, name, tuple(value.shape), "one number for the whole tensor")

    def rounded(self, exponentials: torch.Tensor) -> torch.Tensor:
        """The exponentials as the second product takes and weighs them."""
        assert self.shares is not None  # noqa: S101 - see `check`
        assert self.second is not None  # noqa: S101 - as above
        wide = exponentials.dtype
        return round_to_int8(exponentials * _number(self.shares, wide)).to(wide) * _number(self.second, wide)

    def of_scores(self, wide: torch.dtype) -> torch.Tensor | float:
        """What the first product is multiplied with."""
        return 1.0 if self.first is None else _number(self.first, wide)


def _number(given: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return scale_of(given).to(wide).reshape(())


class OutputQuantiser(NamedTuple):
    """How the result is stored: ``round(result * scale + offset)`` in 8 bits, each channel [N, D] with its own, or all with one."""

    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    dtype: torch.dtype = torch.int8

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        """The result [B, N, S, D] in 8 bits; unchanged without a scale."""
        if self.scale is None:
            return result
        quotient = result * self._shaped(self.scale, result)
        return round_to(self.dtype, quotient if self.offset is None else quotient + self._shaped(self.offset, result))

    @staticmethod
    def _shaped(given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """A scale or offset that broadcasts to [B, N, S, D]."""
        shape = () if given.numel() == 1 else (result.shape[1], 1, result.shape[3])
        return given.to(result.dtype).reshape(shape)


def of_both(scale: torch.Tensor | None, offset: torch.Tensor | None, mode: int) -> tuple[Dequantiser, Dequantiser]:
    """The two of a call that gives scale and offset of keys and values one behind the other."""
    key, value = (
        Dequantiser(None if scale is None else scale[i], None if offset is None else offset[i], mode) for i in range(2)
    )
    return key, value
