"""What Dynamo knows of a traced tensor's sizes and strides, kept current while the program changes them in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

ATTRIBUTES = ("ndim", "_size", "stride", "is_contiguous")
"""Of Dynamo's variable of a tensor: what it notes when the tensor is made, None where sizes are symbolic."""


class _Current:
    """One of these attributes. If the traced tensor is not what it was, all of them are noted again before it is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, variable: Any, owner: type) -> Any:
        if variable is None:
            return self
        noted = variable.__dict__
        traced = noted["proxy"].node.meta.get("example_value")
        if type(traced) is FakeTensor and traced.layout is torch.strided and _differ(traced, noted):
            found = type(variable).specialize(traced)
            noted.update((name, found.get(name)) for name in ATTRIBUTES)
        return noted[self._name]

    def __set__(self, variable: Any, value: Any) -> None:
        variable.__dict__[self._name] = value


def _differ(traced: torch.Tensor, noted: dict[str, Any]) -> bool:
    if traced.dim() != noted["ndim"]:
        return True
    return noted["_size"] is not None and (
        _are_other(traced.shape, noted["_size"]) or _are_other(traced.stride(), noted["stride"] or traced.stride())
    )


def _are_other(numbers: Iterable[Any], noted: Iterable[Any]) -> bool:
    """Whether a number is symbolic now, of which no guard is wanted, or is not what was noted."""
    return any(type(new) is not int or new != old for new, old in zip(numbers, noted, strict=True))


def keep_metadata_current() -> None:
    """Let Dynamo read sizes and strides as they are after `y.t_()`; done once, before anything is traced."""
    from torch._dynamo.variables.tensor import TensorVariable

    for name in ATTRIBUTES:
        if name not in TensorVariable.__dict__:
            setattr(TensorVariable, name, _Current(name))
