"""What a compiled call does on the device, counted: kernels, copies, modelled time, memory; what each pass saves of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from both import BUNDLED, OURS, ask, ask_ours, asked_ahead
from decoders import device_models, modelled_models
from measured_tables import Table

from npu_emulator.chips import DEFAULT

NAMES = tuple(device_models())
MODELS = tuple(map(json.dumps, NAMES))
MODELLED = tuple(map(json.dumps, modelled_models()))
SWITCHES = ("remove_noop_ops", "remove_cat_ops", "inplace_pass", "input_inplace_pass", "pattern_fusion_pass")
HOST_US = 10.0
"""What launching an eager operator, or a replay, costs the host: an assumption, for the one column that names it."""
COUNTS = ("kernels", "copies", "bytes", "modelled us", "pool bytes", "peak bytes")
ROUNDING = 0.5
"""Modelled times are floats."""


@pytest.fixture(scope="module", autouse=True)
def _asked_ahead() -> Iterator[None]:
    """Two processes at a time: what is asked here are counts and modelled times, which a busy machine does not change."""
    with asked_ahead(
        ("by_pass", MODELS, OURS),
        ("device_work", MODELS, BUNDLED),
        ("device_work", MODELS, OURS),
        ("modelled", MODELLED, OURS),
    ):
        yield


@pytest.mark.parametrize("name", NAMES)
def test_does_no_more_than_bundled(name: str, table: Table) -> None:
    """Never more kernels, copies, modelled microseconds or bytes than the bundled backend, nor kernels than eager mode."""
    answers = ask("device_work", *MODELS)
    ours, theirs = (answers[backend][NAMES.index(name)] for backend in (OURS, BUNDLED))
    row = {"eager kernels": ours["eager kernels"], "eager us": ours["eager modelled us"]}
    for count in COUNTS:
        row |= {count: ours[count], f"bundled {count}": theirs[count]}
    table("device work of one call; times are modelled by a roofline, not measured", model=name, **row)
    assert ours["kernels"] <= ours["eager kernels"]
    for count in COUNTS:
        assert ours[count] <= theirs[count] + ROUNDING, count


@pytest.mark.parametrize("name", NAMES)
def test_no_pass_costs(name: str, table: Table) -> None:
    """With any pass off a call does at least as much work; the table shows how much more, so what the pass saved."""
    saved = ask_ours("by_pass", *MODELS)[NAMES.index(name)]
    for entry in SWITCHES:
        row = {count: saved[f"{entry}: {count}"] for count in COUNTS}
        table("what each pass saves in one call", model=name, **{"pass": entry}, **row)
        assert min(row[count] for count in ("kernels", "copies", "modelled us")) >= -ROUNDING, (entry, row)


def test_every_pass_saves_somewhere() -> None:
    """A pass that saves nothing in any of the models would be there for nothing."""
    answers = ask_ours("by_pass", *MODELS)
    for entry in SWITCHES:
        assert any(saved[f"{entry}: {count}"] >= 1 for saved in answers for count in COUNTS), entry


def test_modelled_speed_ups(table: Table) -> None:
    """Fused is never slower than eager on the modelled clock, two streams are faster than one, replay costs nothing more."""
    names = tuple(modelled_models())
    answers = dict(zip(names, ask_ours("modelled", *MODELLED), strict=True))
    for name, answer in answers.items():
        # A host that launches each operator is slower than the device; a replay is one launch.
        eager = max(answer["eager"], answer["eager kernels"] * HOST_US)
        captured = max(answer["captured"], HOST_US)
        table(
            f"one call on a modelled {DEFAULT.name}: us, modelled and not measured",
            model=name,
            **{
                "eager": answer["eager"],
                "fused": answer["fused"],
                "captured": answer["captured"],
                "speed-up on the device": answer["eager"] / answer["captured"],
                f"with a host of {HOST_US:.0f} us an operator": eager / captured,
            },
        )
        assert answer["fused"] <= answer["eager"] + ROUNDING
        assert answer["captured"] <= answer["fused"] + ROUNDING
    one, two = (answer["captured"] for name, answer in answers.items() if name.startswith("two branches"))
    assert two <= one / 1.5
    assert answers[names[0]]["eager"] >= 1.3 * answers[names[0]]["fused"]
