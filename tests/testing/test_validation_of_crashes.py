"""What ended a process is left out of the next one's validation, which says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.pattern_matcher import joint_fwd_bwd

from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.testing import Validation, ValidationFinding, validate_replacement
from npugraph_ex.testing.crashes import Crash, FlightRecorder, recording
from npugraph_ex.testing.generator.patterns import pattern_of
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.validation.alone import Bench
from npugraph_ex.testing.validation.effort import Effort
from npugraph_ex.testing.validation.survey import asked, example_setting
from npugraph_ex.testing.validation.training import joint_trials
from npugraph_ex.testing.validation.trials import Trial, at_finite_inputs, tried
from npugraph_ex.testing.validation.turns import Turn

TOLD = "the process was stopped there by SIGFPE"


def doubled(x: Any) -> Any:
    """What is replaced, by itself."""
    return torch.relu(x * 2)


def _validated(recorder: FlightRecorder) -> Validation:
    with recording(recorder):
        return validate_replacement(doubled, doubled, [torch.empty(8, device="npu")], max_examples=1)


def test_a_rule_that_crashed_often_is_not_validated_again() -> None:
    """The verdict has the reason; a rule that was validated before a crash keeps what was found."""
    name = f"{__name__}.doubled"
    found = _validated(FlightRecorder(crashes=[Crash(name, f"size {number}", "SIGFPE") for number in range(6)]))
    assert (found.verdict, found.programs, len(found.findings)) == ("not-judged", 0, 1)
    assert found.findings[0].text == "its validation was stopped 6 times, for size 5 by SIGFPE."
    recorder = FlightRecorder.shared()
    kept = Validation(name, (ValidationFinding("refuted", "wrong", fails=True),))
    recorder.keep("another rule", "what was found of it")
    recorder.keep(name, kept)
    assert _validated(recorder) == kept


@pytest.mark.slow
def test_nothing_that_crashed_is_computed() -> None:
    """Neither by the matcher, alone, in a random program, nor as a joint graph; other turns of the setting are."""
    x = torch.empty(8, device="npu", requires_grad=True)
    with register_replacement(doubled, doubled, [x], joint_fwd_bwd) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        pattern = pattern_of(prepared.rule)
        setting = example_setting(pattern)
        recorder = FlightRecorder(crashes=[Crash("r", "float32[8]", "SIGFPE")])
        with recording(recorder), recorder.validates("r"):
            assert asked(prepared, pattern, setting).reason == f"CrashedError: {TOLD}"
            (joint,) = joint_trials(prepared, pattern, [setting], Effort(examples=1))
            assert joint.verdict is None
            trial = Trial(setting, Case("def program():\n    pass\n", (), ({}, {})), Outcome(), "not fused")
            for made in (tried(pattern, trial), at_finite_inputs(trial)):
                assert (made.fate, made.outcome.failures) == ("not judged", [TOLD])
        recorder.crashes[0] = Crash("r", "float32[8] (a size of 0, inside memory)", "SIGFPE")
        with recording(recorder), recorder.validates("r"):
            bench = Bench(prepared, pattern, {})
            assert bench.trial(Turn(("a size of 0", "inside memory"), setting)) is None
            assert bench.missed == f"CrashedError: {TOLD}"
            assert asked(prepared, pattern, setting).answer == "fused"
