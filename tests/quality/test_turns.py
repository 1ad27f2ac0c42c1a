"""The slow tests take turns: each runs at one of four commits in a row, and the runs are about equally long."""

from __future__ import annotations

import pytest
from turns import Turn

TESTS = [f"tests/test_{file}.py::test_{name}" for file in "abcdefgh" for name in range(50)]


@pytest.mark.parametrize("commits", [4, 1001])
def test_each_runs_at_one_of_four_commits(commits: int) -> None:
    """Whatever the first of the four is."""
    parts = [set(filter(Turn.from_words(f"{commits + later}/4").has, TESTS)) for later in range(4)]
    assert sum(map(len, parts)) == len(TESTS)
    assert set.union(*parts) == set(TESTS)
    assert min(map(len, parts)) > len(TESTS) / 6


def test_without_turns_all_run() -> None:
    """As in `tox -e tests`."""
    assert all(map(Turn.from_words("0/1").has, TESTS))


@pytest.mark.parametrize("words", ["", "3", "a/4", "1/0", "-1/4"])
def test_other_words_are_refused(words: str) -> None:
    """Before any test runs."""
    with pytest.raises(pytest.UsageError, match="such as 0/4"):
        Turn.from_words(words)
