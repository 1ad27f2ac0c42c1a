"""The exit statuses of `npugraph-ex conformance` and `validate` are those that their help promises: 0, 1 and 2."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from npugraph_ex import cli

MEANINGS = {
    pytest.ExitCode.OK: 0,
    pytest.ExitCode.TESTS_FAILED: 1,
    pytest.ExitCode.INTERNAL_ERROR: 1,
    pytest.ExitCode.INTERRUPTED: 2,
    pytest.ExitCode.USAGE_ERROR: 2,
    pytest.ExitCode.NO_TESTS_COLLECTED: 2,
}


@pytest.mark.parametrize("status", MEANINGS, ids=lambda status: status.name)
def test_statuses_of_pytest_become_three(
    status: pytest.ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All held, something failed, nothing ran; in the last case a line says why."""
    monkeypatch.setattr(pytest, "main", lambda _arguments, **_: status)
    assert cli.main(["conformance", "-k", "swiglu"]) == MEANINGS[status]
    assert ("no test ran" in capsys.readouterr().err) == (status == pytest.ExitCode.NO_TESTS_COLLECTED)


def test_quiet_leaves_out_the_tests_that_hold(tmp_path: Path) -> None:
    """The tables come as without it, and no line for a test that is right."""
    command = [sys.executable, "-m", "npugraph_ex", "conformance", "-k", "test_idioms", "--jobs=1"]
    loud, quiet = (
        subprocess.run(
            [*command, f"--report-dir={tmp_path / name}", *words], capture_output=True, text=True, check=True
        ).stdout
        for name, words in (("loud", ()), ("quiet", ("--quiet",)))
    )
    line = re.compile(r"^ok +[\d.]+ s ", re.MULTILINE)
    assert line.search(loud)
    assert not line.search(quiet)
    assert "target emulated" in quiet


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["conformance", "mutants", "no-such-fault"], "there is no mutant called 'no-such-fault'"),
        (["validate", "json", "--dtype", "float8"], "--dtype must be one of"),
        (["validate", "json", "--target", "npu"], "no NPU on this machine"),
    ],
)
def test_wrong_use_is_status_two(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing ran, and one line says why."""
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    line, *address = shown.splitlines()
    assert said in line
    assert address in ([], ["help: npugraph-ex help TargetError"])


@pytest.mark.parametrize("table", ["mutants", "alarms"])
def test_the_tables_have_help_of_their_own(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their own options, and not those of a run; wherever --help stands."""
    for words in ([table, "--help"], ["--help", table]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["conformance", *words])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: npugraph-ex conformance {table} ")
        assert "--profile" not in shown


@pytest.mark.parametrize("option", [["--seed", "5"], ["--resume"], ["--report-dir", "x"], ["--jobs", "2"]])
def test_the_tables_refuse_options_of_a_run(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What would do nothing is said to do nothing."""
    assert cli.main(["conformance", *option, "alarms", "--examples", "1"]) == 2
    assert f"conformance alarms takes no {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["conformance", "validate"])
def test_the_help_says_what_the_statuses_mean(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that calls the command need not guess."""
    with suppress(SystemExit):
        cli.main([command, "--help"])
    assert "exit status: 0 " in capsys.readouterr().out
