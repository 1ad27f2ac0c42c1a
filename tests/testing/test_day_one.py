"""The plan of the first five minutes on an NPU: what a step's end means for the others, and the decode at its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from npugraph_ex_conformance import day_one
from npugraph_ex_conformance.day_one import DayOneStep, follow, plan


def _step(code: str, **given: Any) -> DayOneStep:
    return DayOneStep("a step", (sys.executable, "-c", code), given.pop("seconds", 600), "look there first", **given)


@pytest.mark.parametrize(
    ("steps", "holds", "verdicts"),
    [
        ((_step(""), _step("")), True, ["ok", "ok"]),
        ((_step("exit(1)"), _step("")), False, ["FAILED", "ok"]),
        ((_step("exit(1)", is_finding=True), _step("")), True, ["LOOK", "ok"]),
        ((_step("exit(2)", is_finding=True),), False, ["FAILED"]),
        ((_step("exit(1)", is_needed=True), _step("")), False, ["FAILED"]),
        ((_step("import time; time.sleep(1000)", seconds=1), _step("")), False, ["FAILED", "ok"]),
    ],
    ids=["holds", "fails", "finds", "is misused", "is needed", "hangs"],
)
def test_a_step_that_fails_is_explained(steps: tuple[DayOneStep, ...], holds: bool, verdicts: list[str]) -> None:
    """Its verdict and what to do are said, and the steps that still make sense run."""
    said: list[str] = []
    assert follow(steps, said.append) is holds
    assert [line.split(": ")[1].split(",")[0] for line in said if ", " in line and line.startswith("[")] == verdicts
    assert "".join(said).count("look there first") == sum(verdict != "ok" for verdict in verdicts)


def test_a_quiet_plan_tells_only_what_is_not_ok(capfd: pytest.CaptureFixture[str]) -> None:
    """With what that step printed, and the result; no step prints by itself."""
    said: list[str] = []
    steps = (_step("print('fine')"), _step("print('why'); exit(1)"))
    assert not follow(steps, said.append, quiet=True)
    assert "".join(said) == (
        "why\n[2/2] a step: FAILED, 0 s\n  exit status 1: look there first.\nday one: failed: a step\n"
    )
    assert capfd.readouterr().out == ""
    said.clear()
    assert follow(steps[:1], said.append, quiet=True)
    assert said == ["day one: all steps held\n"]


def test_the_plan_takes_five_minutes() -> None:
    """At most; only the environment is needed by the other steps, and only the device's rules may differ."""
    steps = plan("npu", Path("reports"))
    assert sum(step.seconds for step in steps) <= 300
    assert [step.name for step in steps if step.is_needed] == ["environment"]
    assert [step.name for step in steps if step.is_finding] == ["fidelity"]


@pytest.mark.slow
def test_a_small_qwen3_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times a token are positive, eager and replayed; other logits than eager mode's are noticed."""
    found = day_one.decode(layers=1, steps=3)
    assert found["agrees"]
    assert found["eager"] > 0
    assert found["replayed"] > 0
    monkeypatch.setattr(torch, "compile", lambda decoder, **_: lambda *given: [-value for value in decoder(*given)])
    assert not day_one.decode(layers=1, steps=3)["agrees"]
