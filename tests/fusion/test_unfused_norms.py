"""Every norm that stays is explained: by its near-miss, or by what follows it and what the rules want to follow."""

# ruff: noqa: D103 - the small functions are graphs to be traced

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_cases import tensors
from fx_helpers import aot_graph, optimise
from torch import float16, ops

import npugraph_ex
from npugraph_ex.fusion.registry import register_replacement

norm, rms = ops.npu.npu_add_rms_norm, ops.npu.npu_rms_norm
SPECS = [((4, 64), float16), ((4, 64), float16), ((64,), float16)]


def followed_by_product(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    return y @ b.t(), x


def followed_by_view(a: Any, b: Any, g: Any) -> Any:
    y, _, x = norm(a, b, g)
    return y.view(-1).relu(), x


def a_result(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[0]


def only_the_residual(a: Any, b: Any, g: Any) -> Any:
    return norm(a, b, g)[2]


def plain_norm(a: Any, b: Any, g: Any) -> Any:
    return rms(a, g)[0] * b


def test_a_norm_that_was_lifted_is_fused() -> None:
    """By one rule, by two, and beside a norm of the program's own, which alone is told."""

    def lifted(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> Any:
        total = x + residual
        plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma
        summed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma
        return plain, total, summed, rms(residual, gamma)[0] * 2

    (graph,) = npugraph_ex.explain(lifted, *tensors(SPECS), options={"lift": "judged"}).graphs
    report = graph.graph.report
    assert {rule.name for rule in report.rules if rule.fusions} == {"lift_rms_norm", "lift_add_rms_norm"}
    (told,) = report.unfused
    assert told.node == "npu_rms_norm"


WANTED = "the rules that begin so want _npu_dtype_cast, _to_copy, npu_dtype_cast, npu_dynamic_quant, npu_quantize, view"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (followed_by_product, f"output 0 of npu_add_rms_norm goes to matmul; {WANTED}"),
        (
            followed_by_view,
            "output 0 of npu_add_rms_norm goes to view, but behind view no rule goes on as the graph does; "
            + WANTED.removesuffix(", view"),
        ),
        (a_result, f"output 0 of npu_add_rms_norm goes to a result of the graph; {WANTED}"),
        (only_the_residual, f"npu_add_rms_norm goes to nobody; {WANTED}"),
        (plain_norm, "it goes to mul; no rule begins with npu.npu_rms_norm.default"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_norm_that_no_rule_came_near_is_explained(function: Any, reason: str) -> None:
    """What its result goes to and what the rules want, in report, table and JSON, with the source line."""
    report = optimise(aot_graph(function, *tensors(SPECS)))
    (explanation,) = report.unfused
    assert explanation.reason == reason
    assert explanation.source.startswith(__file__)
    assert reason in report.table()
    assert reason in report.to_json()


def test_fused_and_nearly_fused_norms_are_not_listed_twice() -> None:
    """One norm fuses, one is a near-miss, one is neither: only the last is listed."""

    def three(a: Any, b: Any, g: Any) -> Any:
        y, _, x = norm(a, b, g)
        q = ops.npu.npu_dynamic_quant(y)
        y2, _, x2 = norm(x, b, g)
        q2 = ops.npu.npu_dynamic_quant(y2)
        y3, _, x3 = norm(x2, b, g)
        return (*q, *q2, y2 * 2, y3 * 2, x3)

    report = optimise(aot_graph(three, *tensors(SPECS)))
    assert report.fusions() == 1
    assert len(report.near_misses()) == 1
    assert [explanation.node for explanation in report.unfused] == ["npu_add_rms_norm_2"]


def _of_double(x: Any, g: Any) -> Any:
    return rms(x + x, g)[0]


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("checked", [False, True])
def test_a_norm_that_a_rule_made_or_would_have_made_is_not_listed(checked: bool) -> None:
    """The first is the rule's work; of the second, which the check of values undid, the report says that in its place."""
    register_replacement(_of_double, lambda x, g: rms(x, g * 2)[0], [torch.empty(4, 64), torch.empty(64)])
    model = torch.compile(_of_double, backend="npugraph_ex", options={"check_numerics": checked})
    with torch.no_grad():
        model(torch.randn(4, 64).npu(), torch.randn(64).npu())
    report = npugraph_ex.last_report()
    assert report is not None
    assert report.fusions() == (not checked)
    assert len(report.near_misses()) == checked
    assert report.unfused == ()
