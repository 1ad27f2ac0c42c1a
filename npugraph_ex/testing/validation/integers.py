"""The integers that a pattern takes: an index lies within a dimension, a divisor is not zero, an ordinary number is any.

No table of operators says which: the pattern runs on the CPU with one integer after another, and refuses what it does not take.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, repeat

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.graph.operators import tensor_leaves
from npugraph_ex.testing.generator.inputs import Integers, limits_of
from npugraph_ex.testing.generator.patterns import Argument, Pattern
from npugraph_ex.testing.oracle.host import HostGraph
from npugraph_ex.testing.validation.survey import Setting, arguments_of, computing, example_setting, traced

_PLAIN = (0, 1)
"""What nearly every pattern takes: the first element of a dimension, or a divisor."""
_SPECIAL = (-1, 0, 1)
_WRITERS = frozenset({"index_copy", "index_put", "_index_put_impl", "_unsafe_index_put", "put"})
_MOST_PLACES = 1 << 20
NONE = Integers(0, -1)
"""The range of an index into no elements."""


@lru_cache(maxsize=256)
def integer_ranges(pattern: Pattern, setting: Setting) -> Mapping[str, Integers]:
    """The range of each integer argument that cannot be any number of its dtype.

    Where the pattern writes at an index, no two are to be the same: which of two writes is the last is undefined. Where it runs
    neither with zeros nor with ones, or not on the CPU at all, the range is that of the example's values.

    Operators do not look at an index into a tensor without elements, so a run with one says nothing. The range is then that of a
    setting with more elements. If it depends on how many, it is `NONE`, because an index into no elements is never valid; so it is
    where no such setting runs.
    """
    own = zip(pattern.arguments, setting.dtypes, strict=True)
    wanted = [dataclasses.replace(one, dtype=dtype) for one, dtype in own if _is_integer(dtype)]
    if not wanted:
        return {}
    empty = _empty(pattern, setting)
    if not 0 < empty < math.inf:
        return _ranges_in(pattern, setting, wanted)
    filled = {one.name for one, shape in zip(pattern.arguments, setting.shapes, strict=True) if math.prod(shape)}
    few, more = (None if one is None else _by_running(pattern, one, wanted) for one in _roomier(pattern, setting))
    if few is not None and more is not None:
        return {name: found if found == more.get(name) else NONE for name, found in few.items() if name in filled}
    example = example_setting(pattern)
    found = _ranges_in(pattern, example, wanted)
    return found if empty <= _empty(pattern, example) else dict.fromkeys(filled.intersection(found), NONE)


def _roomier(pattern: Pattern, setting: Setting) -> tuple[Setting | None, Setting | None]:
    """The setting with larger sizes, so that fewer tensors are empty, and with twice as large ones; None where none are fewer.

    The sizes that are larger are those of zero, or those of which a slice from a fixed place on leaves nothing.
    """
    sizes = sorted({size for shape in setting.shapes for size in shape})
    groups = [*({size} for size in sizes), *(set(sizes[:count]) for count in range(2, len(sizes) + 1))]
    pairs = [(_enlarged(pattern, setting, group, 1), _enlarged(pattern, setting, group, 2)) for group in groups]
    empties = [sum(_empty(pattern, one) for one in pair) for pair in pairs]
    fewest = min(empties, default=math.inf)
    return pairs[empties.index(fewest)] if fewest < 2 * _empty(pattern, setting) else (None, None)


def _enlarged(pattern: Pattern, setting: Setting, sizes: Container[int], times: int) -> Setting:
    """The setting with the example's sizes, or one, so many times in place of these."""

    def enlarged(argument: Argument, shape: Sequence[int]) -> tuple[int, ...]:
        own = chain(reversed(argument.dims), repeat(1))
        pairs = zip(reversed(shape), own, strict=False)
        return tuple(max(size, times * max(dim, 1)) if size in sizes else size for size, dim in pairs)[::-1]

    shapes = map(enlarged, pattern.arguments, setting.shapes)
    return dataclasses.replace(setting, shapes=tuple(shapes))


@lru_cache(maxsize=256)
def _empty(pattern: Pattern, setting: Setting) -> float:
    """How many tensors in the pattern's graph have no elements; infinite where it has no graph."""
    try:
        nodes = traced(pattern, setting).graph.nodes
    except Exception:  # noqa: BLE001 - as in the survey
        return math.inf
    return sum(not leaf.numel() for node in nodes for leaf in tensor_leaves(node))


def _ranges_in(pattern: Pattern, setting: Setting, wanted: Sequence[Argument]) -> Mapping[str, Integers]:
    """The ranges in this very setting, or in it with the examples' integer dtypes, or else those of the examples.

    The device takes an index of int32 where the CPU takes int64 alone.
    """
    pairs = zip(setting.dtypes, (one.dtype for one in pattern.arguments), strict=True)
    usual = dataclasses.replace(setting, dtypes=tuple(own if _is_integer(dtype) else dtype for dtype, own in pairs))
    for one in dict.fromkeys((setting, usual)):
        if (found := _by_running(pattern, one, wanted)) is not None:
            return found
    return _of_examples(pattern)


def _by_running(pattern: Pattern, setting: Setting, wanted: Sequence[Argument]) -> Mapping[str, Integers] | None:
    """The ranges; None where the pattern runs neither with zeros nor with ones."""
    runs = _runner(pattern, setting)
    bases = [{one.name: number for one in wanted} for number in _PLAIN]
    base = next((numbers for numbers in bases if runs(numbers)), None)
    if base is None:
        return None
    ranges = {one.name: _range_of(one, base, runs) for one in wanted}
    outside = {name: _ignored(pattern, found, partial(_runs_with, runs, base, name)) for name, found in ranges.items()}
    once, from_zero = _writes_at_indices(pattern), _from_zero(pattern)
    return {
        name: found._replace(
            least=max(found.least, 0) if name in from_zero else found.least,
            distinct=once and found.least <= 0 <= found.most < _MOST_PLACES,
            ignored=outside[name],
        )
        for name, found in ranges.items()
        if found is not None
    }


def _runs_with(runs: Callable[[Mapping[str, int]], bool], base: Mapping[str, int], name: str, number: int) -> bool:
    return runs({**base, name: number})


def _ignored(pattern: Pattern, found: Integers | None, takes: Callable[[int], bool]) -> int | None:
    """A number in a call of the pattern, written or by default, that it takes outside a range: `nll_loss` leaves -100 out."""
    if found is None:
        return None
    numbers = {
        number
        for node in nodes_of(pattern)
        if isinstance(node.target, torch._ops.OpOverload)
        for number in (
            *node.args,
            *node.kwargs.values(),
            *(one.default_value for one in _torch_private.schema(node.target).arguments),
        )
        if type(number) is int and not found.least <= number <= found.most
    }
    return next((number for number in sorted(numbers) if takes(number)), None)


def _from_zero(pattern: Pattern) -> frozenset[str]:
    """The arguments of operators that are not torch's: their formulas take a negative index, and the device may not."""
    inputs = [node for node in nodes_of(pattern) if node.op == "placeholder"]
    return frozenset(
        name
        for name, node in zip(inspect.signature(pattern.rule.search).parameters, inputs, strict=False)
        if any(getattr(user.target, "namespace", "aten") != "aten" for user in node.users)
    )


def is_indexable(pattern: Pattern, setting: Setting) -> bool:
    """Whether each integer argument has numbers that it can be; an index into no elements has none."""
    return NONE not in integer_ranges(pattern, setting).values()


def clashes(pattern: Pattern, setting: Setting) -> bool:
    """Whether two indices must be the same that must not be, because there are more than places.

    What scatters along a dimension has places of its own for each row.
    """
    writers = [node for node in nodes_of(pattern) if _writes_at_an_index(node)]
    ranges = integer_ranges(pattern, setting) if writers else {}
    along = all("scatter" in str(node.target) for node in writers)
    return any(
        found.distinct and (max(shape, default=1) if along else math.prod(shape)) > found.most + 1
        for one, shape in zip(pattern.arguments, setting.shapes, strict=True)
        if (found := ranges.get(one.name)) is not None
    )


@lru_cache(maxsize=256)
def nodes_of(pattern: Pattern) -> Sequence[fx.Node]:
    """The pattern's graph for its example's sizes; other sizes give the same operators."""
    try:
        return list(traced(pattern, example_setting(pattern)).graph.nodes)
    except Exception:  # noqa: BLE001 - as in the survey
        return []


def _writes_at_indices(pattern: Pattern) -> bool:
    return any(map(_writes_at_an_index, nodes_of(pattern)))


def _writes_at_an_index(node: fx.Node) -> bool:
    """Whether an operator puts each of several values in a place that an index names."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = _torch_private.schema(node.target)
    name = schema.name.split("::")[1].rstrip("_")
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    if node.target.namespace == "npu":
        return "scatter" in name or "cache" in name
    replaces = not given.get("accumulate", False)
    return (name in _WRITERS and replaces) or (name == "scatter" and node.target._overloadname == "src")


def _range_of(one: Argument, base: Mapping[str, int], runs: Callable[[Mapping[str, int]], bool]) -> Integers | None:
    """The range of one argument around its number in ``base``, where the others stay; None for any number."""
    start, (lowest, highest) = base[one.name], limits_of(one.dtype)
    runs_with = cache(lambda number: runs({**base, one.name: number}))

    def takes(least: int, most: int) -> bool:
        return all(runs_with(number) for number in (*_SPECIAL, least, most) if least <= number <= most)

    if takes(lowest, highest):
        return None
    return Integers(
        _furthest(start, lowest, lambda number: takes(number, start)),
        _furthest(start, highest, lambda number: takes(start, number)),
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _furthest(start: int, end: int, takes: Callable[[int], bool]) -> int:
    """The number furthest from ``start``, towards ``end``, up to which all are taken."""
    if takes(end):
        return end
    while abs(end - start) > 1:
        middle = (start + end) // 2
        start, end = (middle, end) if takes(middle) else (start, middle)
    return start


def _runner(pattern: Pattern, setting: Setting) -> Callable[[Mapping[str, int]], bool]:
    """Whether the pattern runs on the CPU with these integers in its arguments."""

    def given(numbers: Mapping[str, int]) -> Iterator[torch.Tensor]:
        for one, shape, dtype in zip(pattern.arguments, setting.shapes, setting.dtypes, strict=True):
            yield torch.full(shape, numbers.get(one.name, 1), dtype=dtype)

    def runs(numbers: Mapping[str, int]) -> bool:
        try:
            with computing(setting):
                graph.run([*arguments_of(pattern, list(given(numbers)), setting.numbers), *gradients])
        except Exception:  # noqa: BLE001 - an operator refuses an index with whatever error it likes
            return False
        return True

    try:
        before = traced(pattern, setting)
        graph = HostGraph(before)
        further = before.graph.find_nodes(op="placeholder")[len(arguments_of(pattern, list(given({})))) :]
        gradients = [torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in further]
    except Exception:  # noqa: BLE001 - as in the survey, and an operator may have no formula
        return lambda _: False
    return runs


def _of_examples(pattern: Pattern) -> dict[str, Integers]:
    pairs = zip(pattern.arguments, pattern.rule.example_inputs(), strict=True)
    return {one.name: found for one, example in pairs if (found := _values_of(example)) is not None}


def _values_of(example: object) -> Integers | None:
    """The range of the integers in an example; None where it has none, or is fake."""
    if not isinstance(example, torch.Tensor) or not _is_integer(example.dtype) or not example.numel():
        return None
    try:
        return Integers(int(example.min()), int(example.max()))
    except Exception:  # noqa: BLE001 - a fake tensor has no values
        return None
