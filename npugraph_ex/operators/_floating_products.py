"""Products of 8-bit floats, hifloat8 too, and 4-bit floats with scales of tensors, rows, columns or blocks. Holds no operator.

Formula (CANN operator documentation, aclnnQuantMatmulV5)::

    out = (x1 * s1) @ (x2 * s2) + bias

s1 and s2 belong to the tensor, to a row of x1 or a column of x2, to blocks of numbers, or are powers of two (float8_e8m0fnu) of 32
elements along K: of shapes [..., m, K / 64, 2] for x1 and [..., K / 64, n, 2] for x2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npugraph_ex.operators._hifloat8 import HIFLOAT8, decode
from npugraph_ex.operators._integers import scale_of
from npugraph_ex.operators._microscaling import BLOCK, element_of, times_scales, unpack
from npugraph_ex.operators._precision import unsupported

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TILE = 128


class FloatingOperand(NamedTuple):
    """A factor: the tensor, the argument that says what its bytes are, its scale, and the name of that argument."""

    tensor: torch.Tensor
    code: int | None
    scale: torch.Tensor | None
    name: str

    @property
    def floating(self) -> bool:
        """Whether the elements are 8-bit or 4-bit floats."""
        return self.tensor.dtype in FLOAT8 or self.packed or self.hifloat

    @property
    def hifloat(self) -> bool:
        """Whether the bytes are hifloat8."""
        return self.tensor.element_size() == 1 and self.code == HIFLOAT8

    @property
    def packed(self) -> bool:
        """Whether two 4-bit floats lie in a byte."""
        return self.tensor.element_size() == 1 and self.code in {45, 296, 297, torch.float4_e2m1fn_x2}

    def check(self, operator: str) -> None:
        """Raise for a dtype argument that the tensor's dtype does not fit."""
        if (
            self.code is not None
            and not self.packed
            and not self.hifloat
            and element_of(self.code, operator, self.name).dtype != self.tensor.dtype
        ):
            raise unsupported(
                operator, self.name, self.code, f"None, {self.tensor.dtype}, and float4_e2m1fn_x2 and hifloat8 in uint8"
            )


def values_of(operator: str, operand: FloatingOperand, wide: torch.dtype, k: int | None = None) -> torch.Tensor:
    """The elements; a right factor with ``k`` rows may be packed along either dimension."""
    operand.check(operator)
    if operand.hifloat:
        return decode(operand.tensor.view(torch.uint8)).to(wide)
    if not operand.packed:
        return operand.tensor.to(wide)
    element = element_of(operand.code or 0, operator, operand.name)
    if k is None or operand.tensor.shape[-2] == k:
        return unpack(operand.tensor, element, wide)
    return unpack(operand.tensor.mT, element, wide).mT


def eight_bits(
    operator: str, factors: tuple[torch.Tensor, torch.Tensor], codes: tuple[int | None, int | None], wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of x1 and x2, each of which has 8 bits."""
    both = [
        FloatingOperand(factor, code, None, name)
        for factor, code, name in zip(factors, codes, ("x1_dtype", "x2_dtype"), strict=True)
    ]
    for operand in both:
        if operand.packed or not operand.floating:
            given = (operand.tensor.dtype, operand.code)
            name = f"{operand.name[:2]} and {operand.name}"
            raise unsupported(operator, name, given, "float8_e4m3fn, float8_e5m2, and uint8 with hifloat8 (290)")
    return values_of(operator, both[0], wide), values_of(operator, both[1], wide)


def _of_blocks(scale: torch.Tensor | None, rank: int, lengths: int = 1) -> bool:
    """Whether a scale has more than one number in its last ``lengths`` dimensions; [m, 1] belongs to rows of the left factor."""
    return scale is not None and (scale.dim() > rank or (scale.dim() == rank > 1 and max(scale.shape[-lengths:]) > 1))


def _sizes(scale: torch.Tensor, rows: int, along: int, deep: int) -> tuple[int, int]:
    """How many rows and how many elements of K have one number."""
    return along or (1 if scale.shape[-2] == rows else _TILE), deep


def floating_product(
    operator: str,
    left: FloatingOperand,
    right: FloatingOperand,
    wide: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    groups: Sequence[int] | None = None,
) -> torch.Tensor:
    """[..., m, n] in ``wide``; ``groups`` has the sizes of blocks along m, n and k, 0 where the shapes tell."""
    a = values_of(operator, left, wide)
    k = a.shape[-1]
    b = values_of(operator, right, wide, k).mT
    along_m, along_n, deep = groups or (0, 0, 0)
    deep = deep or (BLOCK if right.packed else _TILE)
    rows, columns = left.scale, right.scale
    if rows is not None and _of_blocks(rows, a.dim()):
        a = times_scales(a, rows, _sizes(rows, a.shape[-2], along_m, deep))
        rows = None
    if columns is not None and _of_blocks(columns, b.dim(), 2):
        turned = columns.transpose(-3, -2) if columns.element_size() == 1 else columns.mT
        b = times_scales(b, turned, _sizes(turned, b.shape[-2], along_n, deep))
        columns = None
    out = torch.matmul(a, b.mT)
    if columns is not None:
        out = out * scale_of(columns).to(wide)
    if rows is not None:
        factor = rows.to(wide)
        out = out * (factor if factor.numel() == 1 else factor.reshape(*factor.shape[: factor.dim() - 1], -1, 1))
    return out if bias is None else out + bias.to(wide)


_POWERS_OF_TWO = {44, 293, torch.float8_e8m0fnu}
"""What names float8_e8m0fnu: torch's code, torch_npu's and the dtype."""


def check_scales(operator: str, **codes: int | torch.dtype | None) -> None:
    """Raise for a dtype of scales, by the argument's name, that is not a power of two; a tensor's own dtype tells otherwise."""
    for name, code in codes.items():
        if code is not None and code not in _POWERS_OF_TWO:
            raise unsupported(operator, name, code, "None and float8_e8m0fnu (293)")


def are_small_floats(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    codes: tuple[int | None, int | None],
    named: str = "weight_dtype",
) -> bool:
    """Whether both factors are 8-bit or 4-bit floats; raises where x alone is, or a dtype argument names another type."""
    factors = (FloatingOperand(x, codes[0], None, "x_dtype"), FloatingOperand(weight, codes[1], None, named))
    for factor in factors:
        factor.check(operator)
    if factors[0].floating != factors[1].floating and (factors[0].floating or factors[1].packed):
        raise unsupported(
            operator, "x and weight", (x.dtype, weight.dtype), "8-bit and 4-bit floats in both or in none"
        )
    return factors[0].floating


def small_product(
    operator: str,
    factors: tuple[torch.Tensor, torch.Tensor],
    codes: tuple[int | None, int | None],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of the rows [m, k] of one group with its matrix [k, n], each with its scale, in float32.

    It is in float64 where a scale is.
    """
    wide = (
        torch.float64 if any(scale is not None and scale.dtype == torch.float64 for scale in scales) else torch.float32
    )
    left, right = (
        FloatingOperand(factor, code, scale, name)
        for factor, code, scale, name in zip(factors, codes, scales, ("x_dtype", "weight_dtype"), strict=True)
    )
    return floating_product(operator, left, right, wide, bias=bias)
