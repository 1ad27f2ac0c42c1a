"""What a node effectively passes for each argument of its operator's schema.

Two nodes that call one operator do the same exactly when these values are equal, however they were spelled: omitted or
written out, positional or by keyword, as a dtype or as its code, as ``None`` or as the value that ``None`` stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.fusion.spellings import SPELLINGS, Spelling
from npugraph_ex.operators import CODE_OF_DTYPE

# operator -> argument -> {written value: the value that it equals}. Source: the operators' own documentation; None for
# most of these arguments means int8 (code 1).
_MEANS_NONE: Mapping[str, Mapping[str, Mapping[object, object]]] = MappingProxyType(
    {
        "npu::npu_dynamic_quant": {"dst_type": {1: None}},
        "npu::npu_dynamic_quant_asymmetric": {"dst_type": {1: None}},
        "npu::npu_add_rms_norm_dynamic_quant": {"y_dtype": {1: None}},
        "npu::npu_add_rms_norm_quant": {"dst_type": {1: None}},
        "npu::npu_quant_matmul": {"output_dtype": {1: None}},
        "npu::npu_swiglu_quant": {"dst_type": {1: None}},
        # qint8, quint8 and qint32 ask for plain int8, uint8 and int32 results.
        "npu::npu_quantize": {"dtype": {12: 1, 13: 0, 14: 3}},
    }
)


class _Slot:
    """One schema argument, prepared for reading it off many nodes."""

    __slots__ = ("default", "equal", "is_code", "name", "positional")

    def __init__(self, operator: str, argument: torch.Argument) -> None:
        self.name: str = argument.name
        self.positional = not argument.kwarg_only
        self.is_code = "int" in str(argument.type)
        self.equal = _MEANS_NONE.get(operator, {}).get(argument.name, {})
        self.default = self.normal(argument.default_value) if argument.has_default_value() else None

    def normal(self, value: Any) -> Any:
        """The one spelling that stands for ``value`` in comparisons."""
        if isinstance(value, (list, tuple)):
            return tuple(value)
        if self.is_code and isinstance(value, torch.dtype):
            value = CODE_OF_DTYPE.get(value, value)
        return self.equal.get(value, value) if self.equal and isinstance(value, int) else value


@cache
def _slots(overload: OpOverload) -> tuple[_Slot, ...]:
    schema = _torch_private.schema(overload)
    return tuple(_Slot(schema.name, argument) for argument in schema.arguments)


@cache
def _spelling(overload: OpOverload) -> Spelling | None:
    return SPELLINGS.get(str(overload))


def argument_names(overload: OpOverload) -> tuple[str, ...]:
    """The schema's argument names, in order."""
    return tuple(slot.name for slot in _slots(overload))


def effective_arguments(node: fx.Node) -> tuple[Any, ...]:
    """One value for every schema argument of the overload that ``node`` calls, in schema order."""
    args, kwargs = node.args, node.kwargs
    values = []
    for position, slot in enumerate(_slots(node.target)):
        if slot.positional and position < len(args):
            values.append(slot.normal(args[position]))
        elif slot.name in kwargs:
            values.append(slot.normal(kwargs[slot.name]))
        else:
            values.append(slot.default)
    respell = _spelling(node.target)
    if respell is not None:
        respell(node, values)
    return tuple(values)
