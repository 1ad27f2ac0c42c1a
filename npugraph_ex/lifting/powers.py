"""Reads powers in normal form: a root, an inverse, a power by a number, and the exponential of a multiple of a logarithm.

::

    sqrt(1 / x)    exp(-0.5 * log(x))    1 / x ** 0.5    pow(sqrt(x), -1)        all are x ** -0.5
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms

_aten = torch.ops.aten
_EXPONENTS = {_aten.sqrt.default: 0.5, _aten.rsqrt.default: -0.5, _aten.square.default: 2.0}
_POWERS = (_aten.pow.Tensor_Scalar, *_EXPONENTS)
_LOGARITHMS = {_aten.exp.default: _aten.log.default, _aten.exp2.default: _aten.log2.default}
"""By exponential: the logarithm of its base."""
_DEEPEST = 6


@dataclass(frozen=True)
class Power:
    """``scale * base ** exponent``."""

    base: fx.Node
    exponent: float = 1.0
    scale: float = 1.0

    def to(self, exponent: float) -> Power | None:
        """A power of it; None where that is another function.

        The root of a square is no power of what is squared, nor is the square of a root where it is negative.
        """
        whole = self.exponent * exponent
        if not exponent.is_integer() and (self.scale <= 0 or whole.is_integer() or self.exponent % 2 == 0):
            return None
        if self.scale == 0 or (whole.is_integer() and not self.exponent.is_integer()):
            return None
        return Power(self.base, whole, self.scale**exponent)


def power(node: fx.Node, inside: Callable[[fx.Node], fx.Node] = terms.core, depth: int = _DEEPEST) -> Power:
    """``node`` as a power of what is none itself, times a number.

    Args:
        node: it.
        inside: what a power is looked for behind: casts, or reshapes, too.
        depth: how many powers in powers are taken apart.
    """
    inner = inside(node)
    if not depth:
        return Power(inner)
    if terms.calls(inner, *_POWERS):
        exponent = terms.number(_EXPONENTS.get(inner.target, inner.args[-1]))  # type: ignore[call-overload]
        return Power(inner) if exponent is None else _raised(inner.args[0], exponent, inside, depth - 1)
    if terms.calls(inner, *_LOGARITHMS):
        return _exponential(inner, inside, depth) or Power(inner)
    parts = terms.product(inner, inside=inside)
    alone = [*parts.factors, *parts.divisors]
    if len(alone) != 1 or alone[0] is inner or not math.isfinite(parts.scale):
        return Power(inner)
    of = _raised(alone[0], 1.0 if parts.factors else -1.0, inside, depth - 1)
    return replace(of, scale=parts.scale * of.scale)


def _raised(base: Any, exponent: float, inside: Callable[[fx.Node], fx.Node], depth: int) -> Power:
    """``base ** exponent``, by the power that the base is where one power is the other."""
    return power(base, inside, depth).to(exponent) or Power(base, exponent)


def _exponential(node: fx.Node, inside: Callable[[fx.Node], fx.Node], depth: int) -> Power | None:
    """The exponential of a multiple of a logarithm, which both have one base."""
    parts = terms.product(node.args[0], inside=inside)
    if len(parts.factors) != 1 or parts.divisors or not math.isfinite(parts.scale):
        return None
    logarithm = inside(parts.factors[0])
    if not terms.calls(logarithm, _LOGARITHMS[node.target]):  # type: ignore[index]
        return None
    return _raised(logarithm.args[0], parts.scale, inside, depth - 1)
