"""Arguments of which a formula knows some values, and would take any other one in silence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from npugraph_ex.operators._precision import unsupported


def covering(name: str, covers: Mapping[str, Collection[object]], formula: Callable[..., Any]) -> Callable[..., Any]:
    """``formula``, which raises ``unsupported(...)`` for other values of the arguments in ``covers`` than those there."""
    parameters = inspect.signature(formula).parameters
    operator = name.partition("::")[2].partition(".")[0]
    places = [*parameters]
    known = [(key, places.index(key), parameters[key].default, values) for key, values in covers.items()]

    @functools.wraps(formula)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for key, place, default, values in known:
            value = args[place] if place < len(args) else kwargs.get(key, default)
            if value not in values:
                given = "a tensor" if isinstance(value, torch.Tensor) else value
                raise unsupported(operator, key, given, " and ".join(map(repr, values)))
        return formula(*args, **kwargs)

    return checked
