"""The exit statuses of `npugraph-ex conformance` and `validate` are those that their help promises: 0, 1 and 2."""

from __future__ import annotations

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
def test_statuses_of_pytest_become_three(status: pytest.ExitCode, monkeypatch: pytest.MonkeyPatch) -> None:
    """All held, something failed, nothing ran."""
    monkeypatch.setattr(pytest, "main", lambda _arguments: status)
    assert cli.main(["conformance", "-k", "swiglu"]) == MEANINGS[status]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["conformance", "mutants", "no-such-fault"], "there is no mutant called no-such-fault"),
        (["validate", "json", "--dtype", "float8"], "--dtype must be one of"),
        (["validate", "json", "--max-examples", "0"], "max_examples"),
        (["validate", "json", "--target", "npu"], "no NPU on this machine"),
    ],
)
def test_wrong_use_is_status_two(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing ran, and one line says why."""
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("command", ["conformance", "validate"])
def test_the_help_says_what_the_statuses_mean(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that calls the command need not guess."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "exit status: 0 " in capsys.readouterr().out
