"""The integer codes by which ``npu`` operators name a dtype (``int dtype``, ``int? dst_type``, ...).

They are c10's ``ScalarType`` values (c10/core/ScalarType.h). A ``torch.dtype`` passed from Python to such an
argument arrives in the graph as its code, so both spellings must be understood as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from npugraph_ex.operators._precision import unsupported

DTYPE_OF_CODE: Mapping[int, torch.dtype] = MappingProxyType(
    {
        0: torch.uint8,
        1: torch.int8,
        2: torch.int16,
        3: torch.int32,
        4: torch.int64,
        5: torch.float16,
        6: torch.float32,
        7: torch.float64,
        11: torch.bool,
        15: torch.bfloat16,
        23: torch.float8_e5m2,
        24: torch.float8_e4m3fn,
    }
)
"""The dtype of each number by which arguments of operators, such as `dst_type`, name one."""
CODE_OF_DTYPE: Mapping[torch.dtype, int] = MappingProxyType({dtype: code for code, dtype in DTYPE_OF_CODE.items()})
"""The number of each dtype."""


CODES = (*DTYPE_OF_CODE, 44, 45, 285, *range(290, 298))
"""The numbers that name a dtype of torch or of torch_npu: float8_e8m0fnu and float4_e2m1fn_x2, int4, hifloat8 to float4_e1m2."""
_OF_TORCH_NPU: Mapping[int, int] = MappingProxyType({291: 23, 292: 24})
"""torch_npu's own codes of types that torch has: float8_e5m2, float8_e4m3fn."""


def dtype_of(code: int | torch.dtype, operator: str, argument: str) -> torch.dtype:
    """The dtype that ``code`` names; types that torch does not have raise ``UnsupportedArgumentError``."""
    if isinstance(code, torch.dtype):
        return code
    code = _OF_TORCH_NPU.get(code, code)
    if code not in DTYPE_OF_CODE:
        names = ", ".join(f"{number} ({dtype})" for number, dtype in DTYPE_OF_CODE.items())
        raise unsupported(operator, argument, code, names)
    return DTYPE_OF_CODE[code]
