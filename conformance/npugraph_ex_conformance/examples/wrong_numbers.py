"""Examples of rules whose replacement has a number that is one step of the dtype off, where eager mode rounds nothing, or once.

A dtype of 16 bits has few digits, and what it rounds hides such a number, unless the judge asks what the replacement means. The
same rule with the right number, spelled otherwise, must stay right.
"""

from __future__ import annotations

import random

import torch

from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.generator.program import function_of
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check

_FORMS = (
    ("torch.clamp(x, max={c})", "torch.where(x > {c}, {c}, x)"),
    ("torch.clamp(x, min={c})", "torch.where(x < {c}, {c}, x)"),
    ("torch.clamp(x * 2.0, max={c})", "torch.clamp(x, max={c} / 2.0) * 2.0"),
    ("torch.where(x > {c}, x, 0.0)", "torch.where(x <= {c}, 0.0, x)"),
    ("torch.maximum(x, x * {c})", "torch.where(x * {c} > x, x * {c}, x)"),
    ("x * {c}", "(x.float() * {c}).to(x.dtype)"),
    ("(x * {c}).float()", "{c} * x.float()"),
    ("x + {c}", "(x.float() + {c}).to(x.dtype)"),
    ("{c} - x", "torch.neg(x - {c})"),
)
"""How a pattern is written, and how a right replacement is."""


def one_step_off(draw: random.Random) -> str:
    """A wrong number is seen, the right one is not taken for wrong; says what is not so."""
    dtype = draw.choice((torch.float16, torch.bfloat16))
    number, beside = _neighbours(draw, dtype)
    search, right = draw.choice(_FORMS)
    for replace, c in ((right, number), (search, beside), (right, beside)):
        said = _failures(
            search.format(c=number), replace.format(c=c), dtype, (number, beside), draw.randint(0, 1 << 20)
        )
        if bool(said) != (c != number) or any(not one.startswith("optimised") for one in said):
            return f"{search} of {number} became {replace} of {c} in {dtype}: {said or 'nothing is said'}"
    return ""


def _neighbours(draw: random.Random, dtype: torch.dtype) -> tuple[float, float]:
    """A number of the dtype, between 1/4 and 256 and no power of two, and the next larger or smaller one."""
    digits = round(-torch.tensor(torch.finfo(dtype).eps).log2().item())
    step = 2.0 ** (draw.randint(-2, 7) - digits)
    place = draw.randint(2**digits + 1, 2 ** (digits + 1) - 1)
    return place * step, (place + draw.choice((-1, 1))) * step


def _failures(search: str, replace: str, dtype: torch.dtype, numbers: tuple[float, float], seed: int) -> list[str]:
    """What the judge says of a program that is the pattern alone."""
    sources = [f"def program(x):\n    return {text}\n" for text in (search, replace)]
    given = Input((16, 32), str(dtype).removeprefix("torch."), seed=seed, around=numbers)
    searched, replacement = map(function_of, sources)
    with register_replacement(searched, replacement, [torch.empty(4, 8, dtype=dtype)]):
        outcome = check(Case(sources[0], (given,), ({}, {}), route="fx", expected=1))
    return outcome.failures
