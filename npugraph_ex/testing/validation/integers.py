"""The integers that a pattern takes: an index lies within a dimension, a divisor is not zero, an ordinary number is any.

No table of operators says which: the pattern runs on the CPU with one integer after another, and refuses what it does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import torch

from npugraph_ex.testing.generator.inputs import limits_of
from npugraph_ex.testing.generator.patterns import Argument, Pattern
from npugraph_ex.testing.oracle.host import HostGraph
from npugraph_ex.testing.validation.survey import Setting, arguments_of, traced

Range = tuple[int, int]
"""The least and the largest integer, both included."""
_PLAIN = (0, 1)
"""What nearly every pattern takes: the first element of a dimension, or a divisor."""
_SPECIAL = (-1, 0, 1)


@lru_cache(maxsize=256)
def integer_ranges(pattern: Pattern, setting: Setting) -> Mapping[str, Range]:
    """The range of each integer argument that cannot be any number of its dtype.

    Where the pattern runs neither with zeros nor with ones, or not on the CPU at all, the range is that of the example's values.
    """
    wanted = [one for one in pattern.arguments if _is_integer(one.dtype)]
    if not wanted:
        return {}
    runs = _runner(pattern, setting)
    bases = [{one.name: number for one in wanted} for number in _PLAIN]
    base = next((numbers for numbers in bases if runs(numbers)), None)
    if base is None:
        return {name: found for name, found in _of_examples(pattern).items() if found is not None}

    ranges = {one.name: _range_of(one, base, runs) for one in wanted}
    return {name: found for name, found in ranges.items() if found is not None}


def _range_of(one: Argument, base: Mapping[str, int], runs: Callable[[Mapping[str, int]], bool]) -> Range | None:
    """The range of one argument around its number in ``base``, where the others stay; None for any number."""
    start, (lowest, highest) = base[one.name], limits_of(one.dtype)

    def takes(least: int, most: int) -> bool:
        numbers = {number for number in (*_SPECIAL, least, most) if least <= number <= most}
        return all(runs({**base, one.name: number}) for number in numbers)

    if takes(lowest, highest):
        return None
    return (
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
            graph.run([*arguments_of(pattern, list(given(numbers))), *gradients])
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


def _of_examples(pattern: Pattern) -> dict[str, Range | None]:
    names = [one.name for one in pattern.arguments]
    return {name: _values_of(example) for name, example in zip(names, pattern.rule.example_inputs(), strict=True)}


def _values_of(example: object) -> Range | None:
    """The range of the integers in an example; None where it has none, or is fake."""
    if not isinstance(example, torch.Tensor) or not _is_integer(example.dtype) or not example.numel():
        return None
    try:
        return int(example.min()), int(example.max())
    except Exception:  # noqa: BLE001 - a fake tensor has no values
        return None
