"""Rules are switched by name: the default ones off, the extra ones on; each says so when it cannot be used."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_swiglu_quant as activated
import torch
from fusion_cases import Table, tensors
from fx_helpers import aot_graph, optimise, targets
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion import rules, tracing
from npugraph_ex.fusion.preparing import unusable
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.testing.generator.client_operators import client_operators


def switched(*, default: bool) -> list[tuple[Table, Callable[..., Any]]]:
    """For each such rule, the table of ``test_<rule>.py`` and a graph of it that fuses once."""
    rows = []
    for name in (record.name for record in rules.RECORDS.values() if record.default == default):
        table: Table = importlib.import_module(f"test_{name}").TABLE
        graphs = (graph for graph, count in table.must_fuse.items() if count == 1 and graph not in table.other_specs)
        rows.append((table, next(graphs)))
    return rows


EXTRA, DEFAULT = switched(default=False), switched(default=True)


@pytest.fixture(autouse=True)
def _warnings_not_given() -> Iterator[None]:
    """Each test is the first to warn."""
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def test_the_order_of_the_rules() -> None:
    """Where several patterns begin with one norm, the first takes it: quantising ones before the cast."""
    names = list(rules.RECORDS)
    assert names[:3] == ["add_rms_norm_dynamic_quant", "add_rms_norm_quant", "add_rms_norm_cast"]
    assert [record.default for record in rules.RECORDS.values()] == [True] * len(DEFAULT) + [False] * len(EXTRA)
    assert [table.rule for table, _ in (*DEFAULT, *EXTRA)] == names


def test_a_record_whose_variants_have_two_names_is_refused() -> None:
    """One switch would not turn off both."""
    one, other = rules.RECORDS["muls_add"].variants[0], rules.RECORDS["swiglu_quant"].variants[0]
    with pytest.raises(ReplacementError, match=r"variants.*muls_add.*swiglu_quant"):
        rules.BuiltInRule(variants=(one, other), default=True, order=1)


def test_a_variant_is_left_out_without_a_word_where_another_library_s_operator_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM-Ascend's norm exists only where vLLM-Ascend is loaded, or for a moment."""
    needed = "_C_ascend::npu_add_rms_norm_bias"
    name = "add_rms_norm_dynamic_quant"
    assert needed not in {one.rule.needs for one in rules.prepared_rules(name=name)}
    assert rules.is_usable(name)
    with client_operators():
        assert needed in {one.rule.needs for one in rules.prepared_rules(name=name) if not one.inactive}
    assert needed not in {one.rule.needs for one in rules.prepared_rules(name=name)}
    assert not caplog.records


def named(value: object) -> str:
    """A table's rule stands for it in a test's name."""
    return value.rule if isinstance(value, Table) else ""


@pytest.mark.parametrize(("table", "function"), EXTRA, ids=named)
def test_extra_rules_are_off_unless_switched_on(table: Table, function: Callable[..., Any]) -> None:
    """Without the option the graph stays, and the report does not mention the rule; with it, it fuses."""
    with client_operators():
        gm = aot_graph(function, *tensors(table.specs))
        before = targets(gm)
        report = optimise(gm)
        assert targets(gm) == before
        assert table.rule not in [record.name for record in report.rules]
        assert optimise(gm, fusion_rules={table.rule: True}).fusions(table.rule) == 1


@pytest.mark.parametrize(("table", "function"), DEFAULT, ids=named)
def test_default_rules_are_on_unless_switched_off(table: Table, function: Callable[..., Any]) -> None:
    """Each by its own name, and the others stay on; all of them by ``pattern_fusion_pass``."""
    gm = aot_graph(function, *tensors(table.specs))
    before = targets(gm)
    assert optimise(gm, pattern_fusion_pass=False).rules == ()
    report = optimise(gm, fusion_rules={table.rule: False})
    assert targets(gm) == before
    off = [record.name for record in report.rules if record.inactive == "the option fusion_rules switches it off"]
    assert off == [table.rule]
    assert optimise(gm).fusions(table.rule) == 1


@pytest.mark.slow
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


def test_a_rule_is_traced_when_a_graph_has_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for a graph without them; those of a norm once the graph has one, as a rule before may have made it."""
    traced: list[str] = []
    monkeypatch.setattr(rules, "_prepared", lambda rule: traced.append(rule.name) or unusable(rule, "not asked for"))
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.relu.default, (x,)))
    given = [one.rule.name for one in rules.chosen_rules({}, graph)]
    assert traced == []
    assert set(given) == {name for name in rules.RULE_NAMES if rules.RECORDS[name].default}
    chosen = rules.chosen_rules({}, graph)
    with graph.inserting_after(x):
        graph.call_function(torch.ops.npu.npu_add_rms_norm.default, (x, x, x))
    list(chosen)
    assert set(traced) == {"add_rms_norm_dynamic_quant", "add_rms_norm_quant", "add_rms_norm_cast"}


@pytest.mark.parametrize("name", [name for name in rules.RULE_NAMES if rules.RECORDS[name].anchors])
def test_every_match_has_an_anchor(name: str) -> None:
    """Each variant that can be traced here searches for one of the operators that its record names."""
    found = 0
    for prepared in rules.prepared_rules(name=name, extra=not rules.RECORDS[name].default):
        if prepared.inactive:
            continue
        with FakeTensorMode():
            names = inspect.signature(prepared.rule.search).parameters
            examples = iter(prepared.rule.example_inputs())
            given = [prepared.rule.scalars[one] if one in prepared.rule.scalars else next(examples) for one in names]
            graph = tracing.trace(prepared.rule.search, given, prepared.rule.trace_fn).graph
        called = {node.target.name().partition(".")[0] for node in graph.nodes if isinstance(node.target, OpOverload)}
        assert called.intersection(rules.RECORDS[name].anchors), called
        found += 1
    assert found
