"""ATen operators that a device computes with floats alone, where the emulated one would widen integers for the CPU's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.errors import CallRefusedError
from npu_emulator.kernels.refusals import INVALID_PARAMETER

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

__all__ = ["floats_only"]

_NAMES = (
    *(
        "silu",
        "mish",
        "hardswish",
        "hardsigmoid",
        "elu",
        "leaky_relu",
        "softplus",
        "log_sigmoid_forward",
        "gelu",
        "glu",
    ),
    *("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "native_batch_norm"),
)
"""Activations and norms: the documents of their aclnn functions list no integers."""
_OPERATORS = frozenset(f"aten::{name}{ending}" for name in _NAMES for ending in ("", "_"))


def floats_only(op: OpOverload) -> Callable[..., None] | None:
    """What refuses a call whose first tensor has integers or bools; None for an operator that may take these."""
    if op._schema.name not in _OPERATORS:
        return None
    first = op._schema.arguments[0].name

    def refuse(*args: Any, **kwargs: Any) -> None:
        value = args[0] if args else kwargs.get(first)
        if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            name = op.overloadpacket.__name__
            raise CallRefusedError(
                f"{name}: {first} should have a floating-point dtype; it is {value.dtype}. NPU function error: call {name} "
                f"failed, error code is {INVALID_PARAMETER}.",
                INVALID_PARAMETER,
            )

    return refuse
