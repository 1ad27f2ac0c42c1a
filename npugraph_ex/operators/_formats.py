"""Units in the last place of a floating-point format, for any real number. Plain arithmetic in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        precision: bits of the significand, the hidden one included.
        smallest: exponent of the smallest normal number, 2**smallest.
        largest: the largest finite number.
    """

    precision: int
    smallest: int
    largest: float

    @property
    def roundoff(self) -> float:
        """The largest relative error of rounding to nearest."""
        return 2.0**-self.precision

    @property
    def tiniest(self) -> float:
        """The smallest positive number, and so the ulp of everything below the normal range."""
        return 2.0 ** (self.smallest - self.precision + 1)


# IEEE 754-2019, table 3.5; bfloat16 has float32's exponent range and 8 bits of significand.
FORMATS = {
    torch.float16: Format(11, -14, torch.finfo(torch.float16).max),
    torch.bfloat16: Format(8, -126, torch.finfo(torch.bfloat16).max),
    torch.float32: Format(24, -126, torch.finfo(torch.float32).max),
    torch.float64: Format(53, -1022, torch.finfo(torch.float64).max),
}
"""What `ulp` knows of each dtype of floating point."""


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gap between the neighbours of ``value`` in ``dtype``: 2**(exponent - precision + 1), float64.

    A number that lies on a power of two gets the gap above it. Below the normal range the gap is constant; above the
    largest finite number, and of NaN, it is that of the largest.

    Args:
        value: any shape, any real dtype.
        dtype: float16, bfloat16, float32 or float64.
    """
    shape = FORMATS.get(dtype)
    if shape is None:
        raise ValueError(f"ulp is defined for {', '.join(map(str, FORMATS))}; it was asked for {dtype}.")
    # Without its significand a number is 2**exponent, infinity and NaN are infinite, and one below float64's normal range is 0.
    power = (value.to(torch.float64).view(torch.int64) & _EXPONENT).view(torch.float64)
    return power.clamp(2.0**shape.smallest, 2.0 ** (1 - shape.smallest)) * 2.0 ** (1 - shape.precision)


_EXPONENT = 0x7FF << 52
"""The bits of a float64 that are its exponent."""
