"""`npugraph-ex env`: what it tells of device, name, compiler and releases."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from interpreter import PYTHON

from npugraph_ex.cli import main
from npugraph_ex.observe import environment

PLAIN, EMULATED = "python script.py", "npugraph-ex run --emulate script.py"

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_env_tells_device_and_name(command: Command) -> None:
    """On the emulated device: what is installed, which device, and that both faces of the name are this library."""
    done = command("env", "--json", "--emulate", NPU_EMULATOR_FORCE="1")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["problems"]
    assert found["device"] == "emulated"
    assert found["import_name"].endswith("npugraph_ex/__init__.py")
    assert found["backend_string"] == "npugraph_ex_autoload.backend"
    assert found["packages"]["torch_npu"] in found["tested"].values()
    assert found["works"] is True


@pytest.mark.slow
def test_env_tells_that_the_name_is_torch_npus(command: Command) -> None:
    """Under NPUGRAPH_EX=bundled the command still runs and says whose the name is."""
    done = command("env", "--json", "--emulate", NPUGRAPH_EX="bundled", NPU_EMULATOR_FORCE="1")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["problems"]
    assert found["choice"] == "bundled"
    assert "torch_npu/dynamo/npugraph_ex" in found["import_name"]
    assert found["backend_string"].startswith("torch_npu.dynamo.")


# What the probe answers, with the device and without.
GOOD: dict[str, str | None] = {
    "error": None,
    "device": "Ascend910B3",
    "import_name": str(Path(environment.__file__).parents[1] / "__init__.py"),
    "backend_string": "npugraph_ex_autoload.backend",
}


NO_CANN: dict[str, str | None] = {
    "error": "RuntimeError: Failed to load <- ImportError: libhccl.so: cannot open shared object file",
    "device": None,
    "import_name": None,
    "backend_string": None,
}


class _Answers:
    """Stands for `environment._ask`: gives one answer for the real device and one for the emulated."""

    def __init__(self, real: dict[str, str | None], emulated: dict[str, str | None]) -> None:
        self._by_emulate = {False: real, True: emulated}

    def __call__(self, *, emulate: bool, choice: str) -> dict[str, str | None]:
        return dict(self._by_emulate[emulate])


def _inspect(
    monkeypatch: pytest.MonkeyPatch, real: dict[str, str | None], emulated: dict[str, str | None], choice: str = ""
) -> environment.Environment:
    """Inspect with the two answers of the probe given, so that each machine can be had on any machine."""
    monkeypatch.setattr(environment, "_ask", _Answers(real, emulated))
    return environment.inspect(choice=choice)


def test_import_torch_failing_for_want_of_cann_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CANN: the library that is missing is named, the emulated device is offered, and it is no failure."""
    found = _inspect(monkeypatch, NO_CANN, GOOD)
    (problem,) = [problem for problem in found.problems if "import torch" in problem.what]
    assert "needs CANN's libhccl.so" in problem.what
    assert "npugraph-ex run --emulate script.py" in problem.remedy
    assert (problem.fatal, found.works, found.device) == (False, True, "emulated")
    assert found.commands == {PLAIN: False, EMULATED: True}


def test_neither_cann_nor_compiler_is_a_failure_with_two_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CANN and without a compiler nothing runs; both ways out are named."""
    monkeypatch.setattr(environment, "_compiler", lambda: None)
    monkeypatch.setattr(environment, "_shipped", lambda: False)
    found = _inspect(monkeypatch, NO_CANN, {**NO_CANN, "error": "BuildError: no C++ compiler found"})
    (problem,) = [problem for problem in found.problems if "import torch" in problem.what]
    assert "install CANN" in problem.remedy
    assert "g++" in problem.remedy
    assert (found.works, found.device) == (False, "none")
    assert found.commands == {PLAIN: False, EMULATED: False}


def test_a_real_device_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an NPU there is no talk of emulation."""
    found = _inspect(monkeypatch, GOOD, NO_CANN)
    assert (found.device, found.device_name, found.works) == ("npu", "Ascend910B3", True)
    assert found.commands == {PLAIN: True}


@pytest.mark.parametrize(
    ("real", "emulated", "lines", "status"),
    [
        ("cann", "good", ["does not work: {PLAIN}", "works:         {EMULATED}"], 0),
        ("cann", "cann", ["does not work: {PLAIN}", "does not work: {EMULATED}"], 1),
        ("good", "cann", ["works:         {PLAIN}"], 0),
    ],
)
def test_env_ends_with_what_works_here(
    real: str,
    emulated: str,
    lines: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last lines name each command and whether it works; the status is 0 where one does."""
    answers = {"good": GOOD, "cann": NO_CANN}
    monkeypatch.setattr(environment, "_ask", _Answers(answers[real], answers[emulated]))
    assert main(["env"]) == status
    said = [line.format(PLAIN=PLAIN, EMULATED=EMULATED) for line in lines]
    assert capsys.readouterr().out.rstrip().splitlines()[-len(said) - 1 :] == ["", *said]


def test_env_agrees_with_the_plain_command(tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]) -> None:
    """What `env` says of `python script.py` on this machine is what happens to it, outside the tests' emulated device.

    The canary needs what the script needs; without CANN it says what to add.
    """
    script = tmp_path / "script.py"
    script.write_text("import torch, npugraph_ex\ntorch.ones(1, device='npu')\n")
    variables = fresh_environment()
    plain = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, check=False, timeout=300)
    entry = "import sys; from npugraph_ex_autoload import command_line; sys.exit(command_line())"
    told, canary = (
        subprocess.run(
            [*PYTHON, "-c", entry, "env", option],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        for option in ("--json", "--canary")
    )
    assert (told.returncode, json.loads(told.stdout)["commands"][PLAIN]) == (0, plain.returncode == 0)
    assert (canary.returncode == 0) == (plain.returncode == 0)
    assert plain.returncode == 0 or re.fullmatch(
        "npugraph-ex: the names come from torch.*: lib.*; without CANN, add --emulate\n", canary.stderr
    )


@pytest.mark.parametrize("choice", ["", "bundled"])
def test_a_name_that_means_the_wrong_thing_is_a_failure(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """Whichever was asked for, getting the other is reported with both meanings."""
    other = {
        **GOOD,
        "import_name": "/x/torch_npu/dynamo/npugraph_ex/__init__.py",
        "backend_string": "torch_npu.dynamo._exec",
    }
    found = _inspect(monkeypatch, GOOD if choice else other, NO_CANN, choice)
    assert not found.works
    assert any("should mean" in problem.what for problem in found.problems)


def test_a_meaningless_switch_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt NPUGRAPH_EX is named with the right values."""
    found = _inspect(monkeypatch, GOOD, GOOD, "bundeld")
    (problem,) = [problem for problem in found.problems if problem.fatal]
    assert "'bundeld'" in problem.what
    assert "'bundled'" in problem.remedy


def test_another_torch_than_the_tested_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version outside the tested pairs is said, not refused."""
    versions = {"torch": "2.14.1", "torch_npu": "2.13.0"}
    monkeypatch.setattr(environment, "_version", lambda name: versions.get(name, "1.0"))
    found = _inspect(monkeypatch, GOOD, GOOD)
    (note,) = found.problems
    assert "torch 2.14.1" in note.what
    assert not note.fatal
