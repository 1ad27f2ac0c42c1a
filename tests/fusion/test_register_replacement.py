"""Registration: the specification's example, what is refused and how it is said, duplicates, removal, other formats."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, D103, N806, PLW0108

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from fx_helpers import aot_graph, evaluate, optimise, targets
from torch._inductor.pattern_matcher import (
    CallFunction,
    Ignored,
    KeywordArg,
    Match,
    MultiOutputPattern,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import ShapeRange
from npugraph_ex.errors import OptionValueError, ReplacementError
from npugraph_ex.fusion import registry
from npugraph_ex.fusion.engine import check_switches
from npugraph_ex.fusion.registry import register_replacement


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts without user rules."""
    from npugraph_ex.fusion import engine

    rules = registry.Registry()
    monkeypatch.setattr(registry, "USER_RULES", rules)
    monkeypatch.setattr(engine, "USER_RULES", rules)
    registry.warn_once.cache_clear()
    yield
    torch._dynamo.reset()


def search_fn(x1: Any, x2: Any, gamma: Any) -> Any:
    xOut = torch.add(x1, x2)
    y, _ = torch_npu.npu_rms_norm(xOut, gamma)
    return y, xOut


def replace_fn(x1: Any, x2: Any, gamma: Any) -> Any:
    y, _, xOut = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return y, xOut


def extra_check(match: Match) -> bool:
    x1 = match.kwargs.get("x1")
    if x1 is None:
        return False
    if not hasattr(x1, "meta") or "val" not in x1.meta:
        return False
    a_shape = x1.meta["val"].shape
    return a_shape[-1] == 7168


def half(*shape: int) -> torch.Tensor:
    """A float16 tensor on the device."""
    return torch.zeros(shape, dtype=torch.float16, device="npu")


def register_as_in_the_specification() -> registry.Registration:
    fake_mode = FakeTensorMode()
    with fake_mode:
        input_tensor = functools.partial(torch.empty, (1, 1, 2), device="npu", dtype=torch.float16)
        kwargs_tensor = functools.partial(torch.empty, 2, device="npu", dtype=torch.float16)
        return register_replacement(
            search_fn=search_fn,
            replace_fn=replace_fn,
            example_inputs=(input_tensor(), input_tensor(), kwargs_tensor()),
            extra_check=extra_check,
        )


def model(a: Any, b: Any, g: Any) -> Any:
    y, _ = torch_npu.npu_rms_norm(a + b, g)
    return y * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("size", "fusions"), [(7168, 1), (4096, 0)])
def test_the_specifications_example(size: int, fusions: int, dynamic: bool) -> None:
    """It fuses at last dimension 7168 and not at 4096, with values equal to the bit both times."""
    register_as_in_the_specification()
    rows = half(3, size), half(3, size)
    for row in rows if dynamic else ():
        torch._dynamo.mark_dynamic(row, 0)
    gm = aot_graph(model, *rows, half(size), dynamic=None if dynamic else False)
    inputs = [torch.randn(3, size).half(), torch.randn(3, size).half(), torch.rand(size).half()]
    values = [3 if not isinstance(n.meta["val"], torch.Tensor) else inputs.pop(0) for n in _placeholders(gm)]
    before = evaluate(gm, *values)
    report = optimise(gm)
    assert report.fusions() == fusions
    assert targets(gm) == (["npu_add_rms_norm", "mul"] if fusions else ["add", "npu_rms_norm", "mul"])
    for old, new in zip(before, evaluate(gm, *values), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    assert all("extra_check returned False" in miss.reason for miss in report.near_misses())


def _placeholders(gm: Any) -> list[Any]:
    return list(gm.graph.find_nodes(op="placeholder"))


def test_user_rules_feed_default_rules() -> None:
    """What a user's rule makes, a default rule may fuse further."""

    def quantised(a: Any, b: Any, g: Any) -> Any:
        return torch_npu.npu_dynamic_quant(torch_npu.npu_rms_norm(a + b, g)[0])

    register_as_in_the_specification()
    gm = aot_graph(quantised, half(3, 7168), half(3, 7168), half(7168))
    assert optimise(gm).fusions() == 2
    assert targets(gm) == ["npu_add_rms_norm_dynamic_quant"]


def test_registering_twice_is_registering_once() -> None:
    """A second model registers the same functions anew; the rule goes when both registrations are removed."""
    first, second = register_as_in_the_specification(), register_as_in_the_specification()
    assert len(registry.USER_RULES.snapshot()) == 1
    first.remove()
    first.remove()
    assert len(registry.USER_RULES.snapshot()) == 1
    second.remove()
    assert registry.USER_RULES.snapshot() == ()


def test_registration_can_be_scoped() -> None:
    """``with register_replacement(...)`` holds inside the block only."""
    with register_as_in_the_specification():
        assert optimise(aot_graph(model, half(3, 7168), half(3, 7168), half(7168))).fusions() == 1
    assert optimise(aot_graph(model, half(3, 7168), half(3, 7168), half(7168))).fusions() == 0


@pytest.mark.parametrize("kind", ["fake list", "real tuple", "same object twice"])
def test_example_inputs_may_be_anything_with_metadata(kind: str) -> None:
    """Fake or real, tuple or list; one tensor given twice does not demand one tensor twice."""
    with FakeTensorMode():
        fakes = [torch.empty(1, 2, device="npu", dtype=torch.half) for _ in range(2)]
        gamma = torch.empty(2, device="npu", dtype=torch.half)
    examples: Any = {
        "fake list": [*fakes, gamma],
        "real tuple": (half(1, 2), half(1, 2), half(2)),
        "same object twice": [fakes[0], fakes[0], gamma],
    }[kind]
    register_replacement(search_fn, replace_fn, examples)
    assert optimise(aot_graph(model, half(3, 16), half(3, 16), half(16))).fusions() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((search_fn, replace_fn, [torch.empty(2)]), r"one value for each of \['x1', 'x2', 'gamma'\]; it holds 1"),
        ((search_fn, replace_fn, torch.empty(2)), "must be a tuple or list"),
        ((None, replace_fn, [torch.empty(2)]), "register_replacement: search_fn must be a function; it is None"),
        ((search_fn, None, [torch.empty(2)]), "replace_fn must be a function; it is None"),
        ((search_fn, replace_fn, [torch.empty(2)], None), "trace_fn must be a function; it is None"),
        ((torch.relu, torch.abs, [torch.empty(2)]), "arguments of the search function cannot be read"),
        ((lambda x: torch.relu(x), lambda x: x, ["a"]), "cannot be traced on the example inputs, x = 'a': TypeError"),
        ((lambda x: x if x.sum() > 0 else -x, lambda x: x, [torch.empty(2)]), "It reads a tensor's values"),
        ((search_fn, lambda x: x, [torch.empty(2)]), "must take the same arguments"),
        ((lambda x, y: torch.relu(x), lambda x, y: x, [torch.empty(2)] * 2), "does not use its argument y"),
        ((lambda x: (torch.relu(x), x), lambda x: (x, x), [torch.empty(2)]), "output 1 .* is its argument x"),
        ((lambda x: torch.relu(x), lambda x: (x, x), [torch.empty(2)]), "as many results as the search function, 1; "),
        ((lambda x: x.add_(1).relu(), lambda x: x, [torch.empty(2)]), "contains aten.add_.Tensor, which writes"),
        ((lambda x: torch.mm(x, x), lambda x: x, [torch.empty(2)]), "cannot be traced on the example inputs"),
    ],
)
def test_wrong_registrations_say_what_is_wrong(arguments: tuple[Any, ...], message: str) -> None:
    """Which function, which argument, what was expected; a write is not dropped as dead code (pytorch#149879)."""
    with pytest.raises(ReplacementError, match=message):
        register_replacement(*arguments)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"search_fn_pattern": 3}, "search_fn_pattern must be a pattern of torch"),
        ({"scalar_workaround": [1]}, "scalar_workaround must map argument names"),
        ({"scalar_workaround": {"z": 1.0}}, r"scalar_workaround names \['z'\]"),
        ({"extra_check": "x"}, "extra_check must be a function; it is 'x'"),
    ],
)
def test_wrong_keywords_say_what_is_wrong(keywords: dict[str, Any], message: str) -> None:
    """The same for what is optional."""
    with pytest.raises(ReplacementError, match=message):
        register_replacement(lambda x: torch.relu(x), lambda x: torch.abs(x), [torch.empty(2)], **keywords)


class _Relu(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        """A module as a search function."""
        return torch.relu(x)

    def method(self, x: Any) -> Any:
        """A method as a search function."""
        return torch.relu(x)


@pytest.mark.parametrize("search", [_Relu(), _Relu().method, functools.partial(lambda n, x: torch.relu(x), 1)])
def test_modules_methods_and_partials_are_functions(search: Any) -> None:
    """Whatever can be called with the examples can be looked for."""
    register_replacement(search, lambda x: torch.abs(x), [half(2)])
    assert optimise(aot_graph(lambda x: torch.relu(x), half(4))).fusions() == 1


def test_a_missing_fused_operator_warns_once_and_keeps_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    """A replacement that cannot be traced on this installation is no reason to stop (vllm-ascend#6578)."""

    def missing(x: Any) -> Any:
        return torch.ops.npu.npu_no_such_operator(x)

    for _ in range(2):
        register_replacement(lambda x: torch.relu(x), missing, [torch.empty(2)])
    warnings = [record for record in caplog.records if "npu_no_such_operator" in record.getMessage()]
    assert len(warnings) == 1
    gm = aot_graph(lambda x: torch.relu(x), half(4))
    report = optimise(gm)
    assert targets(gm) == ["relu"]
    assert "npu_no_such_operator" in report.rules[0].inactive


def test_a_running_compile_does_not_see_new_rules() -> None:
    """The registry hands out snapshots."""
    before = registry.USER_RULES.snapshot()
    register_as_in_the_specification()
    assert before == ()


def test_lists_of_tensors_are_arguments() -> None:
    """An argument may be a list; the match shows it as one."""
    seen: list[Any] = []

    def search(xs: Any) -> Any:
        return torch.relu(torch.cat(xs))

    def replace(xs: Any) -> Any:
        return torch.cat([torch.relu(x) for x in xs])

    register_replacement(
        search, replace, [[half(2, 3), half(2, 3)]], extra_check=lambda match: seen.append(match.kwargs["xs"]) or True
    )
    gm = aot_graph(lambda x, y: torch.relu(torch.cat([x, y])), half(4, 3), half(5, 3))
    assert optimise(gm).fusions() == 1
    assert targets(gm) == ["relu", "relu", "cat"]
    assert len(seen[0]) == 2


def test_hand_written_patterns_are_held_to_the_search_function() -> None:
    """A pattern that ignores a view's sizes matches every view; only the one that search_fn makes is replaced."""
    aten = torch.ops.aten
    pattern = MultiOutputPattern(
        [CallFunction(aten.relu.default, CallFunction(aten.view.default, KeywordArg("x"), Ignored()))]
    )

    def search(x: Any) -> Any:
        return torch.relu(x.view(-1, x.shape[-1]))

    def replace(x: Any) -> Any:
        return torch.clamp_min(x.view(-1, x.shape[-1]), 0)

    def several(x: Any) -> Any:
        return torch.relu(x.view(-1, 8)), torch.relu(x.view(-1, 4))

    register_replacement(search, replace, [half(2, 3, 8)], search_fn_pattern=pattern)
    gm = aot_graph(several, half(5, 7, 8))
    report = optimise(gm)
    assert report.fusions() == 1
    (miss,) = [miss for miss in report.near_misses() if "relu" in miss.node]
    assert "has shape [70, 4] instead of [35, 8], which search_fn gives for these inputs" in miss.reason


def test_multi_output_patterns_by_hand() -> None:
    """Two outputs, one of them used by the other; both are replaced together (pytorch#137280)."""
    aten = torch.ops.aten
    total = CallFunction(aten.add.Tensor, KeywordArg("x"), KeywordArg("y"), _users=2)
    pattern = MultiOutputPattern([CallFunction(aten.relu.default, total), total])

    def search(x: Any, y: Any) -> Any:
        total = torch.add(x, y)
        return torch.relu(total), total

    def replace(x: Any, y: Any) -> Any:
        total = torch.sub(x, torch.neg(y))
        return torch.clamp_min(total, 0), total

    register_replacement(search, replace, [half(2, 3), half(2, 3)], search_fn_pattern=pattern)
    gm = aot_graph(lambda x, y: search(x, y), half(4, 3), half(4, 3))
    values = [torch.randn(4, 3), torch.randn(4, 3)]
    before = evaluate(gm, *values)
    assert optimise(gm).fusions() == 1
    assert sorted(targets(gm)) == ["clamp_min", "neg", "sub"]
    for old, new in zip(before, evaluate(gm, *values), strict=True):
        torch.testing.assert_close(new, old)


def scaled(x: Any, factor: float) -> Any:
    return torch.relu(torch.mul(x, factor))


def scaled_otherwise(x: Any, factor: float) -> Any:
    return torch.clamp_min(torch.mul(x, factor), 0)


def test_a_scalar_is_a_wildcard_only_where_it_is_named() -> None:
    """``scalar_workaround`` makes the number match any, and hands it on; without it the traced one is a constant."""

    def by_three(x: Any) -> Any:
        return scaled(x, 3.0)

    def by_five(x: Any) -> Any:
        return scaled(x, 5.0)

    constant = register_replacement(by_five, lambda x: scaled_otherwise(x, 5.0), [half(2)])
    gm = aot_graph(by_three, half(4))
    report = optimise(gm)
    assert report.fusions() == 0
    assert [miss.reason for miss in report.near_misses(constant.name)] == ["mul: other is 3.0, the pattern has 5.0"]
    constant.remove()

    wildcard = register_replacement(scaled, scaled_otherwise, [half(2)], scalar_workaround={"factor": 0.3})
    assert optimise(gm).fusions(wildcard.name) == 1
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert product.args[1] == 3.0
    values = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    torch.testing.assert_close(evaluate(gm, values), [torch.tensor([0.0, 0.0, 6.0, 15.0])])


@pytest.mark.parametrize("skip", [False, True])
def test_duplicates_are_one_rule_with_and_without_skip_duplicates(skip: bool) -> None:
    """Torch's function raises without it, which broke a second model (vllm-ascend#6513); ours counts."""
    handles = [register_replacement(relu, clamped, [half(2)], skip_duplicates=skip) for _ in range(2)]
    assert len(registry.USER_RULES.snapshot()) == 1
    gm = aot_graph(lambda x: torch.relu(x), half(4))
    assert optimise(gm).fusions(handles[0].name) == 1
    handles[0].remove()
    assert len(registry.USER_RULES.snapshot()) == 1
    handles[1].remove()
    assert registry.USER_RULES.snapshot() == ()


def relu(x: Any) -> Any:
    return torch.relu(x)


def clamped(x: Any) -> Any:
    return torch.clamp_min(x, 0)


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (ShapeRange("x1", -1, at_least=32), "size 16 of dimension -1 of x1 is below 32"),
        (ShapeRange("x1", -1, at_most=8), "size 16 of dimension -1 of x1 is above 8"),
        (ShapeRange("x1", -1, multiple_of=32), "size 16 of dimension -1 of x1 is not a multiple of 32"),
        (ShapeRange("x1", 4), "x1 has no dimension 4"),
        (ShapeRange("x1", -1, 16, 16, 8), ""),
    ],
    ids=lambda value: str(value)[:20],
)
def test_shape_ranges_are_conditions(check: ShapeRange, reason: str) -> None:
    """As ``extra_check``, with a reason of their own in the report."""
    register_replacement(search_fn, replace_fn, [half(1, 2), half(1, 2), half(2)], extra_check=check)
    report = optimise(aot_graph(model, half(3, 16), half(3, 16), half(16)))
    assert report.fusions() == (not reason)
    assert [miss.reason for miss in report.near_misses()] == [reason] * bool(reason)


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
