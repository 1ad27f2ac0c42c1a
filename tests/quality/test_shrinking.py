"""Shrinking takes so many tries and keeps the failure, and of several matches the right one is blamed.

`test_mutants` makes small what it found of planted bugs.
"""

from __future__ import annotations

import itertools
import time

import pytest

from npugraph_ex import testing
from npugraph_ex.testing import Case, Input, Program
from npugraph_ex.testing.generator.program import Ref, Step

RULE = "add_rms_norm_dynamic_quant"
TWO_PAIRS = """\
def program(x0, x1, x2, x3):
    y, _, total = torch.ops.npu.npu_add_rms_norm.default(x0, x1, x2)
    q, scale = torch.ops.npu.npu_dynamic_quant.default(y)
    z, _, sum = torch.ops.npu.npu_add_rms_norm.default(total, x1, x2)
    p, step = torch.ops.npu.npu_dynamic_quant.default(z, smooth_scales=x3)
    return (q, scale, p, step, sum)
"""
ROWS = (Input((3, 64), seed=1), Input((3, 64), seed=2), Input((64,), seed=3), Input((64,), seed=4))


def test_tries_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer depends on their number alone, however slow the machine is."""
    monkeypatch.setattr(time, "process_time", itertools.count(0, 10_000).__next__)
    program, tried = testing.sample(testing.exact_programs(), 2), list[Program]()

    def fails(candidate: Program) -> bool:
        tried.append(candidate)
        return True

    for tries in (0, 1, 5):
        tried.clear()
        small = testing.shrink(program, fails, tries=tries)
        assert len(tried) == 1 + tries  # the program itself is looked at first
        assert small == tried[-1]
    assert len(testing.shrink(program, fails).steps) < len(program.steps)


def test_a_program_that_does_not_fail_is_not_shrunk() -> None:
    """There would be nothing to keep."""
    with pytest.raises(ValueError, match="does not"):
        testing.shrink(testing.sample(testing.exact_programs(), 0), lambda _program: False)


def test_what_was_cut_and_cannot_run_is_no_smaller_failure() -> None:
    """Without the remainder the rows would be out of range, whatever error that is."""
    steps = (
        Step("aten.remainder.Scalar", (Ref("x1"), 4), results=("v0",)),
        Step("aten.index_select.default", (Ref("x0"), 0, Ref("v0")), results=("v1",)),
    )
    program = Program((Input((4,), "float32"), Input((3,), "int32", seed=1)), steps, ("v1",))
    small = testing.shrink(program, lambda candidate: "index_select" in candidate.source)
    assert small.steps == steps


def test_an_undeclared_view_stays_one_of_fresh_memory() -> None:
    """Of an input torch promises nothing: eager mode writes it through the view, and a functional graph does not."""
    steps = (
        Step("aten.clone.default", (Ref("x0"),), results=("v0",)),
        Step("aten._unsafe_view.default", (Ref("v0"), (4,)), results=("v1",)),
        Step("aten.neg.default", (Ref("v1"),), results=("v2",)),
    )
    small = testing.shrink(Program((Input((2, 2)),), steps, ("v2",)), lambda one: "_unsafe_view" in one.source)
    assert small.steps == steps[:2]


@pytest.mark.slow
def test_of_two_matches_the_wrong_one_is_blamed() -> None:
    """Both pairs are fused, only the smoothed one wrongly."""
    case = Case(TWO_PAIRS, ROWS, route="fx", expected=2)
    assert testing.check(case).ok
    with testing.mutant("quant-drops-smoothing"):
        outcome = testing.check(case)
        blamed = testing.find_guilty(case)
    assert "the worst, at (" in outcome.failures[0]
    assert blamed.startswith(f"pass fusion: rule {RULE}, match npu_add_rms_norm_1,")
    assert blamed.endswith("alone of 2")
