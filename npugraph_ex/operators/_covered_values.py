"""Arguments of which a formula knows some values, and would take any other one in silence: numbers, names, rare dtypes."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from npugraph_ex.operators._precision import refused, unsupported

_RARE = frozenset({torch.bool, torch.complex64, torch.complex128})
"""Dtypes that few operators take, and with which nearly every formula would compute something."""
_AS_MASKS = frozenset({torch.bool, torch.uint8, torch.int8})


def shown_dtypes(calls: Iterable[Mapping[str, object]]) -> dict[str, set[torch.dtype]]:
    """The dtypes that the tensors of each argument have in these calls."""
    found: dict[str, set[torch.dtype]] = defaultdict(set)
    for key, value in (pair for call in calls for pair in call.items()):
        if isinstance(value, torch.Tensor):
            found[key].add(value.dtype)
    return found


def covering(
    name: str,
    covers: Mapping[str, Collection[object]],
    formula: Callable[..., Any],
    shown: Callable[[], Iterable[Mapping[str, object]]],
) -> Callable[..., Any]:
    """``formula``, which raises ``unsupported(...)`` for other values of the arguments in ``covers`` than those there.

    It raises ``refused(...)`` for a complex tensor where none of the calls that ``shown`` gives has one, and for a bool one where
    none has single bytes.
    """
    parameters = inspect.signature(formula).parameters
    operator = name.partition("::")[2].partition(".")[0]
    places = [*parameters]
    known = [(key, places.index(key), parameters[key].default, values) for key, values in covers.items()]

    seen_dtypes = functools.cache(lambda: shown_dtypes(shown()))

    def refuse_rare(key: str, dtype: torch.dtype) -> None:
        seen = seen_dtypes().get(key, set())
        like = seen & _AS_MASKS if dtype == torch.bool else [other for other in seen if other.is_complex]
        if seen and not like:
            raise refused(operator, key, dtype, " or ".join(sorted(map(str, seen))))

    @functools.wraps(formula)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for key, value in (*zip(places, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor) and value.dtype in _RARE:
                refuse_rare(key, value.dtype)
        for key, place, default, values in known:
            value = args[place] if place < len(args) else kwargs.get(key, default)
            if value not in values:
                given = "a tensor" if isinstance(value, torch.Tensor) else value
                raise unsupported(operator, key, given, " and ".join(map(repr, values)))
        return formula(*args, **kwargs)

    return checked
