"""What an operator's outputs look like, without computing them: the meta kernel's answer, remembered by argument metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Like", "MetadataCache", "on_meta"]

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

    def outputs(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operator's outputs with every tensor replaced by its `Like`.

        `key` describes the arguments (see `Bound.key`); None means that nothing may be remembered. Raises whatever the meta
        kernel raises: wrong arguments fail here, at launch, as they do on hardware.
        """
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
