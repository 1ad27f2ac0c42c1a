"""The extra rules are off unless switched on, and say so when they cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_add_rms_norm_bias_quant as biased
import test_muls_add as scaled
import test_swiglu_quant as activated
from fusion_cases import Table, tensors
from fx_helpers import aot_graph, optimise, targets

from npugraph_ex.fusion import rules
from npugraph_ex.fusion.registry import warn_once

GRAPHS: list[tuple[Table, Callable[..., Any]]] = [
    (biased.TABLE, biased.plain), (scaled.TABLE, scaled.scaled_first), (activated.TABLE, activated.plain),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _warnings_not_given() -> Iterator[None]:
    """Each test is the first to warn."""
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.mark.parametrize(("table", "function"), GRAPHS, ids=lambda value: getattr(value, "rule", ""))
def test_off_unless_switched_on(table: Table, function: Callable[..., Any]) -> None:
    """Without the option the graph stays, and the report does not mention the rule."""
    gm = aot_graph(function, *tensors(table.specs))
    before = targets(gm)
    report = optimise(gm)
    assert targets(gm) == before
    assert table.rule not in [record.name for record in report.rules]


def test_a_rule_about_operators_that_do_not_exist_is_inactive(caplog: pytest.LogCaptureFixture) -> None:
    """``qk_norm_rope`` needs vLLM-Ascend; without it the report says why, the log once, and other rules work."""
    rules.forget()
    for _ in range(2):
        gm = aot_graph(activated.plain, *tensors(activated.SPECS))
        report = optimise(gm, fusion_rules={"qk_norm_rope": True, "swiglu_quant": True})
        assert report.fusions("swiglu_quant") == 1
    (record,) = [record for record in report.rules if record.name == "qk_norm_rope"]
    assert "no attribute 'npu_rotary_embedding'" in record.inactive
    assert len([entry for entry in caplog.records if "qk_norm_rope is not used" in entry.getMessage()]) <= 2
