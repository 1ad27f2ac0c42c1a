"""The count of false alarms: programs of every family in turn, and what is reported of one is an alarm."""

from __future__ import annotations

import pytest

from npugraph_ex import cli, testing
from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex_conformance.false_positives import JUDGED, count_alarms


@pytest.mark.slow
def test_every_family_has_its_share() -> None:
    """A round checks one program of each, and none raises an alarm."""
    alarms = count_alarms(len(JUDGED), first=40 * len(JUDGED))
    assert dict(alarms.examples) == dict.fromkeys(JUDGED, 1)
    assert alarms.raised == []
    assert {f"planted {rule}" for rule in RULE_NAMES} < set(JUDGED)


def test_what_is_reported_is_an_alarm_with_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    """With a fault on, the command exits 1 and names the program, which the family checks again."""
    with testing.mutant("fusion-never-matches"):
        assert cli.main(["conformance", "alarms", "--examples", "1"]) == 1
        said = capsys.readouterr().out
        first = next(iter(JUDGED))
        assert f"WRONG {first}, number 0: {JUDGED[first](0)}" in said
        assert "1 false alarm in 1 program" in said


def test_nothing_to_count_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of no programs would prove nothing."""
    with pytest.raises(SystemExit) as left:
        cli.main(["conformance", "alarms", "--examples", "0"])
    assert left.value.code == 2
    assert "--examples" in capsys.readouterr().err
    with pytest.raises(ValueError, match="int >= 1"):
        count_alarms(0)
