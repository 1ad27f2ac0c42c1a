"""A pattern's steps for the sizes of one program, some of which are symbols: which steps and results depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from npugraph_ex.testing.generator.inputs import Dim, size_of, symbols_of
from npugraph_ex.testing.generator.patterns import Pattern, Traced

_PROBES = ((11, 13), (17, 19))
"""Sizes that no argument has otherwise. What is the same when traced with either depends on no symbol."""


@dataclass(frozen=True)
class SizedPattern:
    """A pattern's steps for the arguments of one program.

    Attributes:
        traced: with the numbers of the program's first call.
        results: symbolic shape and dtype of each result.
        burnt_in: whether other values of the symbols would need other steps.
    """

    traced: Traced
    results: Mapping[str, tuple[tuple[Dim, ...], torch.dtype]]
    burnt_in: bool


def sized(
    pattern: Pattern,
    shapes: Mapping[str, tuple[Dim, ...]],
    dtypes: Mapping[str, torch.dtype],
    scalars: Mapping[str, float],
    sizes: Mapping[str, int],
) -> SizedPattern:
    """The steps of ``pattern`` for arguments of these symbolic shapes.

    Args:
        pattern: what is planted.
        shapes: of each argument.
        dtypes: of each argument.
        scalars: the numeric arguments.
        sizes: the values of the symbols in the program's first call.
    """
    symbols = sorted(frozenset().union(*map(symbols_of, shapes.values())))
    probes = {symbol: values for symbol, *values in zip(symbols, *_PROBES, strict=False)}

    def traced(values: Mapping[str, int]) -> Traced:
        concrete = {name: [size_of(dim, values) for dim in shape] for name, shape in shapes.items()}
        return pattern.trace(concrete, dtypes, scalars)

    first, second = (traced({symbol: values[probe] for symbol, values in probes.items()}) for probe in (0, 1))
    dims = {
        name: [_product(pair, probes) for pair in zip(shape, second.metas[name][0], strict=True)]
        for name, (shape, _) in first.metas.items()
    }
    burnt_in = first.steps != second.steps or any(dim is None for shape in dims.values() for dim in shape)
    here = traced(sizes) if burnt_in else first
    results = {
        name: (tuple(number if dim is None else dim for dim, number in zip(dims[name], shape, strict=True)), dtype)
        for name, (shape, dtype) in here.metas.items()
    }
    return SizedPattern(here, results, burnt_in)


def takes_other_rows(pattern: Pattern, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the search function runs where its leading size is another one; a number in it may be that size."""
    rows = _PROBES[0][0]
    other = {
        argument.name: [
            rows if dim == pattern.leading else size for dim, size in zip(argument.dims, shape, strict=False)
        ]
        for argument, shape in zip(pattern.arguments, shapes, strict=True)
    }
    named = {argument.name: dtype for argument, dtype in zip(pattern.arguments, dtypes, strict=True)}
    try:
        pattern.trace(other, named, pattern.rule.scalars)
    except Exception:  # noqa: BLE001 - a user's function raises what it likes
        return False
    return True


def _product(pair: tuple[int, int], probes: Mapping[str, Sequence[int]]) -> Dim | None:
    """The number or product of symbols that has these values under the probes; None for anything else, such as a sum."""
    one, other = pair
    factors = []
    for symbol, (first, second) in probes.items():
        while one != other and one % first == other % second == 0:
            one, other = one // first, other // second
            factors.append(symbol)
    if one != other:
        return None
    return "*".join([*factors, *([str(one)] if one != 1 else [])]) if factors else one
