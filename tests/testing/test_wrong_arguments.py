"""The toolkit says what is wrong with an argument when it is given, not when it is used."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from npugraph_ex import testing
from npugraph_ex.testing import Case, Input, Limits, judge_floating, judge_quantised

RULE = "add_rms_norm_dynamic_quant"
NEG = "def program(x0):\n    return (torch.ops.aten.neg.default(x0),)\n"
ROW = (Input((4,)),)
WIDE = torch.zeros(3, dtype=torch.float64)
WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "a shape that is none": ("Input.shape .* it is 4", lambda: Input(4)),  # type: ignore[arg-type]
    "a negative size": ("Input.shape", lambda: Input((-4,))),
    "a symbol that is none": ("Input.shape", lambda: Input(("s0 + 1",))),
    "a layout": ("Input.layout .*transposed", lambda: Input((4,), layout="weird")),  # type: ignore[arg-type]
    "an alias": ("Input.alias_of", lambda: Input((4,), alias_of=-1)),
    "a scale": ("Input.scale", lambda: Input((4,), scale=math.nan)),
    "a dtype's name": ("Input.dtype .*float17", lambda: Input((4,), "float17")),
    "a size that is not given": ("must name s0", lambda: testing.make_inputs([Input(("s0",))], device="cpu")),
    "no function called program": ("function called program", lambda: Case("def foo(x): return x", ROW)),
    "one input": ("tuple of Input", lambda: Case(NEG, ROW[0])),  # type: ignore[arg-type]
    "a call without a size": ("must name s0 .* call 1", lambda: Case(NEG, (Input(("s0",)),), ({"s0": 2}, {}))),
    "an option": ("nope", lambda: Case(NEG, ROW, options={"nope": 1})),
    "no case": ("takes a Case", lambda: testing.check("x")),  # type: ignore[arg-type]
    "a rule": (RULE, lambda: testing.programs(pattern="typo")),
    "a near-miss": ("extra user", lambda: testing.programs(pattern=RULE, near_miss="typo")),
    "an integer dtype": ("floating-point", lambda: testing.planted_programs(pattern=RULE, dtype=torch.int32)),
    "a depth": ("prefix", lambda: testing.programs(pattern=RULE, prefix=-1)),
    "no limit": ("n >= 0.5", lambda: Limits(n=math.nan)),
    "an endless limit": ("k >= 1", lambda: Limits(k=math.inf)),
    "integers to judge": (
        "the candidate is torch.int8",
        lambda: judge_floating(torch.zeros(3, dtype=torch.int8), WIDE),
    ),
    "a narrow reference": ("float64", lambda: judge_floating(torch.zeros(3), torch.zeros(3))),
    "a narrow quotient": ("float64", lambda: judge_quantised(torch.zeros(3, dtype=torch.int8), torch.zeros(3))),
    "no examples": ("budget", lambda: testing.kill("replay-skips-an-input", budget=0)),
    "dtypes by name": ("dtypes", lambda: testing.validate_replacement(torch.neg, torch.neg, [WIDE], dtypes=["half"])),  # type: ignore[list-item]
}


@pytest.mark.parametrize("what", WRONG)
def test_said_when_it_is_given(what: str) -> None:
    """The message names the argument and what it may be."""
    message, give = WRONG[what]
    with pytest.raises((ValueError, TypeError), match=message):
        give()
