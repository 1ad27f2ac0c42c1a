"""The checked matcher beside torch's plain one: matches that torch makes and we refuse, and the reverse."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, D103, D403, PLW0108

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, evaluate, targets
from torch import fx
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    MultiOutputPattern,
    PatternMatcherPass,
    fwd_only,
)
from torch._inductor.pattern_matcher import register_replacement as torch_register
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.preparing import prepare
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.observe.report import PassReport, ReportBuilder

aten, npu = torch.ops.aten, torch.ops.npu


def half(*shape: int) -> torch.Tensor:
    """A float16 tensor on the device."""
    return torch.zeros(shape, dtype=torch.float16, device="npu")


def ours(gm: fx.GraphModule, search: Any, replace: Any, examples: Callable[[], Any], **rule: Any) -> PassReport:
    """Apply one rule with the checked matcher."""
    report = ReportBuilder()
    apply_rules(gm.graph, (prepare(FusionRule("rule", search, replace, examples, **rule)),), report)
    gm.graph.lint()
    gm.recompile()
    return report.build()


def plain_torch(gm: fx.GraphModule, search: Any, replace: Any, examples: Callable[[], Any]) -> int:
    """Apply the same rule with torch's matcher; how often it matched."""
    matcher = PatternMatcherPass()
    with FakeTensorMode():
        torch_register(search, replace, examples(), fwd_only, matcher, get_decomp_fn=dict)
    return matcher.apply(gm)


def quant_search(x: Any) -> Any:
    return npu.npu_dynamic_quant(torch.neg(x))


def quant_replace(x: Any) -> Any:
    return npu.npu_dynamic_quant(torch.abs(x))


UNSOUND = {
    "group_index": lambda x: npu.npu_dynamic_quant(
        torch.neg(x), smooth_scales=x[:1], group_index=torch.full((1,), 4, dtype=torch.int32, device="npu")
    ),
    "smooth_scales": lambda x: npu.npu_dynamic_quant(torch.neg(x), smooth_scales=x[0]),
    "dst_type_max": lambda x: npu.npu_dynamic_quant(torch.neg(x), dst_type_max=15.0),
    "quant_mode": lambda x: npu.npu_dynamic_quant(torch.neg(x), quant_mode="pertensor"),
    "dst_type": lambda x: npu.npu_dynamic_quant(torch.neg(x), dst_type=torch.quint4x2),
}


@pytest.mark.parametrize("argument", UNSOUND)
def test_unnamed_keywords_are_not_dropped(argument: str) -> None:
    """torch's matcher replaces the call and loses the keyword; ours refuses and names it."""
    examples = lambda: [half(4, 16)]  # noqa: E731 - as short as its use
    assert plain_torch(aot_graph(UNSOUND[argument], half(4, 16)), quant_search, quant_replace, examples) == 1
    report = ours(aot_graph(UNSOUND[argument], half(4, 16)), quant_search, quant_replace, examples)
    assert report.fusions() == 0
    first = "smooth_scales" if argument == "group_index" else argument
    assert f"{first} is" in report.near_misses()[0].reason


def test_alpha_is_not_dropped() -> None:
    """``torch.add(x, y, alpha=3)`` is not ``x + y``."""

    def search(x: Any, y: Any) -> Any:
        return torch.relu(torch.add(x, y))

    def replace(x: Any, y: Any) -> Any:
        return torch.relu(torch.sub(x, torch.neg(y)))

    def tripled(x: Any, y: Any) -> Any:
        return torch.relu(torch.add(x, y, alpha=3))

    examples = lambda: [half(4, 16), half(4, 16)]  # noqa: E731 - as short as its use
    assert plain_torch(aot_graph(tripled, half(4, 16), half(4, 16)), search, replace, examples) == 1
    report = ours(aot_graph(tripled, half(4, 16), half(4, 16)), search, replace, examples)
    assert report.fusions() == 0
    assert "alpha is 3" in report.near_misses()[0].reason


def test_written_and_omitted_defaults_are_the_same() -> None:
    """Trailing Nones, int8 for None and an epsilon equal to the default match; torch's matcher loses some."""

    def spelled(x: Any, g: Any) -> Any:
        return npu.npu_dynamic_quant(npu.npu_rms_norm(x, g)[0])

    def search(x: Any, g: Any) -> Any:
        return npu.npu_dynamic_quant(npu.npu_rms_norm(x, g)[0])

    def replace(x: Any, g: Any) -> Any:
        return npu.npu_dynamic_quant(torch.mul(x, g))

    def graph() -> fx.GraphModule:
        gm = aot_graph(spelled, half(4, 16), half(16))
        for node in gm.graph.find_nodes(op="call_function", target=npu.npu_rms_norm.default):
            node.args = (*node.args, 1e-6)
        for node in gm.graph.find_nodes(op="call_function", target=npu.npu_dynamic_quant.default):
            node.kwargs = {"smooth_scales": None, "group_index": None, "dst_type": 1, "quant_mode": "pertoken"}
        return gm

    examples = lambda: [half(4, 16), half(16)]  # noqa: E731 - as short as its use
    assert plain_torch(graph(), search, replace, examples) == 0
    assert ours(graph(), search, replace, examples).fusions() == 1


def test_another_epsilon_is_another_pattern() -> None:
    """A default in the pattern is a value; only a scalar wildcard matches any."""

    def model(x: Any, g: Any) -> Any:
        return npu.npu_rms_norm(x, g, 1e-5)[0]

    def search(x: Any, g: Any, eps: float = 1e-6) -> Any:
        return npu.npu_rms_norm(x, g, eps)[0]

    def replace(x: Any, g: Any, eps: float = 1e-6) -> Any:
        return npu.npu_gemma_rms_norm(x, g, eps)[0]

    def fixed(function: Any) -> Any:
        return lambda x, g: function(x, g)

    examples = lambda: [half(4, 16), half(16)]  # noqa: E731 - as short as its use
    report = ours(aot_graph(model, half(4, 16), half(16)), fixed(search), fixed(replace), examples)
    assert report.fusions() == 0
    gm = aot_graph(model, half(4, 16), half(16))
    assert ours(gm, search, replace, examples, scalars={"eps": 0.3}).fusions() == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=npu.npu_gemma_rms_norm.default)
    assert call.args[2] == 1e-5


def add_mul(x: Any, y: Any) -> Any:
    return torch.mul(torch.add(x, y), y)


def mul_add(x: Any, y: Any) -> Any:
    return torch.mul(y, torch.add(x, y))


def pair() -> list[torch.Tensor]:
    return [half(4, 16), half(4, 16)]


def widened(x: Any, y: Any) -> Any:
    return add_mul(x, y).float()


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        (widened, "would have dtype torch.float32 instead of torch.float16"),
        (lambda x, y: add_mul(x, y)[:2], "would have shape [2, 16] instead of [4, 16]"),
        (lambda x, y: add_mul(x, y).t().contiguous().t(), "would have strides"),
        (lambda x, y: x, "would share memory"),
    ],
)
def test_replacements_must_keep_metadata_and_aliasing(replace: Callable[..., Any], reason: str) -> None:
    """Another dtype, shape, layout or aliasing is refused where it would happen."""
    gm = aot_graph(lambda x, y: add_mul(x, y) + 1, *pair())
    report = ours(gm, add_mul, replace, pair)
    assert report.fusions() == 0
    assert reason in report.near_misses()[0].reason


@pytest.mark.parametrize("which", ["x", "y"])
def test_views_are_of_the_same_input_as_before(which: str) -> None:
    """The matcher binds y before x here; a view of x in place of a view of x is right, a view of y is not."""

    def search(scale: float, x: Any, y: Any) -> Any:
        return torch.add(torch.mul(y, scale), x), x.t()

    def replace(scale: float, x: Any, y: Any) -> Any:
        return torch.sub(x, torch.mul(y, -scale)), {"x": x, "y": y}[which].t()

    def model(x: Any, y: Any) -> Any:
        return torch.add(torch.mul(y, 2.0), x), x.t()

    square = lambda: [half(4, 4), half(4, 4)]  # noqa: E731 - as short as its use
    report = ours(aot_graph(model, *square()), search, replace, square, scalars={"scale": 0.1875})
    assert report.fusions() == (which == "x")
    reasons = [miss.reason for miss in report.near_misses()]
    assert reasons == ([] if which == "x" else ["t would share memory with other inputs than before"])


def test_promotion_is_checked_per_match() -> None:
    """The example's dtypes do not decide: mixed dtypes at a match change the result and are refused there."""

    def search(x: Any, y: Any) -> Any:
        return torch.sub(x, y)

    def replace(x: Any, y: Any) -> Any:
        return torch.add(x, torch.neg(y)).to(x.dtype)

    gm = aot_graph(lambda x, y: (x - y, x - x), half(4, 16), half(4, 16).float())
    report = ours(gm, search, replace, pair)
    assert report.fusions() == 1
    assert "dtype" in report.near_misses()[0].reason


def hand_made(*, write: str | None = None, labels: tuple[str | None, str | None] = (None, None)) -> fx.GraphModule:
    """``(x + y) * y`` with, if wanted, a write in between and stream labels."""

    def body(x: Any, y: Any, z: Any) -> Any:
        total = torch.add(x, y)
        if write:
            {"x": x, "y": y, "z": z, "total": total, "view": y[0]}[write].add_(1)
        return torch.mul(total, y)

    with FakeTensorMode():
        args = [half(4, 16) for _ in range(3)]
    gm = make_fx(body)(*args)
    for target, label in zip((aten.add.Tensor, aten.mul.Tensor), labels, strict=True):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if label:
                node.meta["stream_label"] = label
    return gm


@pytest.mark.parametrize("write", ["x", "view"])
def test_a_write_between_matched_operators_refuses(write: str) -> None:
    """Also through a view: one matched operator reads before the write and the replacement would read after it."""
    report = ours(hand_made(write=write), add_mul, mul_add, pair)
    assert report.fusions() == 0
    assert report.near_misses()[0].reason.startswith("add_ writes ")


@pytest.mark.parametrize("write", ["y", "total"])
def test_a_written_value_is_another_value(write: str) -> None:
    """After the write the graph goes on with its result, which is not what the pattern has."""
    assert ours(hand_made(write=write), add_mul, mul_add, pair).fusions() == 0


def test_a_write_to_other_memory_does_not() -> None:
    """torch's matcher refuses every write in between; ours asks what is written."""
    assert plain_torch(hand_made(write="z"), add_mul, mul_add, pair) == 0
    assert ours(hand_made(write="z"), add_mul, mul_add, pair).fusions() == 1


def test_matches_stay_on_one_stream() -> None:
    """Operators on two streams are not fused; on one, the new node runs there too."""
    report = ours(hand_made(labels=("a", "b")), add_mul, lambda x, y: torch.sub(x, y), pair)
    assert "stream_label 'a' and mul has 'b'" in report.near_misses()[0].reason
    gm = hand_made(labels=("a", "a"))
    assert ours(gm, add_mul, lambda x, y: torch.sub(x, y), pair).fusions() == 1
    (new,) = gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
    assert new.meta["stream_label"] == "a"


def test_source_is_inherited() -> None:
    """The stack trace of the last matched operator says where the fused one came from."""
    gm = aot_graph(lambda x, y: add_mul(x, y) + 1, *pair())
    (mul,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    trace = mul.meta["stack_trace"]
    ours(gm, add_mul, lambda x, y: torch.sub(x, y), pair)
    (new,) = gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
    assert new.meta["stack_trace"] == trace


def test_cycles_are_refused() -> None:
    """An input that follows from a replaced output cannot come before the replacement."""

    def search(x: Any, y: Any) -> Any:
        total = torch.add(x, x)
        return torch.mul(total, y), total

    def model(x: Any, y: Any) -> Any:
        total = torch.add(x, x)
        return torch.mul(total, torch.relu(total)), total

    gm = aot_graph(model, *pair())
    report = ours(gm, search, lambda x, y: (torch.sub(x, y), torch.neg(x)), pair)
    assert report.fusions() == 0
    assert "cycle" in report.near_misses()[0].reason


def test_a_late_input_moves_the_insertion_point() -> None:
    """An input defined after a user of an output: the user moves, the graph stays valid and computes the same."""

    def search(x: Any, y: Any) -> Any:
        total = torch.add(x, x)
        return torch.mul(total, y), total

    def replace(x: Any, y: Any) -> Any:
        total = torch.mul(x, 2)
        return torch.mul(y, total), total

    def model(x: Any, y: Any) -> Any:
        total = torch.add(x, x)
        early = torch.relu(total)
        late = torch.neg(y)
        return torch.mul(total, late), early

    gm = aot_graph(model, *pair())
    values = [torch.randn(4, 16) for _ in range(2)]
    before = evaluate(gm, *values)
    assert ours(gm, search, replace, pair).fusions() == 1
    for old, new in zip(before, evaluate(gm, *values), strict=True):
        torch.testing.assert_close(new, old)


def test_overlapping_matches_are_replaced_once_each() -> None:
    """A chain of five negations holds two pairs, not four."""

    def search(x: Any) -> Any:
        return torch.neg(torch.neg(x))

    def model(x: Any) -> Any:
        for _ in range(5):
            x = torch.neg(x)
        return x

    gm = aot_graph(model, half(4, 16))
    assert ours(gm, search, lambda x: torch.relu(x), lambda: [half(4, 16)]).fusions() == 2
    assert sorted(targets(gm)) == ["neg", "relu", "relu"]


def test_hand_written_patterns_are_checked_too() -> None:
    """``search_fn_pattern`` skips tracing, not the checks: an unnamed keyword and a wrong dtype are refused."""
    pattern = MultiOutputPattern([CallFunction(aten.add.Tensor, KeywordArg("x"), KeywordArg("y"))])
    search, replace = torch.add, lambda x, y: torch.sub(x, torch.neg(y))

    def wrapped(x: Any, y: Any) -> Any:
        return search(x, y)

    gm = aot_graph(lambda x, y: (torch.add(x, y, alpha=3), torch.add(y, x)), *pair())
    report = ours(gm, wrapped, replace, pair, pattern=pattern)
    assert report.fusions() == 1
    assert "alpha is 3, which the pattern does not name" in report.near_misses()[0].reason


def test_a_tensor_wildcard_takes_no_constant() -> None:
    """``x + 1`` is not the sum of two tensors."""
    gm = aot_graph(lambda x: torch.relu(x + 1), half(4, 16))
    report = ours(gm, lambda x, y: torch.relu(torch.add(x, y)), lambda x, y: torch.relu(torch.sub(x, y)), pair)
    assert report.fusions() == 0
    assert "y is 1, the pattern has a tensor" in report.near_misses()[0].reason


def test_shapes_in_a_pattern_are_those_of_the_match() -> None:
    """A view burned in from the example fits another shape, and another reshape is refused."""

    def search(x: Any) -> Any:
        return torch.relu(x.flatten(0, 1))

    def replace(x: Any) -> Any:
        return torch.abs(x.flatten(0, 1))

    examples = lambda: [half(2, 3, 4)]  # noqa: E731 - as short as its use
    model = lambda x: torch.relu(x.flatten(0, 1))  # noqa: E731
    other = lambda x: torch.relu(x.view(5, 56))  # noqa: E731
    assert ours(aot_graph(model, half(5, 7, 8)), search, replace, examples).fusions() == 1
    assert ours(aot_graph(model, half(5, 7, 8), dynamic=True), search, replace, examples).fusions() == 1
    report = ours(aot_graph(other, half(5, 7, 8)), search, replace, examples)
    assert report.fusions() == 0
    assert "the pattern has (35, 8)" in report.near_misses()[0].reason


@pytest.fixture(autouse=True)
def _no_compile_state() -> Iterator[None]:
    """Each test starts and ends without compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
