"""Makes two kinds of views in another way, because AOT's functionalization writes wrong values through them.

`expand` that repeats nothing, `mask[None].expand(1, -1, -1)` for a batch of one: the base becomes `base + (new - base)`, which is
NaN where both are infinite and rounded elsewhere. `unfold` with gaps between its windows: the base becomes the sum of the
windows' elements, so what lies between the windows becomes 0. Here the same views are made by `unsqueeze`, `view` and
`slice`, or by `as_strided` where the last gap is incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from npugraph_ex.frontend.upstream_repairs.layouts import may_write
from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.graph.nested_regions import all_graphs
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A write through `expand` gives NaN where old and new values are infinite; one through `unfold` clears the gaps.",
    threads=("pytorch#198102",),
    test="tests/frontend/test_written_views.py",
)

_aten = torch.ops.aten


def _expand(x: torch.Tensor, *sizes: Any, size: Any = None, implicit: bool = False) -> torch.Tensor:
    wanted = size if size is not None else sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    return (
        _with_leading_ones(x, wanted)
        if _repeats_nothing(x, wanted)
        else _aten.expand.default(x, wanted, implicit=implicit)
    )


def _expand_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _expand(x, other.shape)


def _broadcast_tensors(*tensors: Any) -> list[torch.Tensor]:
    given = tensors if isinstance(tensors[0], torch.Tensor) else tensors[0]
    wide = torch.broadcast_tensors(*given)  # a tensor of that shape itself, and not a view of it
    return [one if same is one else _expand_as(one, same) for one, same in zip(given, wide, strict=True)]


def _unfold(x: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    apart = x.dim() and _has_no_overlap(size, step)
    return _windows(x, dimension, size, step) if apart else _aten.unfold.default(x, dimension, size, step)


# They stand for functions of torch, not for operators under a mode: a region's functionalization comes before any mode.
_INSTEAD: dict[str, Callable[..., Any]] = {
    "expand": _expand,
    "expand_as": _expand_as,
    "broadcast_to": _expand,
    "broadcast_tensors": _broadcast_tensors,
    "unfold": _unfold,
}

_FUNCTIONS: dict[Any, str] = {
    _aten.expand.default: "expand", _aten.unfold.default: "unfold", torch.broadcast_to: "broadcast_to",
    torch.broadcast_tensors: "broadcast_tensors", torch.functional.broadcast_tensors: "broadcast_tensors",
} | {getattr(torch.Tensor, name): name for name in ("expand", "expand_as", "broadcast_to", "unfold")}  # fmt: skip
"""By the function itself: `torch.nn.functional.unfold` is another one than a tensor's."""


def _repeats_nothing(x: torch.Tensor, size: Sequence[Any]) -> bool:
    new = len(size) - x.dim()
    wanted = [old if number == -1 else number for old, number in zip(x.shape, size[new:], strict=True)]
    return same_numbers(size[:new], [1] * new) and same_numbers(x.shape, wanted)


def _with_leading_ones(x: torch.Tensor, size: Sequence[Any]) -> torch.Tensor:
    view: torch.Tensor = _aten.alias.default(x)
    for _ in range(len(size) - x.dim()):
        view = _aten.unsqueeze.default(view, 0)
    return view


def _has_no_overlap(size: int, step: int) -> bool:
    """Whether no element is in two windows; torch refuses to trace a write through a view that has such elements."""
    return isinstance(size, int) and isinstance(step, int) and 0 < size <= step


def _windows(x: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    dim %= x.dim()
    length = x.shape[dim]
    count = (length - size) // step + 1
    if size < step and not (isinstance(length, int) and count * step <= length):
        shape, strides = list(x.shape), list(x.stride())
        shape[dim], strides[dim] = count, strides[dim] * step
        gapped: torch.Tensor = _aten.as_strided.default(
            x, [*shape, size], [*strides, x.stride(dim)], x.storage_offset()
        )
        return gapped
    whole = _aten.slice.Tensor(x, dim, 0, count * step)
    rows = _aten.view.default(whole, [*x.shape[:dim], count, step, *x.shape[dim + 1 :]])
    inside: torch.Tensor = _aten.slice.Tensor(rows, dim + 1, 0, size)
    return inside.movedim(dim + 1, -1)


def remake(gm: fx.GraphModule) -> None:
    """Replace the calls of a Dynamo graph that make such views, in graphs that may write; edits them in place."""
    for graph in all_graphs(gm.graph):
        makers = [node for node in graph.nodes if _kind(node)] if any(map(may_write, graph.nodes)) else []
        for node in makers:
            node.target, node.op = _INSTEAD[_kind(node)], "call_function"
            node.kwargs = {{"input": "x", "self": "x"}.get(name, name): value for name, value in node.kwargs.items()}
        if makers and graph.owning_module is not None:
            graph.owning_module.recompile()


def _kind(node: fx.Node) -> str:
    """The name of the function that makes such a view; empty for another node."""
    if node.op == "call_method":
        return str(node.target) if node.target in _INSTEAD else ""
    return _FUNCTIONS.get(node.target, "") if node.op == "call_function" else ""
