"""The rules of the emulated device: it obeys each, a device that does not is noticed, and another's answers can be compared."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path

import pytest

import npu_emulator
from npu_emulator.measured import SWITCHES, read
from npu_emulator.settings import Settings
from npugraph_ex import cli
from npugraph_ex.versions import captured_generators
from npugraph_ex_conformance.campaign import fidelity
from npugraph_ex_conformance.fidelity.rule import ASSUMED, HEADER, RUNTIME, TORCH, TORCH_NPU
from npugraph_ex_conformance.fidelity.table import FIDELITY, all_rules
from npugraph_ex_conformance.items import CampaignSettings

RULES = all_rules()


def test_the_emulated_device_obeys_every_rule() -> None:
    """Every probe gives the rule's answer, one after the other in one process; there are at least 150."""
    ask = FIDELITY.opened(CampaignSettings())
    wrong = {answer.label for answer in map(ask, range(len(RULES))) if answer.message}
    # Older ones refuse this replay themselves, and say no code.
    assert wrong == ({"capture.replay"} if captured_generators.DIFFERENCE.older else set())
    assert len(RULES) >= 150


def test_every_rule_has_a_source() -> None:
    """It is one of the five, and a header or a document is named with the place in it."""
    for rule in RULES:
        assert rule.is_assumed or rule.source.startswith((f"{HEADER}: ", f"{RUNTIME}: ", TORCH, f"{TORCH_NPU}: ")), rule
        assert rule.says.endswith("."), rule
    assert sum(rule.source == ASSUMED for rule in RULES) == sum(rule.is_assumed for rule in RULES)


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
def test_the_errors_of_another_device_are_loaded(tmp_path: Path) -> None:
    """Each decision of the runtime gives the code that its rules have in a file, or none; what is no data is counted."""
    probes = {rule.name: rule.probe for rule in RULES}
    runtime, usual = npu_emulator.current().runtime, {rule.name: rule.answer for rule in RULES}
    for code in (107031, 0):
        answers = {name: str(code) if code else "done" for name in ("memory.kept", *chain(*SWITCHES.values()))}
        file = tmp_path / "npu.json"
        file.write_text(json.dumps({"answers": answers}))
        measured = read(str(file))
        assert set(measured.codes.values()) == {code}
        assert measured.others == ("memory.kept",)
        runtime.set_answers(measured.codes)
        try:
            found = {name: probes[name]() for rules in SWITCHES.values() for name in rules}
        finally:
            runtime.set_answers({})
        kept = {rule for decision in measured.contrary for rule in SWITCHES[decision]}
        assert found == {name: usual[name] if name in kept else answers[name] for name in found}
        assert len(kept) == (0 if code else 7)
        assert f" {1 + len(kept)} rule" in measured.describe("npu.json")
    assert probes["capture.query-event"]() == usual["capture.query-event"]
    for text in ("[]", "no JSON"):
        file.write_text(text)
        with pytest.raises(npu_emulator.EmulatorError, match="AS_MEASURED must be a file of"):
            Settings.from_environment(as_measured=str(file))


@pytest.mark.slow
def test_answers_of_another_device_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of answers is written; one with another answer makes the command fail, and both answers are printed."""
    file = tmp_path / "answers.json"
    command = ["fidelity", "-k", "memory.rounds"]
    assert cli.main([*command, "--output", str(file)]) == 0
    assert "4 rules, 0 of them only assumed; 0 differ" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["answers"]["memory.rounds-481"] == 1024
    here = dict(found["answers"])
    monkeypatch.setattr(fidelity, "ask", lambda *_: iter(here.items()))  # one start of a process is enough
    found["answers"]["memory.rounds-481"] = 2048
    file.write_text(json.dumps(found))
    assert cli.main([*command, "--as-measured", str(file)]) == 1
    assert "here: 1024; measured: 2048" in capsys.readouterr().out
    file.write_text(json.dumps({"answers": {name: here[name] for name in sorted(here)[1:]}}))
    assert cli.main([*command, "--as-measured", str(file)]) == 1
    assert f"0 differ\n1 are not in {file} and were not compared: {min(here)}" in capsys.readouterr().out
    file.write_text('{"answers": 5}')
    assert not os.environ.get("NPU_EMULATOR_AS_MEASURED")  # what this process starts next is the device of the rules
    assert cli.main([*command, "--as-measured", str(file)]) == 2
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--output", str(tmp_path / "nowhere" / "answers.json")])
    assert "has no object" in capsys.readouterr().err
