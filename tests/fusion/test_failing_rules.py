"""A rule that fails is switched off for the graph, named, and explained; every other rule works on."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_cases import tensors
from fx_helpers import aot_graph, evaluate, optimise, targets
from torch._inductor.pattern_matcher import Match

from npugraph_ex.fusion import registry

NORM = [((4, 64), torch.float16), ((4, 64), torch.float16), ((64,), torch.float16)]
npu = torch.ops.npu

pytestmark = pytest.mark.usefixtures("own_registry")


def clipped(x: Any) -> Any:
    return torch.relu(torch.neg(x))


def halved(x: Any) -> Any:
    return torch.relu(torch.mul(x, -0.5))


def equal(x: Any) -> Any:
    return torch.relu(torch.mul(x, -1))


def model(a: Any, b: Any, g: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g)
    return (*npu.npu_dynamic_quant(y), clipped(x), clipped(a))


def broken_check(match: Match) -> bool:
    return match.kwargs["no such argument"] is not None


BROKEN_LINE = broken_check.__code__.co_firstlineno + 1


def test_an_exception_in_extra_check_disables_that_rule_only(caplog: pytest.LogCaptureFixture) -> None:
    """The report keeps every rule and names the failing one with the exception and its line; it is warned of once."""
    handle = registry.register_replacement(clipped, equal, [torch.zeros(2).npu()], extra_check=broken_check)
    for _ in range(2):
        gm = aot_graph(model, *tensors(NORM))
        report = optimise(gm)
    assert targets(gm).count("relu") == 2
    assert report.fusions("add_rms_norm_dynamic_quant") == 1
    (record,) = [record for record in report.rules if record.name == handle.name]
    wanted = f"its condition raised KeyError: 'no such argument' ({__file__}:{BROKEN_LINE})"
    assert record.inactive == wanted
    (miss,) = record.near_misses
    assert miss.reason == wanted
    assert miss.source.startswith(__file__)
    assert len([entry for entry in caplog.records if wanted in entry.getMessage()]) == 1


def forgetful_check(match: Match) -> Any:
    match.kwargs["x"]


def torch_refuses(match: Match) -> Any:
    return match.kwargs["x"].meta["val"].view(-5)


@pytest.mark.parametrize(
    ("check", "wanted"),
    [
        (
            forgetful_check,
            f"returned None, not True or False; is a `return` missing? ({__file__}:{forgetful_check.__code__.co_firstlineno})",
        ),
        (torch_refuses, rf"({__file__}:{torch_refuses.__code__.co_firstlineno + 1})"),
        (lambda _match: 3, "returned 3, not True or False ("),
        (len, "its condition raised TypeError"),
    ],
)
def test_a_check_that_does_not_answer_is_blamed_itself(check: Callable[[Match], Any], wanted: str) -> None:
    """With its name and line, and not with a line of torch that it reached."""
    registry.register_replacement(clipped, equal, [torch.zeros(2).npu()], extra_check=check)
    (miss,) = optimise(aot_graph(model, *tensors(NORM))).near_misses()
    assert wanted in miss.reason
    assert f"{Path(torch.__file__).parent}" not in miss.reason


def test_another_rule_of_the_same_pattern_still_applies() -> None:
    """What the failing rule leaves, the next one takes."""
    registry.register_replacement(clipped, equal, [torch.zeros(2).npu()], extra_check=broken_check)
    right = registry.register_replacement(clipped, equal, [torch.zeros(2).npu()])
    gm = aot_graph(model, *tensors(NORM))
    assert optimise(gm).fusions(right.name) == 2
    assert "neg" not in targets(gm)


@pytest.mark.slow
def test_a_wrong_rule_is_found_by_its_values(caplog: pytest.LogCaptureFixture) -> None:
    """With ``check_numerics`` the rule that changes values is undone and named, and the fusions of others stay."""
    handle = registry.register_replacement(clipped, halved, [torch.zeros(2).npu()])
    gm = aot_graph(model, *tensors(NORM))
    values = [tensor.cpu() for tensor in tensors(NORM)]
    before = evaluate(gm, *values)
    report = optimise(gm, check_numerics=True)
    assert report.fusions("add_rms_norm_dynamic_quant") == 1
    assert report.fusions(handle.name) == 0
    (record,) = [record for record in report.rules if record.name == handle.name]
    assert f"check_numerics undid it: After pass fusion, by rule {handle.name}: relu" in record.inactive
    assert "has other values on random inputs" in record.inactive
    assert {miss.node for miss in record.near_misses} == {"relu", "relu_1"}
    (said,) = [entry.getMessage() for entry in caplog.records if handle.name in entry.getMessage()]
    said, address = said.split("\n")
    assert said.endswith("A pass must not change what the graph computes. What it matches keeps its operators.")
    assert address == "help: npugraph-ex help ReplacementError"
    for old, new in zip(before, evaluate(gm, *values), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1)
    # Without the check nobody can know: that search and replacement agree is the author's promise.
    assert optimise(aot_graph(model, *tensors(NORM))).fusions(handle.name) == 2
