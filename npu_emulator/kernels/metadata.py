"""What an operator's outputs look like, without computing them: the meta kernel's answer, remembered by argument metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Like", "MetadataCache", "on_meta"]

_SCALARS = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, complex)
_CACHE_LIMIT = 4096


class Like(NamedTuple):
    """Shape (elements), strides (elements) and dtype of one output tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def on_meta(value: object) -> object:
    """Return the meta twin of a tensor, `meta` for a device, and anything else as it is."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


class MetadataCache:
    """Output metadata of one operator overload, by the metadata of its arguments."""

    def __init__(self, op: Callable[..., Any]) -> None:
        """Serve the overload `op`."""
        self._op = op
        self._known: dict[Any, Any] = {}

    def outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a tree of Like, as the op returns
        """Return the operator's outputs with every tensor replaced by its `Like`.

        Raises whatever the meta kernel raises: wrong arguments fail here, at launch, as they do on hardware.
        """
        key = _key(args, kwargs)
        found = self._known.get(key) if key is not None else None
        if found is None:
            result = self._op(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
            found = tree_map(_like, result)
            if key is not None:
                if len(self._known) >= _CACHE_LIMIT:
                    self._known.clear()
                self._known[key] = found
        return found


def _like(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return Like(tuple(value.size()), tuple(value.stride()), value.dtype)
    return value


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - nested tuples
    """Describe the arguments by what output metadata may depend on, or return None if one of them is of an unknown kind."""
    try:
        positional = tuple([_describe(value) for value in args])
        return (positional, tuple([(name, _describe(value)) for name, value in kwargs.items()])) if kwargs else positional
    except TypeError:
        return None


def _describe(value: Any) -> Any:  # noqa: ANN401 - nested tuples
    if isinstance(value, torch.Tensor):
        # A CPU scalar tensor promotes differently from a device tensor, so the device is part of it.
        return value.dtype, value.size(), value.stride(), value.device.type
    if isinstance(value, _SCALARS):
        return type(value), value  # 1, 1.0 and True are equal in Python and promote differently
    if isinstance(value, (list, tuple)):
        return tuple([_describe(item) for item in value])
    if isinstance(value, torch.device):
        return value.type
    raise TypeError(type(value))
