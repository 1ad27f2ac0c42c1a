"""Passes arguments by position if the schema allows it, so that passes find each argument at its position.

AOT's graphs already do that. A user's pass and graphs from elsewhere may pass arguments by keyword.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private

__all__ = ["make_positional"]


def make_positional(nodes: Iterable[fx.Node]) -> None:
    """Turn keyword arguments into positional ones; defaults fill the gaps before them."""
    for node in nodes:
        if node.kwargs and isinstance(node.target, OpOverload):
            _move_to_positions(node, _positional(node.target))


@functools.cache
def _positional(overload: OpOverload) -> tuple[torch.Argument, ...]:
    return tuple(argument for argument in _torch_private.schema(overload).arguments if not argument.kwarg_only)


def _move_to_positions(node: fx.Node, positional: tuple[torch.Argument, ...]) -> None:
    kwargs = dict(node.kwargs)
    last = max((at for at, argument in enumerate(positional) if argument.name in kwargs), default=-1)
    missing = positional[len(node.args) : last + 1]
    if all(argument.name in kwargs or argument.has_default_value() for argument in missing):
        node.args = (*node.args, *[kwargs.pop(argument.name, argument.default_value) for argument in missing])
        node.kwargs = kwargs
