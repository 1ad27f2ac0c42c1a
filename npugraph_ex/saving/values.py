"""The arguments of a node as JSON, and back. A value without a JSON type becomes an object with one key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

Json = Any


class Unsaveable(Exception):  # noqa: N818 - it is a finding, answered by not saving, and no caller's mistake
    """Something in a graph that another process cannot use; the message names it."""


_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def encode(value: object, home: torch.device | None) -> Json:
    """Encode one argument.

    Args:
        value: a node, a constant, or a container of such.
        home: the device of the graph; it is written as the reader's device.

    Raises:
        Unsaveable: ``value`` cannot be encoded.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) in (float, complex):
        return value if type(value) is float and math.isfinite(value) else {type(value).__name__: str(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "home" if home is not None and _is_home(value, home) else str(value)}
    if isinstance(value, slice):
        return {"slice": [encode(part, home) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, (list, tuple)):  # fx converts them to its own immutable types
        parts = [encode(part, home) for part in value]
        return parts if isinstance(value, list) else {"tuple": parts}
    raise Unsaveable(f"the constant {value!r} ({type(value).__name__}) has no spelling")


def _is_home(device: torch.device, home: torch.device) -> bool:
    return device.type == home.type and device.index in {None, home.index}


def decode(spelt: Json, nodes: Mapping[str, fx.Node], home: torch.device | None) -> Any:
    """Undo `encode`.

    Args:
        spelt: the result of `encode`.
        nodes: the nodes so far, by name.
        home: the device on which the graph will run here.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: ``spelt`` was not written by `encode`.
    """
    if isinstance(spelt, list):
        return [decode(part, nodes, home) for part in spelt]
    if not isinstance(spelt, dict):
        return spelt
    ((kind, content),) = spelt.items()
    if kind == "node":
        return nodes[content]
    if kind == "device":
        return home if content == "home" else torch.device(content)
    if kind in _PLAIN:
        return _PLAIN[kind](content)
    return _CONTAINERS[kind](*[decode(part, nodes, home) for part in content])


def _torch_name(name: str) -> object:
    value = getattr(torch, name)
    if not isinstance(value, _NAMED):
        raise TypeError(f"torch.{name} is no dtype, layout or memory format")
    return value


_PLAIN: dict[str, Callable[[Any], object]] = {"float": float, "complex": complex, "torch": _torch_name}
_CONTAINERS: dict[str, Callable[..., object]] = {"slice": slice, "tuple": lambda *parts: parts}
