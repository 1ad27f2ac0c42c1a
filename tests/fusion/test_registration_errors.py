"""A wrong registration is refused, and the error says which argument, what was expected and what came."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, PLW0108

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, optimise, targets
from matchers import half
from registrations import replace_fn, search_fn
from torch._inductor.pattern_matcher import joint_fwd_bwd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from npugraph_ex import LikeExamples, ShapeRange
from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.registry import register_replacement

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((search_fn, replace_fn, [torch.empty(2)]), r"\['x1', 'x2', 'gamma'\].* 1"),
        ((search_fn, replace_fn, torch.empty(2)), "must be a tuple or list"),
        (
            (lambda x, *, y: x + y, replace_fn, [torch.empty(2)] * 2),
            "search function takes y by keyword only.*be positional",
        ),
        (
            (search_fn, lambda x1, x2, *, gamma: x1, [torch.empty(2)] * 3),
            "replacement function takes gamma by keyword only",
        ),
        ((None, replace_fn, [torch.empty(2)]), "search_fn must be a function"),
        ((search_fn, None, [torch.empty(2)]), "replace_fn must be a function"),
        ((search_fn, replace_fn, [torch.empty(2)], None), "trace_fn must be a function"),
        ((torch.relu, torch.abs, [torch.empty(2)]), "search function cannot be read"),
        ((lambda x: torch.relu(x), lambda x: x, ["a"]), "traced .* x = 'a': TypeError"),
        ((lambda x: x if x.sum() > 0 else -x, lambda x: x, [torch.empty(2)]), "It reads a tensor's values"),
        ((search_fn, lambda x: x, [torch.empty(2)]), "must take the same arguments"),
        ((lambda x, y: x - y, lambda y, x: x - y, [torch.empty(2)] * 2), r"another order, \(y, x\) and not \(x, y\)"),
        ((lambda x, y: torch.relu(x), lambda x, y: x, [torch.empty(2)] * 2), "does not use its argument y"),
        ((lambda x: (torch.relu(x), x), lambda x: (x, x), [torch.empty(2)]), "output 1 .* is its argument x"),
        ((lambda x: torch.relu(x), lambda x: (x, x), [torch.empty(2)]), "as many results .* 1; "),
        ((lambda x: x.add_(1).relu(), lambda x: x, [torch.empty(2)]), "contains aten.add_.Tensor, which writes"),
        ((lambda x: torch.mm(x, x), lambda x: x, [torch.empty(2)]), "cannot be traced on"),
    ],
)
def test_wrong_registrations_say_what_is_wrong(arguments: tuple[Any, ...], message: str) -> None:
    """Which function, which argument, what was expected; a write is not dropped as dead code (pytorch#149879)."""
    with pytest.raises(ReplacementError, match=message):
        register_replacement(*arguments)


def test_a_constant_belongs_inside_the_replacement() -> None:
    """A tensor of the NPU from elsewhere is refused at once, and not at the match; a constant as the message asks for is none."""
    factor = torch.full((2,), 3.0).npu()
    with pytest.raises(ReplacementError, match=r"Make the constant inside the function, for example by torch\.full"):
        register_replacement(lambda x: torch.relu(x), lambda x: x * factor, [torch.empty(2).npu()])
    register_replacement(
        lambda x: torch.relu(x), lambda x: x * torch.full((2,), 3.0, device=x.device), [torch.empty(2).npu()]
    )
    assert optimise(aot_graph(lambda x: torch.relu(x), torch.empty(2).npu())).fusions() == 1


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"search_fn_pattern": 3}, "search_fn_pattern must be a pattern"),
        ({"scalar_workaround": [1]}, "scalar_workaround must map argument names"),
        ({"scalar_workaround": {"z": 1.0}}, r"scalar_workaround names \['z'\]"),
        ({"extra_check": "x"}, "extra_check must be .* 'x'"),
        ({"extra_check": LikeExamples(y=torch.ones(2))}, r"extra_check is about 'y'; .* arguments are \['x'\]"),
        ({"extra_check": ShapeRange("y", 0)}, r"extra_check is about 'y'; .* arguments are \['x'\]"),
        (
            {"extra_check": ShapeRange("x", 0) & ShapeRange("y", 0)},
            r"extra_check is about 'y'; .* arguments are \['x'\]",
        ),
        ({"trace_fn": joint_fwd_bwd}, r"AssertionError\. joint_fwd_bwd .* requires_grad=True"),
    ],
)
def test_wrong_keywords_say_what_is_wrong(keywords: dict[str, Any], message: str) -> None:
    """The same for what is optional."""
    with pytest.raises(ReplacementError, match=message):
        register_replacement(lambda x: torch.relu(x), lambda x: torch.abs(x), [torch.empty(2)], **keywords)


@pytest.mark.parametrize(
    ("search", "numbers", "message"),
    [
        (lambda x, k: torch.sqrt(x * x * (k * k)), {"k": 1.5}, r"takes its number k \(1\.5 in the trace\)"),
        (lambda x, k: torch.relu(x), {"k": 1.5}, "takes its number k"),
        (lambda x, k, m: x * k + m, {"k": 1.5, "m": 1.5}, "have the same value"),
        (lambda x, k: torch.relu(x * k) + 1.5, {"k": 1.5}, "k = 1.5, and the search function has the number 1.5"),
    ],
)
def test_a_number_that_no_match_could_bind(search: Callable[..., Any], numbers: dict[str, float], message: str) -> None:
    """Python computed another one from it, nothing uses it, or it looks like its neighbour."""
    with pytest.raises(ReplacementError, match=message):
        register_replacement(search, search, [torch.empty(2)], scalar_workaround=numbers)


def test_a_number_may_stand_in_several_places() -> None:
    """Each of them takes the argument, so another number of the model fills all."""
    rule = register_replacement(
        lambda x, k: torch.relu(x * k) + x * k, lambda x, k: torch.clamp(x * k, min=0) + x * k, [torch.empty(2)],
        scalar_workaround={"k": 1.5},
    )  # fmt: skip
    gm = aot_graph(lambda x: torch.relu(x * 3.0) + x * 3.0, half(4))
    optimise(gm).require(1, rule.name)


def test_what_a_users_pass_leaves_unused_keeps_no_fusion_away() -> None:
    """The removal of dead nodes is the library's work, and a dead node would be another user of the match's value."""

    def without_double_negation(gm: Any, *_: Any) -> None:
        neg = torch.ops.aten.neg.default
        for node in gm.graph.find_nodes(op="call_function", target=neg):
            if node.args[0].target is neg:
                node.replace_all_uses_with(node.args[0].args[0])

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.neg(torch.neg(torch.relu(x))) + 1

    rule = register_replacement(lambda x: torch.relu(x) + 1, lambda x: torch.clamp(x, min=0) + 1, [torch.empty(2)])
    gm = aot_graph(model, half(4))
    optimise(gm, post_grad_custom_pre_pass=without_double_negation).require(1, rule.name)


def test_a_warning_of_the_users_function_reaches_the_user() -> None:
    """Only what torch's own imports warn of is kept away."""

    def search(x: Any) -> Any:
        warnings.warn("mine is old", DeprecationWarning, stacklevel=1)
        return torch.relu(x)

    with pytest.warns(DeprecationWarning, match="mine is old"):
        register_replacement(search, lambda x: x.relu(), [torch.empty(2)])


def test_a_missing_fused_operator_warns_once_and_keeps_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    """A replacement that cannot be traced on this installation is no reason to stop (vllm-ascend#6578)."""

    def missing(x: Any) -> Any:
        return torch.ops.npu.npu_no_such_operator(x)

    for _ in range(2):
        register_replacement(lambda x: torch.relu(x), missing, [torch.empty(2)])
    warned = [record for record in caplog.records if "npu_no_such_operator" in record.getMessage()]
    assert len(warned) == 1
    gm = aot_graph(lambda x: torch.relu(x), half(4))
    report = optimise(gm)
    assert targets(gm) == ["relu"]
    assert "npu_no_such_operator" in report.rules[0].inactive


def test_a_replacement_by_the_same_operators_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Such a rule matches, and nobody would see why the graph stays as it was. Another number or operator is no such rule."""
    examples = [torch.empty(2)]
    for replace in (lambda x: torch.relu(x) + 1, lambda x: torch.relu(x) + 2, lambda x: torch.sigmoid(x) + 1):
        caplog.clear()
        register_replacement(lambda y: torch.relu(y) + 1, replace, examples)
        warned = ["changes nothing" in record.getMessage() for record in caplog.records]
        assert warned == ([] if replace(torch.tensor(0.0)) != 1 else [True])


def test_a_replacement_that_does_not_broadcast_is_a_near_miss_without_torchs_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusal of fake tensors is an answer, which torch would log with the stack."""
    logged: list[object] = []
    monkeypatch.setattr(logging.getLogger(FakeTensorMode.__module__), "callHandlers", logged.append)
    swiglu = torch.ops.npu.npu_swiglu
    register_replacement(
        lambda x, y: functional.silu(x) * y, lambda x, y: swiglu(torch.cat((x, y), -1)), [torch.empty(4, 32)] * 2
    )
    report = optimise(aot_graph(lambda x, y: functional.silu(x) * y, half(4, 32), half(1, 32)))
    assert ["cannot be traced" in miss.reason for miss in report.near_misses()] == [True]
    assert not logged
