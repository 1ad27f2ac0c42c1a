"""Quantisation to 8-bit and 4-bit floats of rows on their way to experts, by the ``quant_mode`` of ``npu_moe_init_routing_v2``.

Formula (op-plugin, test/test_custom_ops/test_npu_moe_init_routing_v2.py), a the largest magnitude of a row or of its block::

    2, 3, 16, 17:   y = x / 2^e, e = ceil(log2(a / largest))             float8_e5m2 and float8_e4m3fn, blocks of 32
    4, 5, 14, 15:   the same in blocks of 128, whose scale is a float32
    6, 7, 8:        y = x;  x * scale;  x / s, s = a / 32768             hifloat8
    9:              y = x / 2^e, e = floor(log2(a)) - 2                  float4_e2m1, blocks of 32
    11, 12:         y = x / s, s = a / largest, 0 if subnormal           float8_e5m2 and float8_e4m3fn, blocks of 128

The document names the first form RoundScale; the code beside its text rounds the power otherwise, and the test is followed.
In the modes 14 to 17 a is 0.0001 at least. In the modes with blocks of 32 a of a float16 row loses the bits that bfloat16 lacks.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators import _hifloat8
from npugraph_ex.operators._microscaling import (
    BIAS,
    BLOCK,
    E2M1,
    E4M3,
    E5M2,
    BlockQuantisation,
    Element,
    pairs,
    quantised,
    shared_exponent,
)
from npugraph_ex.operators._precision import round_to

_CAST, _PER_TENSOR, _PER_TOKEN, _FLOAT4 = 6, 7, 8, 9
HIFLOAT8_MODES = frozenset({_CAST, _PER_TENSOR, _PER_TOKEN})
_ELEMENTS: dict[int, Element] = {
    **dict.fromkeys((2, 4, 11, 14, 16), E5M2),
    **dict.fromkeys((3, 5, 12, 15, 17), E4M3),
    _FLOAT4: E2M1,
}
FLOAT_MODES = HIFLOAT8_MODES | frozenset(_ELEMENTS)
_POWERS_OF_32, _CLAMPED, _QUOTIENTS = frozenset({2, 3, 16, 17}), frozenset({14, 15, 16, 17}), frozenset({11, 12})
_GROUP, _LEAST = 128, 0.0001
_SMALLEST_NORMAL = 2.0**-126


def to_floats(
    x: torch.Tensor, rows: torch.Tensor, mode: int, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(expanded_x, expanded_scale)`` of ``rows`` [R, H], which are those of ``x`` in the precision of the computation."""
    if mode in HIFLOAT8_MODES:
        return _hifloats(rows, mode, scale)
    element = _ELEMENTS[mode]
    if mode == _FLOAT4:
        y, powers = quantised(rows, rows, -1, BlockQuantisation(element))
        return y, powers.view(torch.float8_e8m0fnu)
    block = BLOCK if mode in _POWERS_OF_32 else _GROUP
    both = 2 * block if mode in _POWERS_OF_32 | _QUOTIENTS else block
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % both)).unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1, keepdim=True)
    if block == BLOCK and x.dtype == torch.float16 and rows.dtype == torch.float32:
        largest = (largest.view(torch.int32) & -65536).view(torch.float32)
    padding = torch.arange(blocks.shape[-2]).unsqueeze(-1) * block >= rows.shape[-1]
    largest = largest.clamp(min=_LEAST).masked_fill(padding, 0) if mode in _CLAMPED else largest
    if mode in _QUOTIENTS:
        scales = largest / element.largest
        scales = torch.where(scales < _SMALLEST_NORMAL, 0.0, scales)
        stored = pairs(scales.squeeze(-1), -1)
        quotient = (blocks / scales).nan_to_num(0.0, torch.inf, -torch.inf)
    else:
        power = shared_exponent(largest, BlockQuantisation(element, scale_alg=1)).clamp(min=1 - BIAS)
        scales = torch.where(largest == 0, 0.0, torch.exp2(power.to(rows.dtype)))
        quotient = torch.where(largest == 0, blocks, blocks / scales)
        stored = scales.squeeze(-1)
        if block == BLOCK:
            stored = torch.where(largest == 0, 0, power + BIAS).squeeze(-1).to(torch.uint8).view(torch.float8_e8m0fnu)
    return round_to(element.dtype, quotient.flatten(-2)[..., : rows.shape[-1]]), stored


def _hifloats(rows: torch.Tensor, mode: int, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of hifloat8, and a scale for each row or none."""
    if mode == _PER_TENSOR and scale is None:
        raise ValueError("npu_moe_init_routing_v2: quant_mode 7 takes scale [1]; it is None.")
    if mode != _PER_TOKEN:
        factor = scale.to(rows.dtype) if mode == _PER_TENSOR and scale is not None else 1.0
        return _hifloat8.encode(rows * factor, saturate=mode == _PER_TENSOR), rows.new_zeros(())
    scales = rows.abs().amax(-1, keepdim=True) / _hifloat8.LARGEST
    return _hifloat8.encode(rows / torch.where(scales == 0, 1.0, scales), saturate=True), scales.squeeze(-1)
