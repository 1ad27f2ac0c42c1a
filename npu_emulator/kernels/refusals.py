"""What a formula cannot compute, an aclnn function refuses before its launch, with the code of a wrong parameter."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.errors import CallRefusedError, EmulatorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

__all__ = ["INVALID_PARAMETER", "refusal", "refusing"]

INVALID_PARAMETER = 161002
"""ACLNN_ERR_PARAM_INVALID."""
_OF_VENDOR = frozenset({"npu", "atb"})
_OF_TORCH = (RuntimeError, ValueError, IndexError, TypeError)


def refusing(op: OpOverload, compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute`; where torch refuses what it does for an operator of npu or atb, the device refuses the operator's call."""
    if op.namespace not in _OF_VENDOR:
        return compute

    @functools.wraps(compute)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compute(*args, **kwargs)
        except _OF_TORCH as error:
            not_covered = isinstance(error, NotImplementedError) and type(error) is not NotImplementedError
            if not_covered or isinstance(error, EmulatorError) or hasattr(error, "code"):  # the formula's own words
                raise
            raise refusal(op, args, kwargs, error) from error

    return run


def refusal(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
    """The device's error for a call about which torch, or a meta function, complains; an error that has a code stays."""
    if isinstance(error, EmulatorError) or hasattr(error, "code"):
        return error
    return CallRefusedError(_sentence(op, args, kwargs, error), INVALID_PARAMETER)


def _sentence(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> str:
    operator = op.overloadpacket.__name__
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    told = ", ".join(f"{name} {_described(value)}" for name, value in given.items() if value is not None)
    said = str(error).rstrip(".")
    return (
        f"{operator}: these arguments do not fit together: {told}. Its formula refuses them: {said}. "
        f"NPU function error: call {operator} failed, error code is {INVALID_PARAMETER}."
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return repr(value)
