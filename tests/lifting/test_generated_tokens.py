"""A lifted decoder generates the tokens of eager mode, with a cache that grows and with one of fixed length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npugraph_ex.report.passes import last_report
from npugraph_ex_conformance.campaign.architecture_checks import gaps, generated, otherwise

NEW = 8
CACHES: dict[str, tuple[dict[str, Any], int]] = {"growing": ({}, 2), "static": ({"cache_implementation": "static"}, 8)}
"""Arguments of `generate`, and how many graphs Dynamo makes. Each length of a growing cache is another graph, with any backend;
the steps behind those run in eager mode, and read what lifted steps have written."""


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_tokens_are_those_of_eager_mode(name: str, cache: str) -> None:
    """Where eager mode's two largest logits are farther apart than its own error from float64 reaches, as in most steps."""
    given, graphs = CACHES[cache]
    eager = generated(name, None, max_new_tokens=NEW, **given)
    with torch._dynamo.config.patch(recompile_limit=graphs):
        lifted = generated(name, {"lift": "judged"}, max_new_tokens=NEW, **given)
    report = last_report()
    assert all(report.fusions(rule) for rule in ("lift_rms_norm", "lift_add_rms_norm", "lift_rotary")), report.table()
    assert otherwise(name, eager, lifted) == ""
    gap, noise = gaps(name, eager)
    assert len(gap) == NEW
    assert int((gap > noise).sum()) > NEW // 2
    assert float((gap / noise)[0]) > 4
