"""One record an operator, each in the file of its name: what the operator computes, and all else that the library knows of it.

The fields of a record, and who reads them, are in ``Operator``. ``OPERATORS`` holds all records by operator name. Every file here
whose name has no leading underscore holds a record and is loaded with the package, so a new operator is a new file and no list
names it. Closely related operators (forward and backward, in-place and functional twin) may share the file of one of them. The
package is loaded when a record is first asked for, not by ``import npugraph_ex``.

Formulas are plain ATen with exactly their operator's signature. They compute in float32 for float16, bfloat16 and float32 inputs
and round once, at each output's documented dtype; for float64 inputs they compute, and answer, wholly in float64, so that the same
function serves as kernel on an emulated device and as judge of one. Nothing here touches a device, a dispatcher or a graph. An
argument value that a formula does not cover raises ``unsupported(...)``, never a wrong number; a call that the device itself
refuses raises ``refused(...)``, with the device's error code.
"""

from __future__ import annotations

import importlib
import pkgutil

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._formats import FORMATS, Format, ulp
from npugraph_ex.operators._interpreter import (
    CpuInterpreter,
    PreparedGraph,
    cast_to_float64,
    on_host,
    on_host_in_float64,
)
from npugraph_ex.operators._precision import RefusedArgumentError, UnsupportedArgumentError, refused, unsupported
from npugraph_ex.operators._ranks import Exchange, Ranks, together
from npugraph_ex.operators._record import Call, Canonical, Operator, Work, call, formula_of, record_of
from npugraph_ex.operators._registry import OPERATORS, OperatorRecordError
from npugraph_ex.operators._scalar_types import CODE_OF_DTYPE, DTYPE_OF_CODE

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "CODE_OF_DTYPE",
    "DTYPE_OF_CODE",
    "FORMATS",
    "OPERATORS",
    "Alike",
    "Call",
    "Canonical",
    "CpuInterpreter",
    "Exchange",
    "Format",
    "Operator",
    "OperatorRecordError",
    "PreparedGraph",
    "Ranks",
    "RefusedArgumentError",
    "UnsupportedArgumentError",
    "Work",
    "call",
    "cast_to_float64",
    "formula_of",
    "on_host",
    "on_host_in_float64",
    "record_of",
    "refused",
    "together",
    "ulp",
    "unsupported",
]
