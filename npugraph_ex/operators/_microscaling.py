"""Block formats: 8-bit and 4-bit floats that share a power of two with their neighbours (MX). Holds no operator.

How a block is quantised (CANN operator documentation, aclnnDynamicMxQuantV3), with a its largest magnitude::

    scale_alg 0:  e = floor(log2(a)) - emax          emax is the exponent of the element's largest value
    scale_alg 1:  e = ceil(log2(a / largest))        8-bit elements; a is at least max_low_bound
    scale_alg 2:  e = ceil(log2(a / dst_type_max))   float4_e2m1; its largest value, 6, where dst_type_max is 0
    y     = x / 2^e                                  rounded by round_mode, saturated
    scale = e + 127, as a byte (float8_e8m0fnu)      0 for a block of zeros

Two 4-bit elements lie in one uint8, the first in the lower four bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._precision import refused, round_to, stored_like, unsupported

BIAS = 127
BLOCK = 32
_ROUNDINGS = ("rint", "round", "floor")


class Element(NamedTuple):
    """One format of elements.

    Attributes:
        dtype: the dtype that stores it; ``torch.uint8`` holds two.
        mantissa: bits of its mantissa.
        emax: exponent of its largest value.
        largest: that value.
    """

    dtype: torch.dtype
    mantissa: int
    emax: int
    largest: float

    @property
    def packed(self) -> bool:
        """Whether two lie in one byte."""
        return self.dtype == torch.uint8


E5M2, E4M3 = Element(torch.float8_e5m2, 2, 15, 57344.0), Element(torch.float8_e4m3fn, 3, 8, 448.0)
E2M1, E1M2 = Element(torch.uint8, 1, 2, 6.0), Element(torch.uint8, 2, 0, 1.75)
_MAGNITUDES = {E2M1: (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), E1M2: tuple(code / 4 for code in range(8))}
_NAMED: dict[object, Element] = {
    **dict.fromkeys((23, 291, torch.float8_e5m2), E5M2),
    **dict.fromkeys((24, 292, torch.float8_e4m3fn), E4M3),
    **dict.fromkeys((45, 296, torch.float4_e2m1fn_x2), E2M1),
    297: E1M2,
}


def element_of(code: int | torch.dtype, operator: str, argument: str) -> Element:
    """The format that a dtype argument names, by torch's code, torch_npu's or a dtype."""
    if code not in _NAMED:
        raise unsupported(operator, argument, code, "float8_e5m2, float8_e4m3fn, float4_e2m1fn_x2 and float4_e1m2")
    return _NAMED[code]


class BlockQuantisation(NamedTuple):
    """How blocks are quantised; the module's docstring has the formulas."""

    element: Element
    block: int = BLOCK
    round_mode: str = "rint"
    scale_alg: int = 0
    dst_type_max: float = 0.0
    low_bound: float = 0.0


def block_quantisation(
    operator: str,
    dst_type: int | torch.dtype,
    *,
    block: int = BLOCK,
    round_mode: str = "rint",
    scale_alg: int | None = 0,
    dst_type_max: float | None = 0.0,
    low_bound: float = 0.0,
) -> BlockQuantisation:
    """The arguments of an operator, checked as the device checks them."""
    element, alg = element_of(dst_type, operator, "dst_type"), scale_alg or 0
    modes = _ROUNDINGS if element.packed else _ROUNDINGS[:1]
    if round_mode not in modes:
        raise refused(operator, "round_mode", round_mode, f"one of {', '.join(modes)} for this dst_type")
    algs = {E2M1: (0, 2), E1M2: (0,)}.get(element, (0, 1))
    if alg not in algs:
        raise refused(operator, "scale_alg", alg, f"one of {algs} for this dst_type")
    if dst_type_max and not (alg == 2 and 6.0 <= dst_type_max <= 12.0):
        raise refused(
            operator, "dst_type_max", dst_type_max, "0.0, or 6.0 to 12.0 with float4_e2m1fn_x2 and scale_alg 2"
        )
    return BlockQuantisation(element, block, round_mode, alg, dst_type_max or 0.0, low_bound)


def _ceil_log2(value: torch.Tensor) -> torch.Tensor:
    fraction, exponent = torch.frexp(value)
    return torch.where(fraction > 0.5, exponent, exponent - 1)


def shared_exponent(largest: torch.Tensor, how: BlockQuantisation) -> torch.Tensor:
    """The exponent of a block whose largest magnitude is ``largest``, int32, from -127 to 127."""
    if how.scale_alg == 0:
        _, exponent = torch.frexp(largest)  # the fraction lies in [0.5, 1), so floor(log2) is one less
        shared = exponent - 1 - how.element.emax
    else:
        shared = _ceil_log2(largest.clamp(min=how.low_bound) / (how.dst_type_max or how.element.largest))
    return torch.where(largest == 0, -BIAS, shared.clamp(-BIAS, BIAS))


def rounded(values: torch.Tensor, how: BlockQuantisation) -> torch.Tensor:
    """``values`` rounded to 4-bit elements and saturated, in their own dtype; those of 8 bits are rounded where they are stored."""
    element = how.element
    if not element.packed:
        return values
    _, exponent = torch.frexp(values)
    step = torch.exp2((exponent - 1).clamp(min=0).to(values.dtype) - element.mantissa)
    steps = values / step
    if how.round_mode == "round":
        steps = torch.copysign((steps.abs() + 0.5).floor(), steps)
    else:
        steps = {"rint": torch.round, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc}[how.round_mode](
            steps
        )
    return (steps * step).clamp(-element.largest, element.largest).nan_to_num(0.0)


def pack(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Values [..., 2 N] of a 4-bit format as uint8 [..., N]."""
    table = torch.tensor(_MAGNITUDES[element], dtype=values.dtype, device=values.device)
    codes = torch.bucketize(values.abs().contiguous(), table) + 8 * torch.signbit(values)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def unpack(packed: torch.Tensor, element: Element, wide: torch.dtype) -> torch.Tensor:
    """Bytes [..., N] as the values [..., 2 N] of a 4-bit format."""
    codes = packed.view(torch.uint8).long()
    table = torch.tensor(_MAGNITUDES[element], dtype=wide, device=packed.device)
    return torch.cat([table, -table])[torch.stack([codes & 15, codes >> 4], -1).flatten(-2)]


def stored(like: torch.Tensor, values: torch.Tensor, element: Element) -> torch.Tensor:
    """``values``, rounded, in the dtype that stores them; those of 8 bits have the layout of ``like``."""
    if element.packed:
        return pack(values, element)
    return stored_like(like, round_to(element.dtype, values), element.dtype)


def quantised(
    like: torch.Tensor, x: torch.Tensor, axis: int, how: BlockQuantisation, operator: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)`` of ``x``, of the shape of ``like`` and in the precision of the computation.

    A block is ``how.block`` elements along ``axis``; the last may be shorter. The scales come in pairs of neighbouring blocks:
    uint8 with a last dimension 2, where one that fills up a pair is 0.
    """
    if how.element.packed and x.shape[-1] % 2:
        raise refused(operator, "the last dimension", x.shape[-1], "even, for 4-bit elements lie two in a byte")
    size = x.shape[axis]
    wide = x.movedim(axis, -1)
    blocks = torch.nn.functional.pad(wide, (0, -size % (2 * how.block))).unflatten(-1, (-1, how.block))
    shared = shared_exponent(blocks.abs().amax(-1, keepdim=True), how)
    y = rounded(blocks * torch.exp2(-shared.to(wide.dtype)), how).flatten(-2)[..., :size].movedim(-1, axis)
    return stored(like, y, how.element), pairs((shared + BIAS).squeeze(-1).to(torch.uint8), axis)


def pairs(scale: torch.Tensor, axis: int) -> torch.Tensor:
    """Scales of an even number of blocks in the last dimension, as pairs of neighbours along ``axis``."""
    turned: torch.Tensor = scale.unflatten(-1, (-1, 2)).movedim(-2, axis - 1 if axis < 0 else axis)
    return turned.clone(memory_format=torch.contiguous_format)


def scale_values(scale: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Scales as numbers: bytes, of whichever dtype, are exponents."""
    if scale.element_size() == 1:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(wide)


def times_scales(rows: torch.Tensor, scale: torch.Tensor, sizes: tuple[int, int] | None = None) -> torch.Tensor:
    """``rows`` [..., m, k] with each element times the scale of its block.

    Powers of two [..., m, k / 64, 2] of 32 elements, or numbers [..., m / a, k / b] of blocks of ``sizes`` (a, b).
    """
    values = scale_values(scale, rows.dtype)
    m, k = rows.shape[-2:]
    if scale.element_size() == 1:
        return rows * values.flatten(-2).repeat_interleave(BLOCK, -1)[..., :k]
    size_m, size_k = sizes or (-(-m // values.shape[-2]), -(-k // values.shape[-1]))
    return rows * values.repeat_interleave(size_m, -2)[..., :m, :].repeat_interleave(size_k, -1)[..., :k]


def quantised_groups(
    like: torch.Tensor,
    x: torch.Tensor,
    group_index: torch.Tensor,
    how: BlockQuantisation,
    operator: str,
    *,
    some_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantised`` along the first axis of x [M, N], anew for each group of rows; ``group_index`` [G] has the groups' ends.

    The scales are [M / 64 + G, N, 2]: those of a group begin where no earlier group's can reach. ``some_rows``: the last group may
    end before the last row; the rows behind it are zeros.
    """
    ends = group_index.tolist()
    starts = [0, *ends][: len(ends)]
    covered = bool(ends) and (ends[-1] == x.shape[0] or (some_rows and ends[-1] < x.shape[0]))
    if x.dim() != 2 or not covered or any(a > b for a, b in zip(starts, ends, strict=True)):
        raise refused(
            operator, "x and group_index", (tuple(x.shape), ends), "[M, N] and ends of groups, the last of them M"
        )
    parts = [quantised(like[a:b], x[a:b], 0, how, operator) for a, b in zip(starts, ends, strict=True)]
    scale = torch.zeros(x.shape[0] // (2 * how.block) + len(ends), x.shape[1], 2, dtype=torch.uint8)
    for (_, of_group), start, group in zip(parts, starts, range(len(ends)), strict=True):
        first = start // (2 * how.block) + group
        scale[first : first + len(of_group)] = of_group
    y = torch.cat([y.view(torch.uint8) for y, _ in parts])
    y = torch.nn.functional.pad(y, (0, 0, 0, x.shape[0] - ends[-1]))
    return y.view(how.element.dtype), scale
