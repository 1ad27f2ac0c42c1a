"""When a registered rule holds: conditions on shapes, and switches by name."""

# The small undocumented functions are graphs to be traced; their names say what is in them.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, optimise
from matchers import half
from registrations import model, replace_fn, search_fn

from npugraph_ex import ShapeRange, last_report
from npugraph_ex.errors import OptionValueError, ReplacementError
from npugraph_ex.fusion.engine import check_switches
from npugraph_ex.fusion.registry import register_replacement

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (ShapeRange("x1", -1, at_least=32), "size 16 of dimension -1 of x1 is below 32"),
        (ShapeRange("x1", -1, at_most=8), "size 16 of dimension -1 of x1 is above 8"),
        (ShapeRange("x1", -1, multiple_of=32), "size 16 of dimension -1 of x1 is not a multiple of 32"),
        (ShapeRange("x1", 4), "x1 has no dimension 4"),
        (ShapeRange("x1", -1, 16, 16, 8), ""),
        (ShapeRange("x1", -1, 16) & ShapeRange("x1", -1, at_most=8), "size 16 of dimension -1 of x1 is above 8"),
        (ShapeRange("x1", -1, 32) & ShapeRange("x1", -1, at_most=16), "size 16 of dimension -1 of x1 is below 32"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_shape_ranges_are_conditions(check: Callable[..., Any], reason: str) -> None:
    """As ``extra_check``, with a reason of their own in the report."""
    register_replacement(search_fn, replace_fn, [half(1, 2), half(1, 2), half(2)], extra_check=check)
    report = optimise(aot_graph(model, half(3, 16), half(3, 16), half(16)))
    assert report.fusions() == (not reason)
    assert [miss.reason for miss in report.near_misses()] == [reason] * bool(reason)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({}, "dim must be a whole number, such as -1 for the last dimension; it is None"),
        ({"dim": "a"}, "dim .*'a'"),
        ({"dim": True}, "dim .*True"),
        ({"dim": -1, "at_most": 2.5}, r"at_most .*2\.5"),
        ({"dim": -1, "multiple_of": 0}, "multiple_of .*0"),
        ({"dim": -1, "at_least": -1}, "at_least must be at least 0; it is -1"),
        ({"dim": -1, "at_most": 0}, "at_most must be at least 1; it is 0"),
        ({"dim": -1, "at_most": -4}, "at_most must be at least 1; it is -4"),
        ({"dim": -1, "at_least": 9, "at_most": 4}, "at_least=9 .* at_most=4"),
        ({"dim": -1, "at_least": 9, "at_most": 15, "multiple_of": 8}, "multiple of 8"),
    ],
)
def test_a_shape_range_that_never_holds_is_refused(wrong: dict[str, Any], reason: str) -> None:
    """The error names the attribute and its value."""
    with pytest.raises(ReplacementError, match=reason):
        ShapeRange("x1", **wrong)


def test_a_shape_range_on_a_symbol_becomes_a_guard() -> None:
    """The range holds for the size compiled for; the report shows the guard that keeps others out."""
    check = ShapeRange("x1", -1, at_most=64)
    register_replacement(search_fn, replace_fn, [half(1, 2), half(1, 2), half(2)], extra_check=check)
    report = optimise(aot_graph(model, half(3, 16), half(3, 16), half(16), dynamic=True))
    (fusion,) = report.rules[0].fusions
    assert any("<= 64" in guard for guard in fusion.guards), fusion


def test_registered_rules_are_switched_by_name() -> None:
    """``fusion_rules={name: False}`` holds for user rules too."""
    handle = register_replacement(search_fn, replace_fn, [half(1, 2), half(1, 2), half(2)])
    report = optimise(aot_graph(model, half(3, 16), half(3, 16), half(16)), fusion_rules={handle.name: False})
    assert report.fusions() == 0
    assert "fusion_rules" in report.rules[0].inactive


def test_a_switch_for_no_rule_is_refused() -> None:
    """A misspelt name would otherwise switch nothing, silently; the error has the nearest name."""
    with pytest.raises(OptionValueError, match=r"names 'add_rms_norm_kast'.*add_rms_norm_cast"):
        check_switches({"add_rms_norm_kast": False})
    with pytest.raises(OptionValueError, match=r"names 'lift_rotary'.*option 'lift'"):
        check_switches({"lift_rotary": False})


@pytest.mark.parametrize(
    ("second", "gamma", "reason"),
    [
        (half(3, 16), half(16), ""),
        (half(1, 16), half(16), "x1 has the shape [3, 16] and x2 [1, 16]; npu_add_rms_norm takes one shape"),
        (half(16), half(16), "x1 has the shape [3, 16] and x2 [16]; npu_add_rms_norm takes one shape"),
        (
            half(3, 16), half(16).float(),
            "x1 has the dtype torch.float16 and gamma torch.float32; npu_add_rms_norm takes one dtype",
        ),
    ],
    ids=["alike", "repeated", "vector", "float32"],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_operands_that_the_device_would_refuse_are_not_given(
    second: torch.Tensor, gamma: torch.Tensor, reason: str, dynamic: bool
) -> None:
    """The operands of a sum may broadcast; those of a norm of a sum may not, and no fake function asks."""
    register_replacement(search_fn, replace_fn, [half(1, 2), half(1, 2), half(2)])
    inputs = half(3, 16), second, gamma
    report = optimise(aot_graph(model, *inputs, dynamic=dynamic))
    assert report.fusions() == (not reason), report.table()
    if not dynamic:  # a symbol has a name of its own
        assert [miss.reason for miss in report.near_misses()] == [reason] * bool(reason)
    on_device = [value.npu() for value in inputs]
    compiled = torch.compile(model, backend="npugraph_ex", dynamic=dynamic)
    for actual, expected in zip(compiled(*on_device), model(*on_device), strict=True):
        assert torch.equal(actual, expected)


def _attended(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 0.25 + mask, -1)


def _fused_softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.npu.npu_dropout_with_add_softmax(x, mask, 0.25, 0.0, -1)[1]
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "mask", "reason"),
    [
        ((2, 16, 128, 256), (2, 16, 128, 256), ""),
        ((3, 8, 16), (3, 8, 16), "input's shape should be [N, C, H, W] with H and W of 128, 256, 384, 512; it is (3, 8, 16)"),
        ((8, 5, 10), (5, 10), "input has the shape [8, 5, 10] and x1 [5, 10]; npu_dropout_with_add_softmax takes one shape"),
    ],
    ids=["documented", "other sizes", "broadcast"],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_sizes_that_the_device_would_refuse_are_not_given(
    shape: tuple[int, ...], mask: tuple[int, ...], reason: str, dynamic: bool
) -> None:
    """A record's constraints are asked at each match, whatever sizes the rule was found with; the values are eager mode's."""
    inputs = [torch.randn(size, generator=torch.Generator().manual_seed(1)).half().npu() for size in (shape, mask)]
    rule = register_replacement(_attended, _fused_softmax, [half(*shape), half(*shape)])
    torch.compiler.reset()
    compiled = torch.compile(_attended, backend="npugraph_ex", dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), _attended(*inputs), rtol=5e-3, atol=1e-5)
        report = last_report()
        assert report is not None
        assert report.fusions(rule.name) == (not reason), report.table()
        if not dynamic:  # a symbol has a name of its own
            reasons = [miss.reason.partition(": ")[2] or miss.reason for miss in report.near_misses(rule.name)]
            assert reasons == [reason] * bool(reason)
        others = [one.repeat((3,) + (1,) * (one.dim() - 1)) if one.dim() == len(shape) else one for one in inputs]
        torch.testing.assert_close(compiled(*others), _attended(*others), rtol=5e-3, atol=1e-5)
