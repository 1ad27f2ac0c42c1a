"""Tells when two pieces of a model are the same graph, so that one compilation serves both.

vLLM cuts a model at its attention operators and compiles each piece. The pieces between two layers differ in the names of their
nodes alone: parameters are inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from npugraph_ex import _torch_private

__all__ = ["piece_key"]

_PLAIN = (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = ("Tensor", "Parameter", "Buffer", "FakeTensor")


class _OfItsOwn(Exception):  # noqa: N818 - it is no error
    """The piece holds something that says nothing about another piece."""


def piece_key(graph: fx.GraphModule, inputs: Sequence[Any]) -> object:
    """Return a key that two pieces share exactly if they compute the same of the same kinds of inputs; None for one of its own.

    Args:
        graph: of the piece.
        inputs: fake or real; sizes, strides and shared memory count, values do not.
    """
    numbers: dict[fx.Node, int] = {}
    try:
        nodes = []
        for node in graph.graph.nodes:
            if node.op in {"get_attr", "call_module"}:
                return None
            named = node.target if node.op in {"call_function", "call_method"} else None
            # `custom` is what a program says about its operators, such as their stream.
            described = (node.args, node.kwargs, node.meta.get("custom"))
            nodes.append((node.op, named, _plain(described, numbers)))
            numbers[node] = len(numbers)
        storages: dict[object, int] = {}
        kinds = tuple(_kind(value, storages) for value in inputs)
    except _OfItsOwn:
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("npu")
    return tuple(nodes), kinds, modes


def _plain(value: Any, numbers: dict[fx.Node, int]) -> object:
    """A hashable form of an argument, with nodes by their number; types count, because 1, 1.0 and True are equal."""
    if isinstance(value, fx.Node):
        return fx.Node, numbers[value]
    if isinstance(value, slice):
        return slice, *(_plain(part, numbers) for part in (value.start, value.stop, value.step))
    if isinstance(value, (tuple, list)):
        return type(value), *(_plain(part, numbers) for part in value)
    if isinstance(value, dict):
        return dict, *((name, _plain(part, numbers)) for name, part in value.items())
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # zeros have signs, and nan is not equal to itself
    if isinstance(value, _PLAIN):
        return type(value), value
    raise _OfItsOwn


def _kind(value: Any, storages: dict[object, int]) -> object:
    """What compilation sees of an input."""
    if isinstance(value, torch.SymInt):
        return _size(value)
    if not isinstance(value, torch.Tensor):
        return _plain(value, {})
    if type(value).__name__ not in _TENSORS or value.layout is not torch.strided:
        raise _OfItsOwn
    return (
        value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference(),
        *map(_size, (*value.shape, *value.stride(), value.storage_offset())),
        storages.setdefault(_torch_private.storage_key(value), len(storages)),
    )  # fmt: skip


def _size(size: int | torch.SymInt) -> object:
    """A number, or an expression with the environment that gives its symbols their meaning."""
    return (str(size.node.expr), size.node.shape_env) if isinstance(size, torch.SymInt) else size
