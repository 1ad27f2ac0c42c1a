"""A tensor times a number plus a tensor => one addition with ``alpha``. An extra rule, off unless switched on.

``x * scale + y`` and ``y + x * scale`` become ``torch.add(y, x, alpha=scale)``, which CANN computes in one kernel
(operator documentation, aclnnAdd: ``out = self + alpha * other``). Floating-point tensors of one dtype.

A product with a number is computed in float32; ``alpha`` may be rounded to the tensors' dtype before it is used. So the dtype
must represent the number exactly: 0.5 is possible, but 1e-6 in float16 would be 5 % wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._inductor.pattern_matcher import Match

from npugraph_ex.fusion.conditions import value_of
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules._built_in_rule import FLOATING, BuiltInRule, Operands

NAME = "muls_add"
_SIXTEEN_BITS = 16


def _search(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.add(torch.mul(x, scale), y)


def _search_swapped(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.add(y, torch.mul(x, scale))


def _replace(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.add(y, x, alpha=scale)


def _unsupported(match: Match) -> str | None:
    x, y = value_of(match, "x"), value_of(match, "y")
    if x is None or y is None or not x.dtype.is_floating_point or x.dtype != y.dtype:
        return "x and y must be floating-point tensors of one dtype"
    scale = float(match.kwargs["scale"])
    return None if is_exact(scale, x.dtype) else f"{scale} is no {x.dtype}, which alpha would be rounded to"


def is_exact(number: float, dtype: torch.dtype) -> bool:
    """Whether a 16-bit ``dtype`` represents ``number`` exactly; wider dtypes round it as the product does."""
    limits = torch.finfo(dtype)
    if limits.bits > _SIXTEEN_BITS or number == 0:
        return True
    fraction, _ = math.frexp(number)
    return limits.tiny <= abs(number) <= limits.max and (fraction * 2 / limits.eps).is_integer()


def _examples() -> list[Tensor]:
    return [torch.empty(2, 16, dtype=torch.float16, device="npu") for _ in range(2)]


RULE = BuiltInRule(
    variants=tuple(
        FusionRule(NAME, search, _replace, _examples, _unsupported, {"scale": 0.1875})
        for search in (_search, _search_swapped)
    ),
    default=False,
    order=40,
    operands=Operands(
        dtypes=FLOATING,
        numbers=(0.1875, -2.0, 0.001),
        refused_numbers=(0.001, 1e-6, 0.1),
        takes_empty=True,
        occurs_by_chance=True,
    ),
)
