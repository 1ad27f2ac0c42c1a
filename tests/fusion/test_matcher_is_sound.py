"""What the checked matcher holds to by itself; the modules ``test_beside_torch*`` show its rules beside torch's matcher."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103, PLW0108

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, targets
from matchers import half, ours, pair, traced
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, MultiOutputPattern

from npugraph_ex.graph.operators import learn

aten, npu = torch.ops.aten, torch.ops.npu


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


@pytest.mark.parametrize("which", ["x", "y"])
def test_a_view_of_an_input_stays_a_view_of_that_input(which: str) -> None:
    """The matcher binds y before x here; whatever view the replacement returns, the graph keeps its own."""

    def search(scale: float, x: Any, y: Any) -> Any:
        return torch.add(torch.mul(y, scale), x), x.t()

    def replace(scale: float, x: Any, y: Any) -> Any:
        return torch.sub(x, torch.mul(y, -scale)), {"x": x, "y": y}[which].t()

    def model(x: Any, y: Any) -> Any:
        return torch.add(torch.mul(y, 2.0), x), x.t()

    square = lambda: [half(4, 4), half(4, 4)]  # noqa: E731 - as short as its use
    gm = aot_graph(model, *square())
    turned = gm.graph.output_node().args[0][1]  # type: ignore[index]
    assert ours(gm, search, replace, square, scalars={"scale": 0.1875}).fusions() == 1
    assert gm.graph.output_node().args[0][1] is turned  # type: ignore[index]


@pytest.mark.slow
def test_an_operator_may_compute_in_the_place_of_what_the_match_made() -> None:
    """One that was seen to write and return its arguments fuses where they are the match's own, and not on an input.

    The rules are registered after it was seen, as by the second model of a process.
    """
    library = torch.library.Library("npugraph_ex_turning", "DEF")
    library.define("turn(Tensor q, Tensor k) -> (Tensor, Tensor)")
    torch.library.register_fake("npugraph_ex_turning::turn", lambda q, k: (q, k), lib=library)
    turn = torch.ops.npugraph_ex_turning.turn.default
    learn(turn, frozenset({"q", "k"}))

    def search(x: Any, y: Any) -> Any:
        return turn(x.neg(), y.neg())

    def replace(x: Any, y: Any) -> Any:
        return x.sin(), y.sin()

    def on_an_input(x: Any, y: Any) -> Any:
        return turn(x, y)

    two = lambda: [half(4, 4), half(4, 4)]  # noqa: E731 - as short as its use
    assert ours(aot_graph(search, *two()), search, replace, two).fusions() == 1
    refused = ours(aot_graph(on_an_input, *two()), on_an_input, replace, two)
    assert {miss.reason for miss in refused.near_misses()} == {"turn writes arg0_1 between the matched operators"}
    library._destroy()


@pytest.mark.parametrize("write", ["y", "total"])
def test_a_written_value_is_another_value(write: str) -> None:
    """After the write the graph goes on with its result, which is not what the pattern has."""

    def body(x: Any, y: Any) -> Any:
        total = torch.add(x, y)
        {"y": y, "total": total}[write].add_(1)
        return torch.mul(total, y)

    assert ours(traced(body, *pair()), add_mul, mul_add, pair).fusions() == 0


def test_source_is_inherited() -> None:
    """The stack trace of the last matched operator says where the fused one came from."""
    gm = aot_graph(lambda x, y: add_mul(x, y) + 1, *pair())
    (mul,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    trace = mul.meta["stack_trace"]
    ours(gm, add_mul, lambda x, y: torch.sub(x, y), pair)
    (new,) = gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
    assert new.meta["stack_trace"] == trace


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
    assert "alpha is 3" in report.near_misses()[0].reason


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_size_in_a_pattern_is_the_same_size_of_the_match() -> None:
    """Not a number that equals it in the first call, not another size, and not a tensor."""

    def search(x: Any) -> Any:
        return torch.mul(x, x.shape[0])

    def replace(x: Any) -> Any:
        return torch.div(x, 1 / x.shape[0])

    def model(x: Any, y: Any) -> Any:
        return x * x.shape[0], x * 4, x * x.shape[1], x * y, x * (x.shape[0] + 1)

    examples = lambda: [half(4, 6)]  # noqa: E731 - as short as its use
    gm = aot_graph(model, half(4, 6), half(4, 6), dynamic=True)
    report = ours(gm, search, replace, examples)
    (fusion,) = next(record.fusions for record in report.rules if record.fusions)
    assert fusion.replaced == ("mul",)
    assert fusion.guards == ()
    assert "where the pattern has the size s" in report.near_misses()[0].reason
    # With fixed sizes, 4 is the size.
    assert ours(aot_graph(model, half(4, 6), half(4, 6)), search, replace, examples).fusions() == 2


@pytest.mark.parametrize(("dtype", "fusions"), [(torch.int32, 1), (torch.float16, 2)])
def test_an_equal_number_of_another_type_promotes_otherwise(dtype: torch.dtype, fusions: int) -> None:
    """An int32 times 2 may overflow, times 2.0 it is a float; a float16 times 2 is the same as times 2.0."""

    def search(x: Any) -> Any:
        return torch.mul(x, 2) > 0

    def replace(x: Any) -> Any:
        return torch.add(x, x) > 0

    examples = lambda: [torch.empty(4, dtype=dtype, device="npu")]  # noqa: E731 - as short as its use
    gm = aot_graph(lambda x: (x * 2 > 0, x * 2.0 > 0), *examples())
    report = ours(gm, search, replace, examples)
    assert report.fusions() == fusions
    assert [miss.reason for miss in report.near_misses()] == [
        "mul_1 (aten.mul.Tensor): other is 2.0, the pattern has 2"
    ][: 2 - fusions]


@pytest.fixture(autouse=True)
def _no_compile_state() -> Iterator[None]:
    """Each test starts and ends without compiled code."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
