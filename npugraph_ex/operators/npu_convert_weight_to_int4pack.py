"""Packs int4 values that come as int32: eight of them in one int32, the first in its lowest four bits.

Source: operator documentation of ``torch_npu.npu_convert_weight_to_int4pack``; the order of the eight from op-plugin's golden.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._int4 import PACKED, pack
from npugraph_ex.operators._precision import refused, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_convert_weight_to_int4pack"


@Operator(
    name="npu::npu_convert_weight_to_int4pack",
    source="operator documentation of torch_npu.npu_convert_weight_to_int4pack",
    dtypes=(torch.int32,),
    examples=(lambda: call(torch.randint(-8, 8, (4, 16)).int()),),
)
def npu_convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """int32 [..., n / 8] for ``weight`` int32 [..., n] with values from -8 to 7; ``inner_k_tiles`` is reserved."""
    if weight.dtype != torch.int32:
        raise unsupported(_NAME, "weight", weight.dtype, "int32 tensors")
    if weight.shape[-1] % PACKED:
        raise refused(_NAME, "weight", weight.shape, "a tensor whose last dimension is a multiple of 8")
    return pack(_NAME, weight)
