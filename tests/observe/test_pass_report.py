"""The pass report counts, explains, prints, serialises, and lets a user demand fusions."""

from __future__ import annotations

import json

import pytest
import torch

from npugraph_ex.errors import FusionCountError, NpuGraphExError
from npugraph_ex.fusion import rules as _rules  # noqa: F401 - it tells reports which rules are off
from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.graph.launches import Launched
from npugraph_ex.lifting import engine as _engine  # noqa: F401 - likewise
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import Fusion, NearMiss, PassRecord, PassReport


def finished() -> PassReport:
    """A report with one fusion, one near-miss and one inactive rule."""
    builder = ReportBuilder()
    builder.add_pass(PassRecord("fusion", "changed", 0.5, 10, 8))
    builder.add_fusion(Fusion("norm", ("add", "quant"), ("fused",), "model.py:3"))
    builder.add_near_miss(NearMiss("norm", "quant_1", "y is also used by mul", "model.py:9"))
    builder.add_rule("absent", "its operator is missing")
    builder.add_rule(
        "undone", "After pass fusion: relu has other values. A pass must not change what the graph computes."
    )
    return builder.build()


def test_counts_by_rule_and_in_all() -> None:
    """``fusions`` and ``near_misses`` take a rule's name or none."""
    report = finished()
    assert (report.fusions(), report.fusions("norm"), report.fusions("absent")) == (1, 1, 0)
    assert [miss.node for miss in report.near_misses("norm")] == ["quant_1"]


def test_demanding_more_fusions_than_there_were_raises_with_the_reasons() -> None:
    """The error says how many were expected, how many came, and shows every near-miss with its line."""
    finished().require(1, "norm")
    with pytest.raises(FusionCountError, match=r"2 .* norm; .* 1(.|\n)*quant_1: .*model.py:9"):
        finished().require(2, "norm")
    with pytest.raises(FusionCountError, match="its operator is missing"):
        finished().require(1, "absent")
    with pytest.raises(FusionCountError, match=r"rule is not used: .* computes\.\n"):
        finished().require(1, "undone")
    with pytest.raises(FusionCountError, match=r"Did you mean 'norm'\? .*: norm, absent, undone\."):
        finished().require(1, "nrm")
    for rule, options in (
        ("swiglu_quant", "fusion_rules"),
        ("lift_rotary", "lift"),
        ("lift_joined_swiglu", "join_projections"),
    ):
        with pytest.raises(FusionCountError, match=rf"rule is off: options=.*'{options}': "):
            finished().require(1, rule)


def test_a_report_without_fusion_says_which_option_is_off() -> None:
    """For any rule, one that is off by itself, too; a rule of lifting was tried all the same."""
    builder = ReportBuilder()
    builder.add_pass(PassRecord("fusion", "skipped", message="the option 'pattern_fusion_pass' is off"))
    builder.add_rule("lift_rotary")
    for rule in (None, "norm", "swiglu_quant"):
        with pytest.raises(FusionCountError, match=r"option 'pattern_fusion_pass' is off"):
            builder.build().require(1, rule)
    with pytest.raises(FusionCountError, match="nothing in the graph looks like"):
        builder.build().require(1, "lift_rotary")


def test_a_demand_with_the_wrong_words_says_the_right_ones() -> None:
    """Arguments in the other order, the last part of a rule's name, and a rule that came after the compilation."""
    with pytest.raises(NpuGraphExError, match=r"require\(1, 'my_fusions.search'\); it got \('norm', 1\)"):
        finished().require("norm", 1)  # type: ignore[arg-type]
    for wrong in (-1, True, 1.0):
        with pytest.raises(NpuGraphExError, match=rf"0 or more, .*; it got \({wrong}, None\)"):
            finished().require(wrong)  # type: ignore[arg-type]
    finished().require(0)
    builder = ReportBuilder()
    for name in ("__main__.search", "norm"):
        builder.add_rule(name)
    with pytest.raises(FusionCountError, match=r"Did you mean '__main__.search'\?"):
        builder.build().require(1, "search")
    with (
        register_replacement(lambda x: torch.sigmoid(x) * 2, lambda x: torch.tanh(x) * 2, [torch.empty(2)]) as rule,
        pytest.raises(FusionCountError, match=r"registered after this graph was compiled\. .* torch\.compiler\.reset"),
    ):
        builder.build().require(1, rule.name)


def test_table_and_json_carry_everything() -> None:
    """Each pass, rule and near-miss appears in both."""
    report = finished()
    for text in ("fusion", "norm", "absent", "its operator is missing", "quant_1", "model.py:9"):
        assert text in str(report)
        assert text in report.to_json()
    assert json.loads(report.to_json())["rules"][0]["fusions"][0]["replaced"] == ["add", "quant"]


def test_the_reason_that_came_furthest_stays() -> None:
    """Variants of a rule meet one node; the variant that nearly matched explains it, one that fused silences it."""
    builder = ReportBuilder()
    for reason, progress in (("first", (0, 1)), ("furthest", (2, 0)), ("last", (1, 0))):
        builder.add_near_miss(NearMiss("norm", "quant", reason), progress)
    assert [miss.reason for miss in builder.build().near_misses()] == ["furthest"]
    builder.add_fusion(Fusion("norm", ("quant",), ("fused",)))
    assert builder.build().near_misses() == ()


def test_a_rolled_back_pass_leaves_no_fusions() -> None:
    """``reset`` brings back what earlier passes said and drops the rest."""
    builder = ReportBuilder()
    builder.add_fusion(Fusion("norm", ("quant",), ("fused",)))
    mark = builder.mark()
    builder.add_fusion(Fusion("norm", ("quant_1",), ("fused_1",)))
    builder.reset(mark)
    assert builder.build().fusions() == 1


def test_a_near_miss_where_another_rule_fused_names_it_and_saves_only_the_rest() -> None:
    """Otherwise the advice would promise what the program has."""
    builder = ReportBuilder()
    builder.add_near_miss(NearMiss("wide", "mul", "beta is None", would_save=Launched(3)))
    builder.add_near_miss(NearMiss("wide", "add", "beta is None", would_save=Launched(3)))
    builder.add_near_miss(NearMiss("equal", "mul", "x is float32", would_save=Launched(1)))
    builder.add_fusion(Fusion("narrow", ("neg", "mul"), ("fused",), saves=Launched(1, 64)))
    assert builder.build().near_misses() == (
        NearMiss("wide", "mul", "beta is None; narrow fused it", would_save=Launched(2)),
        NearMiss("wide", "add", "beta is None", would_save=Launched(3)),
        NearMiss("equal", "mul", "x is float32; narrow fused it", would_save=Launched(0)),
    )
