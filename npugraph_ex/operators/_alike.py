"""Arguments that the device takes only alike: in one shape, or in one dtype. A formula in ATen would broadcast and promote them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from npugraph_ex.operators._precision import refused


class Alike(NamedTuple):
    """The arguments that have the shape, or the dtype, of the first one named; those that are None are left out.

    Attributes:
        shape: as in ``("x1", "x2")``: no operand broadcasts.
        dtype: as in ``("x1", "x2", "gamma")``: no operand is promoted.
    """

    shape: Sequence[str] = ()
    dtype: Sequence[str] = ()

    def checking(self, name: str, formula: Callable[..., Any]) -> Callable[..., None]:
        """A function with the arguments of ``formula`` that raises ``refused(...)`` where they are not alike."""
        operator = name.partition("::")[2].partition(".")[0]
        parameters = [*inspect.signature(formula).parameters]
        wanted = [
            (what, [(key, parameters.index(key)) for key in keys])
            for what, keys in (("shape", self.shape), ("dtype", self.dtype))
            if keys
        ]

        @functools.wraps(formula)
        def check(*args: Any, **kwargs: Any) -> None:
            for what, ((leader, first), *others) in wanted:
                expected = getattr(args[first] if first < len(args) else kwargs[leader], what)
                for key, place in others:
                    value = args[place] if place < len(args) else kwargs.get(key)
                    if isinstance(value, torch.Tensor) and getattr(value, what) != expected:
                        shown = tuple(expected) if isinstance(expected, torch.Size) else expected
                        raise refused(operator, key, getattr(value, what), f"of the {what} of {leader}, {shown}")

        return check


def before(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` after ``check``, which takes its arguments and raises."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return checked
