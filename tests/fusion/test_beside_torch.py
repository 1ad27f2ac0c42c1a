"""Rule by rule of "Rewriting rules": the match that torch's matcher makes and should not, beside our refusal.

And the other way round: matches that are right and that torch's matcher, or one that compares arguments and user counts
strictly, would lose. Values are compared every time, by ``Case.by_us`` for ours. In brackets the public threads.
"""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, D103, PLW0108

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_helpers import targets
from matchers import Case, half, metadata, ours, pair, plain_torch, traced
from torch import fx
from torch._inductor.pattern_matcher import CallFunction, Ignored, KeywordArg, PatternMatcherPass, fwd_only
from torch._inductor.pattern_matcher import register_replacement as torch_register
from torch._subclasses.fake_tensor import FakeTensorMode

aten, npu = torch.ops.aten, torch.ops.npu


def add_mul(x: Any, y: Any) -> Any:
    return torch.mul(torch.add(x, y), y)


def mul_add(x: Any, y: Any) -> Any:
    return torch.mul(y, torch.add(x, y))


def values_differ(case: Case, gm: fx.GraphModule) -> bool:
    """Whether ``gm`` computes something else than the graph of ``case``, another dtype or shape included."""
    pairs = zip(case.values(case.graph()), case.values(gm), strict=True)
    return any(a.dtype != b.dtype or a.shape != b.shape or not torch.allclose(a, b) for a, b in pairs)


def refused(case: Case, reason: str) -> None:
    """Ours leaves the graph as it is and says why."""
    report, gm = case.by_us()
    assert report.fusions() == 0
    assert reason in " / ".join(miss.reason for miss in report.near_misses())
    assert targets(gm) == targets(case.graph())


def negated(x: Any) -> Any:
    return npu.npu_dynamic_quant(torch.neg(x))


def negated_otherwise(x: Any) -> Any:
    return npu.npu_dynamic_quant(torch.mul(x, -1))


def quantised(**keywords: Any) -> Callable[..., Any]:
    return lambda x, y: npu.npu_dynamic_quant(torch.neg(x), **{k: v(y) for k, v in keywords.items()})


def grouped(x: Any, y: Any) -> Any:
    return npu.npu_dynamic_quant(torch.neg(x), smooth_scales=y[:1], group_index=y[0, :1].to(torch.int32))


@pytest.mark.parametrize(
    ("model", "reason", "known"),
    [
        (quantised(smooth_scales=lambda y: y[0]), "smooth_scales is select, the pattern has None", True),
        (quantised(dst_type=lambda y: torch.quint4x2), "dst_type is 16, the pattern has None", False),
        (quantised(dst_type_max=lambda y: 15.0), "dst_type_max is 15.0", False),
        (quantised(quant_mode=lambda y: "pertensor"), "quant_mode is pertensor, the pattern has pertoken", False),
        (grouped, "smooth_scales is slice_1, the pattern has None", False),
    ],
    ids=["smooth_scales", "dst_type", "dst_type_max", "quant_mode", "group_index"],
)
def test_a_keyword_that_the_pattern_does_not_name(model: Any, reason: str, known: bool) -> None:
    """Torch replaces the call and the keyword is gone (vllm-ascend#11776); ``known`` where a reference can show it."""
    case = Case(model, negated, negated_otherwise, pair(), [half(4, 16)])
    if known:
        count, gm = case.by_torch()
        assert count == 1
        assert values_differ(case, gm)
        refused(case, reason)
        return
    gm = case.graph()
    assert plain_torch(gm, negated, negated_otherwise, lambda: [half(4, 16)]) == 1
    assert all(
        not node.kwargs for node in gm.graph.find_nodes(op="call_function", target=npu.npu_dynamic_quant.default)
    )
    gm = case.graph()
    text, reasons = (
        str(gm.graph),
        [miss.reason for miss in ours(gm, negated, negated_otherwise, lambda: [half(4, 16)]).near_misses()],
    )
    assert reason in reasons[0]
    assert str(gm.graph) == text


def test_alpha_is_not_dropped() -> None:
    """``torch.add(x, y, alpha=3)`` is not ``x + y``."""
    case = Case(
        lambda x, y: torch.relu(torch.add(x, y, alpha=3)),
        lambda x, y: torch.relu(torch.add(x, y)),
        lambda x, y: torch.relu(torch.sub(x, torch.neg(y))),
        pair(),
    )
    count, gm = case.by_torch()
    assert count == 1
    assert values_differ(case, gm)
    refused(case, "alpha is 3, the pattern has 1")


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        (lambda x, y: add_mul(x, y).float(), "would have dtype torch.float32 instead of torch.float16"),
        (lambda x, y: add_mul(x, y)[:1], "would have shape [1, 16] instead of [4, 16]"),
        (lambda x, y: add_mul(x, y).t().contiguous().t(), "would have strides [1, 4] instead of [16, 1]"),
        (lambda x, y: add_mul(x, y).cpu(), "would have device cpu instead of npu:0"),
    ],
    ids=["dtype", "shape", "strides", "device"],
)
def test_results_keep_their_metadata(replace: Any, reason: str) -> None:
    """Torch puts a result of another dtype, shape, layout or device into the graph (vllm#48330)."""
    case = Case(lambda x, y: add_mul(x, y) + 1, add_mul, replace, pair())
    count, gm = case.by_torch()
    assert count == 1
    assert metadata(gm) != metadata(case.graph())
    refused(case, reason)


def test_results_keep_their_aliasing() -> None:
    """A result that becomes a view of an input changes that input when it is written."""

    def model(x: Any, y: Any) -> Any:
        z = add_mul(x, y)
        return z.mul_(0), x

    case = Case(model, add_mul, lambda x, y: x.view(4, 16), pair())
    count, gm = case.by_torch()
    assert count == 1
    assert values_differ(case, gm)
    refused(case, "mul would share memory with other inputs than before")


def test_promotion_is_that_of_the_match() -> None:
    """The examples are both float16; at the match one is float32, and torch's result loses it (vllm#44694)."""
    case = Case(
        lambda x, y: x - y,
        lambda x, y: torch.sub(x, y),
        lambda x, y: torch.add(x, torch.neg(y)).to(x.dtype),
        [half(4, 16), half(4, 16).float()],
        pair(),
    )
    count, gm = case.by_torch()
    assert count == 1
    assert values_differ(case, gm)
    refused(case, "sub would have dtype torch.float16 instead of torch.float32")


def doubled(x: Any, y: Any) -> Any:
    total = torch.add(x, x)
    return torch.mul(total, y), total


def doubled_otherwise(x: Any, y: Any) -> Any:
    total = torch.mul(x, 2)
    return torch.mul(y, total), total


def feeds_back(x: Any, y: Any) -> Any:
    total = torch.add(x, x)
    return torch.mul(total, torch.relu(total)), total


def late_input(x: Any, y: Any) -> Any:
    total = torch.add(x, x)
    early = torch.relu(total)
    return torch.mul(total, torch.neg(y)), early


@pytest.mark.parametrize("model", [feeds_back, late_input])
def test_operands_that_come_late(model: Any) -> None:
    """Torch's graph reads a value before it is made (pytorch#162019). Ours refuses a cycle; what is merely late, waits."""
    case = Case(model, doubled, doubled_otherwise, pair())
    count, gm = case.by_torch()
    assert count == 1
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        gm.graph.lint()
    if model is feeds_back:
        refused(case, "relu depends on a replaced output through relu: fusing would close a cycle")
    else:
        report, _ = case.by_us()
        assert report.fusions() == 1


@pytest.mark.parametrize("written", ["x", "a view of x", "a cache"])
def test_a_write_in_between(written: str) -> None:
    """Torch refuses these as well. A view is written; or an operator writes that only its schema tells of."""
    with torch.library._scoped_library("beside_torch", "DEF") as library:
        library.define("advance(Tensor(a!) cache) -> ()")
        library.impl("advance", lambda cache: None, "Meta")
        library.impl("advance", tripled, "CPU")

        def model(x: Any, y: Any) -> Any:
            total = torch.add(x, y)
            if written == "a cache":
                torch.ops.beside_torch.advance(x)
            else:
                (x[0] if "view" in written else x).mul_(3)
            return torch.mul(total, y)

        case = Case(model, add_mul, mul_add, pair())
        assert case.by_torch()[0] == 0
        refused(case, "writes x_1 between the matched operators")


def tripled(cache: torch.Tensor) -> None:
    cache.mul_(3)


def test_a_write_to_other_memory_is_no_obstacle() -> None:
    """Torch refuses every write in between; ours asks what is written."""

    def model(x: Any, y: Any, z: Any) -> Any:
        total = torch.add(x, y)
        z.mul_(3)
        return torch.mul(total, y)

    case = Case(model, add_mul, mul_add, [*pair(), half(4, 16)], pair())
    assert case.by_torch()[0] == 0
    assert case.by_us()[0].fusions() == 1


def marked(key: str, first: object, second: object) -> Callable[[fx.GraphModule], None]:
    """Says of the addition and of the product where, or how, they run."""

    def edit(gm: fx.GraphModule) -> None:
        for target, value in ((aten.add.Tensor, first), (aten.mul.Tensor, second)):
            for node in gm.graph.find_nodes(op="call_function", target=target):
                node.meta[key] = value

    return edit


MARKS = {"stream_label": ("a", "b"), "core_limit": ((4, 8), (8, 8)), "deterministic_level": (1, 2)}


@pytest.mark.parametrize("key", MARKS)
def test_one_stream_and_one_scope(key: str) -> None:
    """Torch fuses over two of them and its node has none (pytorch#189095); ours refuses, and inherits a common one."""
    first, second = MARKS[key]
    case = Case(add_mul, add_mul, mul_add, pair(), edit=marked(key, first, second))
    count, gm = case.by_torch()
    assert count == 1
    assert all(key not in node.meta for node in gm.graph.nodes)
    refused(case, f"add has {key} {first!r} and mul has {second!r}")
    report, gm = Case(add_mul, add_mul, mul_add, pair(), edit=marked(key, first, first)).by_us()
    assert report.fusions() == 1
    assert [node.meta.get(key) for node in gm.graph.nodes if node.op == "call_function"] == [first, first]


def test_a_value_that_is_used_elsewhere_stays() -> None:
    """With any number of users allowed, as hand-written patterns do, torch computes the sum twice; ours refuses."""

    def model(x: Any, y: Any) -> Any:
        total = torch.add(x, y)
        return torch.mul(total, y), total

    pattern = CallFunction(
        aten.mul.Tensor, CallFunction(aten.add.Tensor, KeywordArg("x"), KeywordArg("y"), _users=2), KeywordArg("y")
    )
    gm = traced(model, *pair())
    assert by_hand(gm, add_mul, mul_add, pattern, pair()) == 1
    assert targets(gm).count("add") == 2
    refused(Case(model, add_mul, mul_add, pair()), "add is also a result of the graph")


def by_hand(gm: fx.GraphModule, search: Any, replace: Any, pattern: Any, examples: list[torch.Tensor]) -> int:
    """How often torch's matcher replaces a hand-written pattern."""
    matcher = PatternMatcherPass()
    with FakeTensorMode():
        fakes = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in examples]
        torch_register(search, replace, fakes, fwd_only, matcher, search_fn_pattern=pattern, get_decomp_fn=dict)
    count = matcher.apply(gm)
    gm.recompile()
    return count


def flattened(x: Any) -> Any:
    return torch.relu(x.flatten(0, 1))


def clamped(x: Any) -> Any:
    return torch.clamp_min(x.flatten(0, 1), 0)


def test_hand_written_patterns_are_held_to_the_search_function() -> None:
    """A pattern that ignores a view's sizes takes every view for a flatten, and torch does not look (pytorch#195320)."""
    pattern = CallFunction(aten.relu.default, CallFunction(aten.view.default, KeywordArg("x"), Ignored()))

    def model(x: Any) -> Any:
        return torch.relu(x.view(4, 6))

    gm = traced(model, half(2, 3, 4))
    assert by_hand(gm, flattened, clamped, pattern, [half(2, 3, 4)]) == 1
    assert metadata(gm) != metadata(traced(model, half(2, 3, 4)))
    case = Case(model, flattened, clamped, [half(2, 3, 4)])
    refused(case, "size is (4, 6), the pattern has (6, 4)")


def test_a_tensor_wildcard_takes_no_number() -> None:
    """Torch hands the 1 of ``x + 1`` to a replacement that expects a tensor; compilation fails."""
    case = Case(
        lambda x, y: torch.relu(x + 1),
        lambda x, y: torch.relu(torch.add(x, y)),
        lambda x, y: torch.relu(torch.sub(x, torch.neg(y))),
        pair(),
    )
    with pytest.raises(TypeError, match="must be Tensor, not int"):
        case.by_torch()
    refused(case, "y is 1, the pattern has a tensor")


def without_dead_code(gm: fx.GraphModule) -> None:
    gm.graph.eliminate_dead_code()


def both(x: Any, g: Any) -> Any:
    y, rstd = npu.npu_rms_norm(x, g)
    return npu.npu_dynamic_quant(y)[0], rstd


def both_otherwise(x: Any, g: Any) -> Any:
    y, rstd = npu.npu_rms_norm(x, g)
    return npu.npu_dynamic_quant(torch.mul(y, 1))[0], rstd


def spelt_out(gm: fx.GraphModule) -> None:
    """Defaults written out, as a client's own code may: epsilon, trailing Nones, int8."""
    for node in gm.graph.find_nodes(op="call_function", target=npu.npu_rms_norm.default):
        node.args = (*node.args, 1e-6)
    for node in gm.graph.find_nodes(op="call_function", target=npu.npu_dynamic_quant.default):
        node.kwargs = {"smooth_scales": None, "group_index": None, "dst_type": 1, "quant_mode": "pertoken"}


LEGAL: dict[str, Case] = {
    "defaults written out": Case(both, both, both_otherwise, [half(4, 16), half(16)], edit=spelt_out),
    "an output that nobody uses": Case(
        lambda x, g: both(x, g)[0], both, both_otherwise, [half(4, 16), half(16)], edit=without_dead_code
    ),
    "alpha written out": Case(lambda x, y: aten.add.Tensor(x, y, alpha=1) * y, add_mul, mul_add, pair()),
    "a keyword for a positional argument": Case(
        lambda x, g: npu.npu_dynamic_quant(npu.npu_rms_norm(x, g, epsilon=1e-6)[0])[0],
        lambda x, g: npu.npu_dynamic_quant(npu.npu_rms_norm(x, g)[0])[0],
        lambda x, g: npu.npu_dynamic_quant(torch.mul(npu.npu_rms_norm(x, g)[0], 1))[0],
        [half(4, 16), half(16)],
    ),
    "another spelling of int8": Case(
        lambda x, y: npu.npu_dynamic_quant(torch.neg(x), dst_type=torch.int8),
        negated,
        negated_otherwise,
        pair(),
        [half(4, 16)],
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_right_matches_are_not_lost(name: str) -> None:
    """What is the same call is the same pattern, however it is written."""
    report, _ = LEGAL[name].by_us()
    assert report.fusions() == 1, report.table()


@pytest.mark.parametrize("name", ["defaults written out", "an output that nobody uses"])
def test_torch_loses_some_of_them(name: str) -> None:
    """So they are worth a test."""
    assert LEGAL[name].by_torch()[0] == 0
