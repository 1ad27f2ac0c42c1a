"""Time to the first result, beyond AOT's own backend on the same model."""

from __future__ import annotations

import pytest
from both import BUNDLED, OURS, ask, ask_ours
from tables import Table

LAYERS = (2, 8, 32, 128)
CACHED = (8, 32)
WARM = 1 / 5
NOISE = 0.1
"""Of the whole: two compilations of one kind differ by as much on a busy machine."""


@pytest.mark.parametrize("layers", LAYERS)
def test_compiles_as_fast_as_bundled(layers: int, table: Table) -> None:
    """What the passes and the capture add is no more than the bundled backend adds."""
    answers = ask("compile_time", *map(str, LAYERS))
    ours, theirs = (answers[backend][LAYERS.index(layers)] for backend in (OURS, BUNDLED))
    table(
        "seconds of processor time to the first result",
        layers=layers,
        aot_eager=ours["aot_eager"],
        npugraph_ex=ours["whole"],
        beyond=ours["beyond"],
        **{"bundled, beyond": theirs["beyond"]},
    )
    assert ours["whole"] / ours["aot_eager"] <= theirs["whole"] / theirs["aot_eager"] + NOISE


def test_grows_linearly() -> None:
    """Four times the layers cost at most five times the time, passes and capture included."""
    answers = ask("compile_time", *map(str, LAYERS))[OURS]
    assert answers[3]["whole"] <= 5 * answers[2]["whole"]


def test_a_warm_process_starts_in_a_fifth(table: Table) -> None:
    """With `cache_compile` the first call of the next process takes at most a fifth of the processor time of the first one's."""
    for layers, answer in zip(CACHED, ask_ours("cold_and_warm", *map(str, CACHED)), strict=True):
        share = answer["warm"] / answer["cold"]
        table("first call of a cached method, s of processor time", layers=layers, **answer, **{"warm of cold": share})
        assert share <= WARM
