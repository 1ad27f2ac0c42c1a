"""Pairs of what a value looks like and what stands for it on the device, and the functions that take them apart.

This library has no use for them: its graphs are FX graphs throughout. vLLM-Ascend replaces some of these names to make
dict-valued arguments work, and its own tests call them; here they take dicts from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx


class ValuePack:
    """One value twice.

    Args:
        meta: what it looks like: a fake tensor, a size, or a dict of such.
        npu_meta: what stands for it on the device; the same when None.
    """

    def __init__(self, meta: Any, npu_meta: Any = None) -> None:
        self._meta = meta
        self._npu = meta if npu_meta is None else npu_meta

    @property
    def meta(self) -> Any:
        """What the value looks like."""
        return self._meta

    @property
    def npu(self) -> Any:
        """What stands for it on the device."""
        return self._npu

    def __getitem__(self, key: str) -> Any:
        if not isinstance(self._meta, Mapping):
            raise TypeError(
                f"a ValuePack has items where it holds a dict; this one holds a {type(self._meta).__name__}"
            )
        return self._meta.get(key)

    def __repr__(self) -> str:
        return f"ValuePack(meta={self._meta!r}, npu={self._npu!r})"


def is_symlist(value: object) -> bool:
    """Whether a list or tuple holds a size that varies."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, ValuePack) and isinstance(item.meta, torch.SymInt) for item in value
    )


def unpack_meta_list(args: Sequence[Any]) -> list[Any]:
    """The list with each pack replaced by what its value looks like."""
    return [_part(item, "meta") for item in args]


def unpack_meta(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with packs, in lists and dicts as well, replaced by what the values look like."""
    return unpack_meta_list(args), {key: _part(value, "meta") for key, value in kwargs.items()}


def _part(value: Any, part: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _part(item, part) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_part(item, part) for item in value]
    # By what it has and not by its class: vLLM-Ascend puts a class of its own in the place of `ValuePack`.
    return getattr(value, part) if hasattr(value, "npu") and hasattr(value, "meta") else value


class Converter(fx.Interpreter):
    """Takes packs apart for the device; the class on which vLLM-Ascend replaces `_unpack_npu`."""

    def _unpack_npu(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with packs, in lists and dicts as well, replaced by what stands for them on the device."""
        return [_part(value, "npu") for value in args], {key: _part(value, "npu") for key, value in kwargs.items()}
