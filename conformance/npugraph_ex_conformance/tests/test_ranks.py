"""Random programs with collectives, on several ranks: eager mode, compiled graph and replays are what arithmetic gives."""

from __future__ import annotations

import pytest

from npugraph_ex_conformance.examples.ranks import rank_example
from npugraph_ex_conformance.session import PROFILES, Run


@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_over_ranks(run: Run, ranks: int) -> None:
    """Collectives of every kind, operators that communicate, a side stream, results that one rank leaves unused."""
    if run.target.kind != "emulated":
        pytest.skip("the ranks are emulated devices in processes of their own")
    if ranks == 4 and run.profile is PROFILES["quick"]:
        pytest.skip("in the profiles full and nightly")
    for number in range(run.profile.ranks // (ranks // 2)):
        example = run.seed * 1_000_003 + number
        with run.entered("(ranks)", source=f"rank_example({example}, {ranks})", kind="ranks"):
            assert rank_example(example, ranks) == ""
