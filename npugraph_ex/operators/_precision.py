"""How the reference decompositions choose precision, round and refuse, on every processor alike. Holds no operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from npugraph_ex.errors import AddressedError

_Formula = TypeVar("_Formula", bound=Callable[..., tuple[torch.Tensor, ...]])
INT8_MAX = 127.0
_LARGEST = {torch.int8: INT8_MAX, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
HALVES = (torch.float16, torch.bfloat16)
"""The dtypes that operators of attention and of caches take throughout."""
FLOATS = (*HALVES, torch.float32)
"""The dtypes that activations and norms take."""


INVALID_PARAMETER = 161002
"""ACLNN_ERR_PARAM_INVALID: the code of nearly every refusal by an aclnn function."""


class RefusedArgumentError(AddressedError, RuntimeError, ValueError):
    """An operator was called as the device does not allow; a RuntimeError, as torch_npu's refusals are.

    Attributes:
        code: the device's error code.
    """

    def __init__(self, message: str, code: int = INVALID_PARAMETER) -> None:
        super().__init__(message)
        self.code = code


class UnsupportedArgumentError(AddressedError, NotImplementedError):
    """An operator was called with an argument value that its reference does not cover."""


def unsupported(operator: str, argument: str, value: object, supported: str) -> UnsupportedArgumentError:
    """The error for ``operator(argument=value)``; ``supported`` says what may be passed instead."""
    return UnsupportedArgumentError(
        f"{operator}: the reference does not cover {argument}={value!r}; it covers {supported}."
    )


def refused(
    operator: str, argument: str, value: object, expected: str, *, code: int = INVALID_PARAMETER
) -> RefusedArgumentError:
    """The error for a call that the device refuses: ``argument`` is ``value`` and should be ``expected``."""
    shown = tuple(value) if isinstance(value, torch.Size) else value
    return RefusedArgumentError(
        f"{operator}: {argument} should be {expected}; it is {shown!r}. NPU function error: call {operator} failed, error code "
        f"is {code}.",
        code,
    )


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 when any of ``tensors`` is float64, otherwise float32."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32


def stored_like(template: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value`` rounded to ``dtype``, laid out as ``torch.empty_like(template)`` is.

    The meta functions of most npu operators allocate with ``empty_like``, which keeps a permuted layout.
    """
    return torch.empty_like(template, dtype=dtype).copy_(value)


def round_to(dtype: torch.dtype, quotient: torch.Tensor) -> torch.Tensor:
    """``quotient`` rounded half to even and saturated to the range of ``dtype``, an integer type or one of 8-bit floats.

    In an integer type NaN becomes 0.

    The vector unit rounds with CAST_RINT, and converting a NaN to an integer there gives 0. A NaN quotient is
    met in practice: a row of zeros has scale 0 and the quotient 0/0.
    """
    if dtype.is_floating_point:
        return quotient.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    whole = torch.where(quotient.isnan(), torch.zeros_like(quotient), quotient.round())
    limits = torch.iinfo(dtype)
    if limits.bits > 16:
        whole = whole.to(torch.float64)  # float32 cannot hold the largest int32
    return whole.clamp(limits.min, limits.max).to(dtype)


def largest_of(dtype: torch.dtype) -> float:
    """The largest value of a quantised ``dtype``, which the largest input becomes: 127, 448 or 57344."""
    return _LARGEST[dtype]


def round_to_int8(quotient: torch.Tensor) -> torch.Tensor:
    """``quotient`` as int8, see ``round_to``."""
    return round_to(torch.int8, quotient)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """``gelu(x)``, of infinity infinity. With oneDNN, which torch takes on some processors, that would be NaN."""
    return torch.where(x == torch.inf, x, torch.nn.functional.gelu(x, approximate=approximate))


def rounded(
    before_rounding: _Formula,
    *,
    results: int,
    target: Callable[[dict[str, Any]], torch.dtype] | None = None,
    store: Callable[[torch.dtype, torch.Tensor], torch.Tensor] = round_to,
) -> _Formula:
    """The formula of an operator whose first ``results`` results are rounded, from the one that gives their quotients.

    ``target`` gives the dtype of the rounded results from the keyword arguments of a call; without it they are int8.
    ``store`` rounds to that dtype.
    """

    @functools.wraps(before_rounding)
    def formula(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        values = before_rounding(*args, **kwargs)
        dtype = torch.int8 if target is None else target(kwargs)
        return (*(store(dtype, value) for value in values[:results]), *values[results:])

    return formula  # type: ignore[return-value]
