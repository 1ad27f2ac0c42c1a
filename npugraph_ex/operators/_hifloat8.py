"""HiFloat8: an 8-bit float with few bits of exponent near 1 and many far from it. Holds no operator.

Bits, from the highest (Luo et al., Ascend HiFloat8 Format for Deep Learning, arXiv:2409.16626)::

    sign | dot | exponent | mantissa        dot 11, 10, 01, 001, 0001: 4, 3, 2, 1, 0 bits of exponent; the rest is mantissa
    exponent: its sign, then its magnitude without the leading 1; none stands for 0
    value    = 2^exponent * 1.mantissa
    dot 0000 = 2^(m - 23) for its three bits m, and zero where they are 0; with the sign NaN
    the largest exponent with mantissa 1 is infinity

A tie rounds away from zero. torch has no such dtype: torch_npu stores it in uint8 and names it by the code 290.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from npugraph_ex.operators._precision import largest_of, round_to

HIFLOAT8 = 290
"""torch_npu's code."""
LARGEST = 32768.0
_NAN = 0x80


def _value(byte: int) -> float:
    """What a byte without a sign stands for."""
    dots = ((0b11, 5, 4), (0b10, 5, 3), (0b01, 5, 2), (0b001, 4, 1), (0b0001, 3, 0))
    fields = next(((rest, width) for dot, rest, width in dots if byte >> rest == dot), None)
    if fields is None:
        return 2.0 ** (byte - 23) if byte else 0.0
    rest, width = fields
    mantissa_bits = rest - width
    mantissa, exponent = byte & (1 << mantissa_bits) - 1, byte >> mantissa_bits & (1 << width) - 1
    if width:
        leading = 1 << width - 1
        magnitude = leading | exponent & leading - 1
        exponent = -magnitude if exponent & leading else magnitude
    if (exponent, mantissa) == (15, 1):
        return math.inf
    return math.ldexp(1 + mantissa / (1 << mantissa_bits), exponent)


@functools.cache
def _tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(values, bytes, bounds)``: the value of each byte [256]; finite magnitudes' bytes in order, and the ties between them."""
    magnitudes = [_value(byte) for byte in range(128)]
    values = [*magnitudes, *(-value for value in magnitudes)]
    values[_NAN] = math.nan
    order = sorted(range(128), key=magnitudes.__getitem__)
    ordered = [magnitudes[byte] for byte in order]
    ties = [(low + high) / 2 for low, high in itertools.pairwise(ordered[:-1])]
    bounds = [*ties, LARGEST * 1.25]  # infinity stands where 1.5 times the largest would
    return torch.tensor(values), torch.tensor(order, dtype=torch.uint8), torch.tensor(bounds, dtype=torch.float64)


def decode(stored: torch.Tensor) -> torch.Tensor:
    """The values of bytes: float32, of the same shape."""
    return _tables()[0].to(stored.device)[stored.long()]


def encode(x: torch.Tensor, *, saturate: bool) -> torch.Tensor:
    """The nearest bytes: uint8, of the same shape; beyond the largest number, that number or infinity."""
    _, codes, bounds = (table.to(x.device) for table in _tables())
    magnitude = x.double().abs()
    magnitude = magnitude.clamp(max=LARGEST) if saturate else magnitude
    found = codes[torch.bucketize(magnitude.contiguous(), bounds, right=True)]
    signed = torch.where((x < 0) & (found > 0), found | _NAN, found)
    return torch.where(x.isnan(), _NAN, signed)


def eight_bit(target: torch.dtype, quotient: torch.Tensor) -> torch.Tensor:
    """``quotient`` rounded to the dtype of a quantised result, of which uint8 stands for hifloat8; saturated."""
    return encode(quotient, saturate=True) if target == torch.uint8 else round_to(target, quotient)


def largest_eight_bit(target: torch.dtype) -> float:
    """The largest value of such a dtype."""
    return LARGEST if target == torch.uint8 else largest_of(target)
