"""Arguments that the device takes only alike: in one shape, or in one dtype. A formula in ATen would broadcast and promote them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from npugraph_ex.operators._precision import refused


class Alike(NamedTuple):
    """The arguments that have the shape, or the dtype, of the first one named; those that are None are left out.

    Attributes:
        shape: as in ``("x1", "x2")``: no operand broadcasts.
        dtype: as in ``("x1", "x2", "gamma")``: no operand is promoted.
        besides: the dtypes that some of those arguments may have instead, as in ``{"gamma": (torch.float32,)}``.
    """

    shape: Sequence[str] = ()
    dtype: Sequence[str] = ()
    besides: Mapping[str, Sequence[torch.dtype]] = MappingProxyType({})

    def groups(self) -> Iterator[tuple[str, Sequence[str]]]:
        """The groups that are not empty: ``("shape", arguments)`` and ``("dtype", arguments)``."""
        yield from ((what, names) for what, names in (("shape", self.shape), ("dtype", self.dtype)) if names)

    def fits(self, what: str, name: str, value: torch.Tensor, leader: torch.Tensor) -> bool:
        """Whether the device takes the argument ``name`` beside the first of its group."""
        if what == "shape":
            return value.shape == leader.shape
        return value.dtype == leader.dtype or value.dtype in self.besides.get(name, ())

    def checking(self, name: str, formula: Callable[..., Any]) -> Callable[..., None]:
        """A function with the arguments of ``formula`` that raises ``refused(...)`` where they are not alike."""
        operator = name.partition("::")[2].partition(".")[0]
        parameters = [*inspect.signature(formula).parameters]
        wanted = [(what, [(key, parameters.index(key)) for key in keys]) for what, keys in self.groups()]

        @functools.wraps(formula)
        def check(*args: Any, **kwargs: Any) -> None:
            for what, ((leader, first), *others) in wanted:
                expected = args[first] if first < len(args) else kwargs[leader]
                for key, place in others:
                    value = args[place] if place < len(args) else kwargs.get(key)
                    if isinstance(value, torch.Tensor) and not self.fits(what, key, value, expected):
                        raise refused(
                            operator, key, getattr(value, what), self._expectation(what, key, leader, expected)
                        )

        return check

    def _expectation(self, what: str, key: str, leader: str, value: torch.Tensor) -> str:
        shown = tuple(value.shape) if what == "shape" else value.dtype
        others = self.besides.get(key, ()) if what == "dtype" else ()
        return " or ".join((f"of the {what} of {leader}, {shown}", *(str(one) for one in others if one != value.dtype)))


def before(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` after ``check``, which takes its arguments and raises."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return checked
