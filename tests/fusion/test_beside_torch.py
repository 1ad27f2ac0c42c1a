"""Rule by rule of "Rewriting rules": the match that torch's matcher makes and should not, beside our refusal.

Here what the rules say of arguments and results; `test_beside_torch_order` has operands, writes, streams and users, and
`test_beside_torch_spellings` the matches that torch's matcher loses. Values are compared every time, by ``Case.by_us`` for
ours. In brackets the public threads.
"""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, D103, PLW0108

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matchers import (
    Case,
    add_mul,
    half,
    metadata,
    negated,
    negated_otherwise,
    ours,
    pair,
    plain_torch,
    refused,
    traced,
    values_differ,
)
from torch._inductor.pattern_matcher import CallFunction, Ignored, KeywordArg

aten, npu = torch.ops.aten, torch.ops.npu


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
    assert plain_torch(gm, flattened, clamped, lambda: [half(2, 3, 4)], pattern) == 1
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
