"""Every registered fusion rule, planted into random programs: fused exactly where it must be, and equal to eager mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from npugraph_ex import testing
from npugraph_ex.fusion.rules import RULE_NAMES, operands_of
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex.testing.generator.near_misses import applicable
from npugraph_ex_conformance.session import Run

PATTERNS = sorted(RULE_NAMES)
DTYPES = [(name, dtype) for name in PATTERNS for dtype in operands_of(name).dtypes]
with client_operators():
    NEAR_MISSES = [
        (name, kind)
        for name in PATTERNS
        for kind in dict.fromkeys(kind for pattern in testing.registered_patterns(name) for kind in applicable(pattern))
    ]


@pytest.fixture(autouse=True, scope="module")
def _operators() -> Iterator[None]:
    """Operators of vLLM-Ascend that a rule is about exist, by their references if need be."""
    with client_operators():
        yield


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("pattern", "dtype"), DTYPES, ids=lambda value: str(value).removeprefix("torch."))
def test_planted(run: Run, pattern: str, dtype: torch.dtype, dynamic: bool) -> None:
    """A planted pattern is fused exactly once, and eager mode, optimised graph and replay agree."""
    maker = testing.planted_programs(pattern=pattern, dtype=dtype, dynamic=dynamic)
    name = f"planted {pattern} {_dtype_name(dtype)} {dynamic}"
    run.explore(name, maker, examples=run.profile.planted, what=pattern)


@pytest.mark.parametrize(("pattern", "kind"), NEAR_MISSES)
def test_near_miss(run: Run, pattern: str, kind: str) -> None:
    """What only resembles a pattern is left alone, and computes what it did."""
    maker = testing.planted_programs(pattern=pattern, near_miss=kind)
    run.explore(f"near-miss {pattern} {kind}", maker, examples=run.profile.near_miss, what=pattern)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_planted_through_torch_compile(run: Run, pattern: str, dynamic: bool) -> None:
    """The same holds from torch.compile on: Dynamo, AOT, passes, capture, replay."""
    maker = testing.planted_programs(pattern=pattern, dynamic=dynamic)
    name = f"compiled {pattern} {dynamic}"
    run.explore(name, maker, examples=run.profile.compiled, route="compile", what=pattern)
