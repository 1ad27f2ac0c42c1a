"""The kernels of an operator that the device takes apart: it has none for the whole, and runs torch's composition of others.

Each such call is taken apart once, on tensors of the meta device; alike calls, in any graph, have the answer of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.graph.operators import declares_view
from npugraph_ex.graph.sizes import known

_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


def only_allocates(overload: OpOverload) -> bool:
    """Whether the operator makes a tensor and does not fill it."""
    return overload.name().partition(".")[0] in _ALLOCATIONS and not torch.are_deterministic_algorithms_enabled()


def kernels_of_call(node: fx.Node) -> int:
    """How many kernels a call that starts work runs: one, or those of the operators that it is composed of."""
    overload = node.target
    assert isinstance(overload, OpOverload)  # noqa: S101 - asked before
    if only_allocates(overload):
        return 0
    if _torch_private.composition(overload) is None:
        return 1
    leaves, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return _kernels_of(overload, structure, tuple(map(_described, leaves)))


class _Tensor(tuple[Any, ...]):
    """Sizes, steps and dtype of a tensor."""

    __slots__ = ()


def _described(leaf: Any) -> Any:
    """An argument without its graph: hashable, and a number for each symbol."""
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
    if isinstance(value, torch.Tensor):
        return _Tensor((tuple(map(known, value.shape)), tuple(map(known, value.stride())), value.dtype))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return torch.device("meta") if isinstance(value, torch.device) else value


def _on_meta(described: Any) -> Any:
    if isinstance(described, _Tensor):
        sizes, steps, dtype = described
        return torch.empty_strided(sizes, steps, dtype=dtype, device="meta")
    return described


@functools.lru_cache(maxsize=4096)
def _kernels_of(overload: OpOverload, structure: pytree.TreeSpec, described: tuple[Any, ...]) -> int:
    with _torch_private.unobserved_execution(), torch.inference_mode():
        try:
            args, kwargs = pytree.tree_unflatten(map(_on_meta, described), structure)
            return _run(overload, args, kwargs)[0]
        except Exception:  # noqa: BLE001 - what depends on elements cannot be told without them
            return 1


def _run(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, Any]:
    """The kernels of a call, and its result."""
    composition = _torch_private.composition(overload)
    if composition is None:
        starts = not (declares_view(overload) or torch.Tag.inplace_view in overload.tags or only_allocates(overload))
        return int(starts), overload(*args, **kwargs)
    found = 0

    def counted(part: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        nonlocal found
        kernels, result = _run(part, args, kwargs)
        found += kernels
        return result

    with _torch_private.calls_go_to(counted):
        result = composition(*args, **kwargs)
    return found, result
