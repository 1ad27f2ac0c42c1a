"""Lifting: every spelling of a form becomes its operator or is refused by values, and what nearly is a form stays."""

from __future__ import annotations

from npugraph_ex_conformance.examples.spellings import spelling_example
from npugraph_ex_conformance.session import Run


def test_spellings(run: Run) -> None:
    """Norms, rotary embeddings, activations, gated products, spelled at random: lifted and replayed as in eager mode."""
    run.check_examples(spelling_example, run.profile.spellings, what="(spellings)", kind="spellings")
