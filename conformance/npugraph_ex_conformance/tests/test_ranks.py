"""Programs and decoders on several ranks: eager mode, compiled graph and replays give what arithmetic or one device gives."""

from __future__ import annotations

import pytest

from npugraph_ex_conformance.examples.ranks import rank_decoder, rank_example
from npugraph_ex_conformance.session import PROFILES, Run


@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_over_ranks(run: Run, ranks: int) -> None:
    """Collectives of every kind, messages, operators that communicate, a side stream, results that one rank leaves unused.

    Around the compiled program stand those that no graph holds: scatter, messages, reduce.
    """
    if run.target.kind != "emulated":
        pytest.skip("the ranks are emulated devices in processes of their own")
    if ranks == 4 and run.profile is PROFILES["quick"]:
        pytest.skip("in the profiles full and nightly")
    for number in range(run.profile.ranks // (ranks // 2)):
        example = run.seed * 1_000_003 + number
        with run.entered("(ranks)", source=f"rank_example({example}, {ranks})", kind="ranks"):
            assert rank_example(example, ranks) == ""


@pytest.mark.parametrize("kind", ["tensor", "experts"])
def test_decoders_over_two_ranks(run: Run, kind: str) -> None:
    """Qwen3 with its layers, Qwen3-MoE with its experts spread over two ranks decode the tokens of one device."""
    if run.target.kind != "emulated":
        pytest.skip("the ranks are emulated devices in processes of their own")
    if kind not in run.profile.rank_decoders:
        pytest.skip("in the profiles full and nightly")
    tokens = run.profile.tokens // 3
    with run.entered("(ranks)", source=f"rank_decoder({kind!r}, {tokens})", kind="ranks"):
        assert rank_decoder(kind, tokens) == ""
