"""Parts of the last dimension: slices, parts of a split or a chunk, and one of the two dimensions that it is cut into."""

from __future__ import annotations

import operator

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting.terms import arguments, calls, core, reshaped_from, tensor

_aten = torch.ops.aten


def part_of(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """``(x, start, stop, step)`` where ``node`` is a slice of the last dimension of ``x``, counted from 0.

    Slices, the parts of a split or a chunk, and one of the two dimensions that the last one is cut into.
    """
    if calls(node, _aten.slice.Tensor):
        return _slice(node)
    if calls(node, _aten.select.int):
        return _selected(*node.args)  # type: ignore[arg-type]
    if node.target is operator.getitem and calls(node.args[0], _aten.unbind.int):
        unbound = arguments(node.args[0])
        return _selected(unbound["self"], unbound.get("dim", 0), node.args[1])  # type: ignore[arg-type]
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source, position = node.args[0], node.args[1]
    whole = tensor(source.args[0]) if source.args else None
    given = arguments(source) if calls(source, _aten.split.Tensor, _aten.split_with_sizes.default) else None
    parts = source.meta.get("val")
    if given is None or whole is None or not isinstance(parts, (list, tuple)) or not isinstance(position, int):
        return None
    if given.get("dim", 0) % whole.dim() != whole.dim() - 1:
        return None
    sizes = [part.shape[-1] for part in parts]
    if not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:position])
    return source.args[0], start, start + sizes[position], 1  # type: ignore[return-value]


def cut_by_a_symbol(*parts: fx.Node) -> bool:
    """Whether these are parts of one last dimension whose size is no known number, so that nobody knows which parts they are."""
    sources = set()
    for part in parts:
        node = core(part)
        call = node.args[0] if node.target is operator.getitem else node
        cut = calls(call, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default)
        sources.add(call.args[0] if cut else None)  # type: ignore[union-attr]
    value = tensor(next(iter(sources)))
    return len(sources) == 1 and value is not None and value.dim() > 0 and not isinstance(value.shape[-1], int)


def _selected(cut: fx.Node, dim: int, at: int) -> tuple[fx.Node, int, int, int] | None:
    """One row, or one column, of the last dimension cut into rows and columns."""
    value = tensor(cut)
    if value is None or value.dim() < 2:
        return None
    *lead, rows, columns = value.shape
    last = dim % value.dim() - value.dim()
    if last < -2 or not all(isinstance(size, int) for size in (rows, columns)):
        return None
    wanted, at = (*lead, rows * columns), at % value.shape[last]
    sources = ((one, tensor(one)) for one in reshaped_from(cut))
    x = next((one for one, whole in sources if whole is not None and same_numbers(whole.shape, wanted)), None)
    if x is None:
        return None
    return (x, at, rows * columns, columns) if last == -1 else (x, at * columns, (at + 1) * columns, 1)


def _slice(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    given = arguments(node)
    source, whole = given["self"], tensor(given["self"])
    if whole is None or given.get("dim", 0) % whole.dim() != whole.dim() - 1 or not isinstance(whole.shape[-1], int):
        return None
    bounds = (given.get("start"), given.get("end"), given.get("step", 1))
    if not all(bound is None or isinstance(bound, int) for bound in bounds):
        return None
    return (source, *slice(*bounds).indices(whole.shape[-1]))
