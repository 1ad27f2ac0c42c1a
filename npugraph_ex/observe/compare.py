"""Compares two dumps that `dump_tensor_data` wrote: the first node whose values differ, and by how many ULPs.

Nodes are found again by name and operator; an in-place form counts as the operator that it stands for. What is in one
dump only, because a pass removed or made it, is counted and not compared. The results of a graph are compared by position.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from npugraph_ex.errors import NpuGraphExError, UsageError

_INTEGER_LIKE = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@dataclass(frozen=True)
class Difference:
    """How the value of one node differs.

    Attributes:
        call: which call of which graph, as the folders name it.
        node: the node's name.
        operator: what it calls, or what the user calls the input.
        source: where the user wrote it.
        what: the difference in words.
        ulps: the largest distance, in representable numbers of the dtype; None where shapes or dtypes differ.
    """

    call: str
    node: str
    operator: str
    source: str
    what: str
    ulps: int | None


@dataclass
class Comparison:
    """Two dumps side by side.

    Attributes:
        compared: how many nodes are in both.
        only_first: how many are in the first alone.
        only_second: how many are in the second alone.
        calls_only_first: the calls that are in the first alone.
        calls_only_second: the calls that are in the second alone.
        differences: the nodes that differ, in the order of execution.
    """

    compared: int = 0
    only_first: int = 0
    only_second: int = 0
    calls_only_first: list[str] = field(default_factory=list)
    calls_only_second: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether both have the same calls, and no node that is in both differs."""
        return not (self.differences or self.calls_only_first or self.calls_only_second)


def compare(
    first: Path, second: Path, *, within: int = 0, on_node: Callable[[Comparison, int, str], None] = lambda *_: None
) -> Comparison:
    """Compare two dumps, call by call.

    Args:
        first: the folder of one call, of a graph, or any folder above.
        second: the same of the other dump.
        within: distances of up to so many ULPs are no difference.
        on_node: is called after each node with the comparison so far, the number of nodes in all, and the node's name.

    Raises:
        UsageError: a folder holds no dump, or a file of it is missing or damaged.
        NpuGraphExError: the two have no call in common.
    """
    found, also_found = _calls(first), _calls(second)
    calls, others = _paired(found, also_found)
    common = [name for name in calls if name in others]
    if not common:
        raise NpuGraphExError(
            f"{first} has the calls {', '.join(found)} and {second} has {', '.join(also_found)}: none in common. "
            "Name two folders of one graph each, or of one call each"
        )
    result = Comparison(
        calls_only_first=[name for name in calls if name not in others],
        calls_only_second=[name for name in others if name not in calls],
    )
    indexes = {name: (_index(calls[name]), _index(others[name])) for name in common}
    total = sum(len(mine.keys() & its.keys()) for mine, its in indexes.values())
    for name, (mine, its) in indexes.items():
        result.only_first += len(mine.keys() - its.keys())
        result.only_second += len(its.keys() - mine.keys())
        for key in (key for key in mine if key in its):
            difference = _difference(
                _load(calls[name] / mine[key]["file"]), _load(others[name] / its[key]["file"]), within
            )
            if difference is not None:
                node = mine[key]
                result.differences.append(Difference(name, node["node"], node["operator"], node["source"], *difference))
            result.compared += 1
            on_node(result, total, key[0])
    return result


def _calls(folder: Path) -> dict[str, Path]:
    """The folders of single calls below, by what the two dumps call alike: ``graph__1/call__0``, without the process."""
    paths = sorted(path.parent for path in folder.rglob("index.json")) if folder.is_dir() else []
    if not paths:
        raise UsageError(f"{folder} holds no dump; name a folder that the option dump_tensor_data wrote")
    ordered = sorted(paths, key=_order) if len(paths) > 1 else paths  # a call's folder alone may have any name
    return {"/".join(path.parts[-2:]): path for path in ordered}


def _paired(calls: Mapping[str, Path], others: Mapping[str, Path]) -> tuple[Mapping[str, Path], Mapping[str, Path]]:
    """The two dumps by what pairs their calls: of any two calls nothing, of any two graphs the number of the call."""
    if len(calls) == len(others) == 1:
        return {"call": next(iter(calls.values()))}, {"call": next(iter(others.values()))}
    graphs, other_graphs = ({path.parent for path in found.values()} for found in (calls, others))
    if calls.keys() & others.keys() or len(graphs) != 1 or len(other_graphs) != 1:
        return calls, others
    return {path.name: path for path in calls.values()}, {path.name: path for path in others.values()}


def _order(path: Path) -> tuple[int, ...]:
    numbers = [part.rpartition("__")[2] for part in path.parts[-2:]]  # a copy of a graph's folder may have any name
    return tuple(int(number) if number.isdecimal() else 0 for number in numbers)


def _index(folder: Path) -> dict[tuple[str, str], Mapping[str, str]]:
    def read(path: Path) -> dict[tuple[str, str], Mapping[str, str]]:
        entries = json.loads(path.read_text(encoding="utf-8"))
        wanted = {"node", "operator", "source", "file"}
        if absent := next((wanted - {*entry} for entry in entries if wanted - {*entry}), None):
            raise ValueError(f"an entry has no {', '.join(sorted(absent))}")
        return {(entry["node"], _functional(entry["operator"])): entry for entry in entries}

    return _read(folder / "index.json", "the list of nodes, as JSON", read)


_Content = TypeVar("_Content")


def _read(path: Path, expected: str, read: Callable[[Path], _Content]) -> _Content:
    try:
        return read(path)
    except Exception as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({_said(error)})"
        raise UsageError(
            f"{path} {what}; expected: {expected}, written by the option dump_tensor_data. The program was stopped while "
            "it wrote the dump, or the copy of the dump is not complete: copy it again, or run the program again"
        ) from error


def _said(error: Exception) -> str:
    """The kind of an error and the first sentence that it says."""
    first = str(error).strip().partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _functional(operator: str) -> str:
    """The operator's name without what makes it an in-place form: ``aten.add_.Tensor`` is ``aten.add.Tensor``."""
    return operator.replace("_.", ".")


def _load(path: Path) -> Any:
    return _read(path, "the values of one node", lambda path: torch.load(path, weights_only=True))


def _difference(first: Any, second: Any, within: int) -> tuple[str, int | None] | None:
    """The worst difference of two values, which may be several tensors."""
    mine, its = pytree.tree_leaves(first), pytree.tree_leaves(second)
    if len(mine) != len(its):
        return f"{len(mine)} values and {len(its)}", None
    worst: tuple[str, int | None] | None = None
    for one, other in zip(mine, its, strict=True):
        found = _of_tensors(one, other, within) if isinstance(one, torch.Tensor) else _of_constants(one, other)
        if found is not None and found[1] is None:
            return found
        if found is not None and (worst is None or (found[1] or 0) > (worst[1] or 0)):
            worst = found
    return worst


def _of_constants(one: object, other: object) -> tuple[str, None] | None:
    return None if one == other else (f"{one!r} and {other!r}", None)


def _of_tensors(one: torch.Tensor, other: Any, within: int) -> tuple[str, int | None] | None:
    if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return f"{_described(one)} and {_described(other)}", None
    distance = ulps_apart(one, other)
    if distance.numel() == 0 or int(distance.max()) <= within:
        return None
    flat_index = int(distance.argmax())
    count = int((distance > within).sum())
    index = ", ".join(str(int(part)) for part in torch.unravel_index(torch.tensor(flat_index), one.shape))
    worst = int(distance.flatten()[flat_index])
    values = f"{one.flatten()[flat_index].item()!r} and {other.flatten()[flat_index].item()!r}"
    return f"{count} of {one.numel()} elements; the worst, at [{index}], is {values}", worst


def ulps_apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How many representable numbers lie between the elements of two tensors of one dtype.

    Zeros of either sign are equal, and so are NaNs. A NaN beside a number is as far away as int64 can say. Elements of integer
    dtypes are apart by their difference.
    """
    if one.dtype.is_complex:
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    like = _INTEGER_LIKE.get(one.dtype)
    if like is None:
        wide = torch.float32 if one.dtype.is_floating_point else torch.int64
        return (one.to(wide) - other.to(wide)).abs().to(torch.int64)
    bits = [_ordered(value.contiguous().view(like).to(torch.int64), value.element_size() * 8) for value in (one, other)]
    distance = (bits[0] - bits[1]).abs()
    nans = one.isnan(), other.isnan()
    distance = distance.masked_fill(nans[0] != nans[1], torch.iinfo(torch.int64).max)
    return distance.masked_fill(nans[0] & nans[1], 0)


def _ordered(bits: torch.Tensor, width: int) -> torch.Tensor:
    """Bit patterns of floats as integers in the order of the numbers."""
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
