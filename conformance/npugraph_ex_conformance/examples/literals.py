"""Examples about numbers in a pattern: twins, which are equal and make another dtype, and sizes, which only look equal.

Each is a rule that a user might register, the program that it is meant for, which must fuse, and its near-misses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex_conformance.examples.applied_rules import applied

_LARGE = 1 << 30
"""A number of which an int32 holds no more than the single."""
_TWINS: tuple[tuple[str, torch.dtype, float, float, bool], ...] = (
    ("mul", torch.int32, 2, 2.0, False),
    ("mul", torch.int32, 2.0, 2, False),
    ("add", torch.bool, True, 1, False),
    ("add", torch.bool, 1, True, False),
    ("add", torch.bool, 1, 1.0, False),
    ("mul", torch.float32, 2, 2.0, True),
    ("mul", torch.float16, 1.0, True, True),
    ("clamp", torch.int32, 2, 2.0, False),
    ("clamp", torch.int32, 2.0, 2, False),
    ("clamp", torch.float32, 2, 2.0, True),
    ("copysign", torch.float32, 0.0, -0.0, False),
    ("copysign", torch.float32, -0.0, 0.0, False),
    ("copysign", torch.float32, -0.0, 0, False),
    ("copysign", torch.float32, 0.0, 0, True),
)
"""An operator, the dtype of a tensor, a number in the pattern, the same number in the program, and whether they do the same."""
_TAKES: Mapping[str, Callable[[torch.Tensor, float], torch.Tensor]] = MappingProxyType(
    {
        "mul": torch.mul,
        "add": torch.add,
        "clamp": lambda x, least: torch.mul(torch.clamp(x, min=least), 2),
        "copysign": torch.copysign,
    }
)


def literal_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is. ``seed`` modulo 2 chooses its kind."""
    kinds = (_twin, _size)
    try:
        return kinds[seed % len(kinds)](random.Random(seed))
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


def _twin(draw: random.Random) -> str:
    """Beside integers and bools 2 and 2.0, 1 and True compute in different dtypes: one wraps around, one saturates.

    The division makes the results' dtypes equal again, so that nothing but the number itself gives the twin away. The sign of a
    zero is one that operators read.
    """
    name, dtype, number, twin, alike = draw.choice(_TWINS)
    taking = _TAKES[name]

    def program(x: torch.Tensor, value: float) -> torch.Tensor:
        return torch.div(taking(x, value), 4)

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(taking(x, number), 0.25)

    shape = (draw.randint(2, 4), draw.randint(2, 4))
    generator = torch.Generator().manual_seed(draw.randint(0, _LARGE))
    low, high = (0, 2) if dtype == torch.bool else (-_LARGE, _LARGE) if dtype == torch.int32 else (-8, 9)
    values = torch.randint(low, high, shape, generator=generator).to(dtype)
    with register_replacement(lambda x: program(x, number), fused, [torch.ones(2, 2).to(dtype)]) as rule:
        return applied(lambda x: program(x, number), [values], [rule], 1) or applied(
            lambda x: program(x, twin), [values], [rule], int(alike)
        )


def _size(draw: random.Random) -> str:
    """A size as a value: only that size of the very tensor will do, whatever numbers it happens to equal."""
    rows, columns = draw.sample(range(2, 7), 2)
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(draw.randint(0, _LARGE)))

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, x.shape[0])

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(torch.neg(x), -x.shape[0])

    misses = (
        lambda x: torch.mul(x, x.shape[1]),
        lambda x: torch.mul(x, x.shape[0] + 1),
        lambda x: torch.mul(x, rows),
        lambda x: torch.mul(x, x.shape[0] * x.shape[1]),
    )
    with register_replacement(scaled, fused, [torch.empty(8, 8)]) as rule:
        return applied(scaled, [values], [rule], 1, dynamic=True) or applied(
            draw.choice(misses), [values], [rule], 0, dynamic=True
        )
