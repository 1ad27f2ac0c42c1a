"""Makes two kinds of views in another way, because AOT's functionalization writes wrong values through them.

`expand` that repeats nothing, `mask[None].expand(1, -1, -1)` for a batch of one: the base becomes `base + (new - base)`, which is
NaN where both are infinite and rounded elsewhere. `unfold` with gaps between its windows: the base becomes the sum of the
windows' elements, so what lies between the windows becomes 0. Here the same views are made by `unsqueeze`, `view` and
`slice`, or by `as_strided` where the last gap is incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from npugraph_ex.frontend.upstream_repairs.layouts import may_write
from npugraph_ex.frontend.upstream_repairs.repair import Repair
from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.graph.nested_regions import all_graphs

REPAIR = Repair(
    fault="A write through `expand` gives NaN where old and new values are infinite; one through `unfold` clears the gaps.",
    torch=("2.13",),
    test="tests/frontend/test_written_views.py",
)

_aten = torch.ops.aten
_MAKERS = frozenset({"expand", "expand_as", "broadcast_to", "broadcast_tensors", "unfold"})
_OVERLOADS = frozenset({_aten.expand.default, _aten.unfold.default})


class OtherViews(TorchDispatchMode):
    """During AOT's trace, makes `expand` and `unfold` under this mode by views through which writes are right."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator, or what makes the same view."""
        del types
        if func is _aten.expand.default and _repeats_nothing(*args[:2]):
            return _with_leading_ones(*args[:2])
        if func is _aten.unfold.default and args[0].dim() and _has_no_overlap(*args):
            return _windows(*args)
        return func(*args, **(kwargs or {}))


def _repeats_nothing(x: torch.Tensor, size: Sequence[Any]) -> bool:
    new = len(size) - x.dim()
    wanted = [old if number == -1 else number for old, number in zip(x.shape, size[new:], strict=True)]
    return same_numbers(size[:new], [1] * new) and same_numbers(x.shape, wanted)


def _with_leading_ones(x: torch.Tensor, size: Sequence[Any]) -> torch.Tensor:
    view: torch.Tensor = _aten.alias.default(x)
    for _ in range(len(size) - x.dim()):
        view = _aten.unsqueeze.default(view, 0)
    return view


def _has_no_overlap(x: torch.Tensor, dim: int, size: int, step: int) -> bool:
    """Whether no element is in two windows; torch refuses to trace a write through a view that has such elements."""
    del x, dim
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
    """Run the calls of a Dynamo graph that make such views under `OtherViews`, in graphs that may write; edits them in place."""
    for graph in all_graphs(gm.graph):
        makers = [node for node in graph.nodes if _makes(node)] if any(map(may_write, graph.nodes)) else []
        for node in makers:
            method = node.op == "call_method"
            node.target = _remaking(getattr(torch.Tensor, str(node.target)) if method else node.target)
            node.op = "call_function"
        if makers and graph.owning_module is not None:
            graph.owning_module.recompile()


def _makes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in _MAKERS
    return node.op == "call_function" and (node.target in _OVERLOADS or getattr(node.target, "__name__", "") in _MAKERS)


def _remaking(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # so that the graph's code can be printed
    def remaking(*args: Any, **kwargs: Any) -> Any:
        with OtherViews():  # type: ignore[no-untyped-call]  # torch left its constructor untyped
            return function(*args, **kwargs)

    return remaking
