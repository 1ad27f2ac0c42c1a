"""A failure ends as a script that plain python runs: it exits 1 while the fault is there and 0 when it is gone."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from interpreter import PYTHON

from npugraph_ex import testing
from npugraph_ex.testing import Case, Input, Outcome, Target
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex_conformance.campaign.kinds import KINDS
from npugraph_ex_conformance.examples.callers import called_program
from npugraph_ex_conformance.items import CampaignSettings
from npugraph_ex_conformance.results import Books
from npugraph_ex_conformance.session import PROFILES, Run
from npugraph_ex_conformance.tests.test_capture import test_callers as callers_of_the_suite

ROOT = Path(__file__).parents[2]
PAIR = """\
def program(x0, x1, x2):
    y, rstd, total = torch.ops.npu.npu_add_rms_norm.default(x0, x1, x2)
    q, scale = torch.ops.npu.npu_dynamic_quant.default(y)
    return (q, scale, total)
"""
CASE = Case(PAIR, (Input((3, 64), seed=1), Input((3, 64), layout="strided", seed=2), Input((64,), seed=3)), expected=1)


def _run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment, check=False)


def _status_here(script: Path) -> object:
    """The exit status of a script that runs in this process."""
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    return left.value.code


@pytest.mark.slow
def test_a_planted_failure_reproduces_under_plain_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script names the guilty pass, is no longer than a page, fails as the suite did, and passes once mended."""
    with testing.mutant("quant-subtracts-residual"):
        outcome = testing.check(CASE)
        assert not outcome.ok
        script = testing.script_of(CASE, outcome)
    assert len(script.splitlines()) < 60
    assert "Guilty: pass fusion: rule add_rms_norm_dynamic_quant" in script
    failed = _run(script, tmp_path)
    assert failed.returncode == 1, failed.stderr
    assert outcome.failures[0] in failed.stdout
    (tmp_path / "mended.py").write_text(script.replace("    mutant='quant-subtracts-residual',\n", ""))
    assert _status_here(tmp_path / "mended.py") in (0, None)
    assert "right: fused 1 times" in capsys.readouterr().out


def test_a_script_has_its_inputs_whole() -> None:
    """Indices without their bound would index out of range in the script, and not in the suite."""
    inputs = (Input((3, 4), "float32", scale=0.5, seed=1, around=(6.0,)), Input((2,), "int64", below=3))
    case = Case("def program(x0, x1):\n    return torch.ops.aten.index_select.default(x0, 0, x1)\n", inputs)
    script = testing.script_of(case, Outcome(["optimised, call 0: wrong"]), guilty="nobody")
    shown = [line.strip().rstrip(",") for line in script.splitlines() if line.strip().startswith("Input(")]
    assert tuple(eval(line, {"Input": Input}) for line in shown) == inputs  # noqa: S307 - the text is our own


@pytest.mark.slow
def test_a_script_about_operators_of_a_client_brings_them(tmp_path: Path) -> None:
    """What vLLM-Ascend would define exists where the script runs, or it would fail for another reason than the suite did."""
    with client_operators(), testing.mutant("fusion-never-matches"):
        program = testing.sample(testing.planted_programs(pattern="qk_norm_rope", dynamic=False, prefix=0), 1)
        case = Case.of(program, route="fx")
        outcome = testing.check(case)
        script = testing.script_of(case, outcome, guilty="not looked for")
    failed = _run(script, tmp_path)
    assert failed.stdout.splitlines() == ["WRONG", *outcome.failures], failed.stderr


def test_there_is_no_script_for_what_did_not_fail() -> None:
    """A script that cannot fail would be a lie."""
    with pytest.raises(ValueError, match="failed"):
        testing.script_of(CASE, testing.check(CASE))


def _suite(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "conformance/npugraph_ex_conformance/tests", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_the_suite_fails_with_a_broken_pass_and_prints_the_script(tmp_path: Path) -> None:
    """`--mutant` makes the run exit 1; every report holds the small program and who is guilty; the script reproduces it."""
    done = _suite(
        "--mutant=quant-subtracts-residual",
        f"--report-dir={tmp_path}",
        "-k",
        "test_planted and dynamic_quant and float16 and static",
    )
    assert done.returncode == 1, done.stdout[-2000:]
    (script,) = tmp_path.glob("**/*.py")
    assert script.read_text(encoding="utf-8").splitlines()[0] in done.stdout
    assert _status_here(script) == 1
    tests = [json.loads(line) for line in (tmp_path / "tests.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    (failure,) = [test["failure"] for test in tests if test["failure"] is not None]
    assert failure["operators"] <= 6
    assert failure["source"].count("torch.ops.") == failure["operators"]
    assert failure["guilty"].startswith("pass fusion: rule add_rms_norm_dynamic_quant, match npu_add_rms_norm")
    assert failure["script"] == f"failures/{script.name}"
    assert tmp_path / failure["script"] == script
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"{failure['script']} reproduces it" in page
    for shown in (done.stdout, page):
        assert failure["guilty"] in shown
        assert f"to {failure['operators']} operators" in shown
    assert (tmp_path / "junit.xml").exists()
    assert (tmp_path / "cases.jsonl").exists()


@pytest.mark.slow
@pytest.mark.skipif(any(Path("/dev").glob("davinci*")), reason="this machine has an NPU")
def test_the_npu_target_refuses_in_one_sentence_where_there_is_none() -> None:
    """No traceback: a sentence, and an exit status."""
    command = [sys.executable, "-m", "npugraph_ex.cli", "conformance", "--target=npu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "no NPU" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_caller_s_failure_ends_as_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The suite's test fails with a small program that the same caller calls; a campaign gives the same script."""
    target, profile = Target("emulated", "", ()), replace(PROFILES["quick"], callers=1)
    run = Run(target, profile, 0, Books(None, {}), tmp_path)
    with testing.mutant("replay-ignores-addresses"), pytest.raises(pytest.fail.Exception) as failed:
        callers_of_the_suite(run)
    (path,), failure = tmp_path.glob("*.py"), run.failure
    script = path.read_text(encoding="utf-8")
    assert script in str(failed.value)
    assert failure is not None
    assert failure.operators == failure.source.count("torch.ops.") <= 2 < called_program(0).source.count("torch.ops.")
    assert _status_here(path) == 1
    assert f"WRONG\n{failure.message}\n" in capsys.readouterr().out
    path.write_text(script.replace("    mutant='replay-ignores-addresses',\n", ""), encoding="utf-8")
    assert _status_here(path) == 0
    shrink = KINDS["callers"].shrink
    assert shrink is not None
    assert shrink(CampaignSettings(), 0) == ""
    with testing.mutant("replay-ignores-addresses"):
        assert shrink(CampaignSettings(), 0) == script
