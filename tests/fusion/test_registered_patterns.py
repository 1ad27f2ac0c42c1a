"""What a registered search may be: lists of tensors, hand-written patterns, numbers, modules, methods and partials."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, D103, PLW0108

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, evaluate, optimise, targets
from matchers import half
from torch._inductor.pattern_matcher import CallFunction, Ignored, KeywordArg, MultiOutputPattern

import npugraph_ex
from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.registry import register_replacement

pytestmark = pytest.mark.usefixtures("own_registry")


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


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_a_search_may_call_what_writes_into_copies_of_its_own(dim: int) -> None:
    """Torch's own `cosine_similarity` clamps the norms in place; AOT's graphs have the functional clamp."""

    def search(x: Any, y: Any) -> Any:
        return torch.nn.functional.cosine_similarity(x, y, dim=dim)

    register_replacement(search, lambda x, y: (x * y).sum(dim), [half(4, 4), half(4, 4)])
    gm = aot_graph(lambda x, y: search(x + 1, y) * 2, half(6, 5), half(6, 5))
    assert optimise(gm).fusions() == 1
    assert targets(gm) == ["add", "mul", "sum", "mul"]
    other = aot_graph(lambda x, y: torch.cosine_similarity(x, y, dim=dim, eps=1e-3), half(6, 5), half(6, 5))
    assert optimise(other).fusions() == 0  # eps is another number


@pytest.mark.slow
def test_a_search_may_write_what_it_computes() -> None:
    """What reads it before reads the old value. The loss with smoothed labels writes so."""

    def before(x: Any) -> Any:
        copied = x.sin()
        return copied * 2 + copied.clamp_min_(torch.scalar_tensor(0.5)) * copied

    def loss(x: Any, t: Any) -> Any:
        return torch.nn.functional.cross_entropy(x, t, label_smoothing=0.25)

    t = torch.tensor([1, 0], device="npu")
    x = torch.tensor([[0.25, 2.0], [-1.0, 0.5]], device="npu")
    rules = ((before, lambda x: before(x) + 1, (x,)), (loss, lambda x, t: loss(x, t) + 1, (x, t)))
    for search, replace, given in rules:
        with register_replacement(search, replace, [*map(torch.empty_like, given)]):
            gm = aot_graph(replace, *given)
            assert optimise(gm).fusions() == 1
            (result,) = gm(*given)
        torch.testing.assert_close(result, search(*given) + 2)


def _returned(x: Any, y: Any) -> Any:
    copied = x.clone()
    copied.add_(y)
    copied.mul_(5)
    return copied


def _part(x: Any, y: Any) -> Any:
    copied = x.clone()
    copied[0].add_(y[0])
    return copied


def _narrower(x: Any, y: Any) -> Any:
    return x.sin().add_(y.float().exp())


def _into_new_memory(x: Any, y: Any) -> Any:
    result = torch.empty_like(x)
    torch.maximum(x, y, out=result)
    return result


OWN_WRITES = [_returned, _part, _narrower, _into_new_memory]


@pytest.mark.parametrize("search", OWN_WRITES)
def test_a_search_that_returns_what_it_wrote_matches_its_own_code(search: Any) -> None:
    """The clone before the writes is as invisible in a model as in the trace, though the trace returns it."""
    given = [torch.tensor([[0.5, -2.0], [3.0, 1.5]], dtype=torch.float16, device="npu"), half(2, 2).fill_(2)]
    with register_replacement(search, lambda x, y: x - y, [half(4, 6), half(4, 6)]) as rule:
        result = torch.compile(search, backend="npugraph_ex", fullgraph=True)(*given)
        report = npugraph_ex.last_report()
    assert report is not None
    report.require(1, rule.name)
    torch.testing.assert_close(result, given[0] - given[1])


@pytest.mark.parametrize("replace", OWN_WRITES)
def test_a_replacement_may_write_memory_of_its_own(replace: Any) -> None:
    """Its functional form is used, and the arguments keep their values."""
    given = [torch.tensor([[0.5, -2.0], [3.0, 1.5]], dtype=torch.float16, device="npu"), half(2, 2).fill_(2)]
    before = [one.clone() for one in given]

    def search(x: Any, y: Any) -> Any:
        return x - y * 2

    with register_replacement(search, replace, [half(4, 6), half(4, 6)]) as rule:
        result = torch.compile(search, backend="npugraph_ex", fullgraph=True)(*given)
        report = npugraph_ex.last_report()
    assert report is not None
    report.require(1, rule.name)
    torch.testing.assert_close(result, replace(*given))
    assert all(map(torch.equal, given, before))


def _in_place(x: Any, y: Any) -> Any:
    return (x - y).relu_().mul_(3)


def _out_of_place(x: Any, y: Any) -> Any:
    return torch.relu(x - y) * 3


@pytest.mark.parametrize("model", [_in_place, _out_of_place])
@pytest.mark.parametrize("search", [_in_place, _out_of_place])
def test_a_rule_in_either_spelling_matches_models_in_both(search: Any, model: Any) -> None:
    """A write of what the function itself made is functional in the pattern and in the graph."""
    register_replacement(search, lambda x, y: torch.clamp_min(y - x, 0).mul_(3), [half(4, 6), half(4, 6)])
    assert optimise(aot_graph(model, half(2, 3), half(2, 3))).fusions() == 1


def test_a_function_that_writes_its_argument_is_refused() -> None:
    """A search function could never match, and a replacement could never be used."""

    def writes(x: Any) -> Any:
        return x.clamp_min_(torch.scalar_tensor(0.5)) * 2

    with pytest.raises(ReplacementError, match=r"search function contains.*AOT graphs are functional"):
        register_replacement(writes, lambda x: x * 2, [half(2)])
    with pytest.raises(
        ReplacementError, match=r"replacement contains aten\.clamp_min_\.Tensor, which writes.*functional form"
    ):
        register_replacement(lambda x: x * 2, writes, [half(2)])


def test_an_operator_that_writes_and_is_not_atens_needs_a_twin() -> None:
    """It has no functional form, on a clone either. With the twin that the message asks for, the rule is applied."""
    with torch.library._scoped_library("made_patterns", "FRAGMENT") as library:
        library.define("add_into(Tensor(a!) x, Tensor y) -> ()")
        library.impl("add_into", lambda x, y: None, "Meta")
        library.define("added(Tensor x, Tensor y) -> Tensor")
        library.impl("added", lambda x, y: torch.empty_like(x), "Meta")
        library.impl("added", lambda x, y: x + y, "PrivateUse1")

        def search(x: Any, y: Any) -> Any:
            return torch.relu(x - y)

        def into_a_clone(x: Any, y: Any) -> Any:
            made = -y
            torch.ops.made_patterns.add_into(made, x)
            return torch.relu(made)

        for first, second in ((search, into_a_clone), (into_a_clone, search)):
            with pytest.raises(
                ReplacementError, match=r"made_patterns\.add_into\.default, which writes neg\. .*a twin that"
            ):
                register_replacement(first, second, [half(2), half(2)])
        given = [half(2).fill_(3), half(2).fill_(1)]
        twin = torch.ops.made_patterns.added
        with register_replacement(search, lambda x, y: torch.relu(twin(-y, x)), [half(2), half(2)]) as rule:
            assert torch.compile(search, backend="npugraph_ex", fullgraph=True)(*given).tolist() == [2, 2]
            report = npugraph_ex.last_report()
        assert report is not None
        report.require(1, rule.name)


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
    assert "[70, 4] instead of [35, 8]" in miss.reason


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
    assert [miss.reason for miss in report.near_misses(constant.name)] == [
        "mul (aten.mul.Tensor): other is 3.0, the pattern has 5.0"
    ]
    constant.remove()

    wildcard = register_replacement(scaled, scaled_otherwise, [half(2)], scalar_workaround={"factor": 0.3})
    assert optimise(gm).fusions(wildcard.name) == 1
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert product.args[1] == 3.0
    values = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    torch.testing.assert_close(evaluate(gm, values), [torch.tensor([0.0, 0.0, 6.0, 15.0])])


def test_a_wildcard_number_may_be_nan() -> None:
    """NaN is no number that equals itself, and it is one number: the replacement gets it, and its values are the model's."""
    with register_replacement(scaled, scaled_otherwise, [half(2)], scalar_workaround={"factor": 0.3}) as rule:
        gm = aot_graph(lambda x: scaled(x, float("nan")), half(4))
        assert optimise(gm).fusions(rule.name) == 1
        values = torch.tensor([-1.0, 0.0, 2.0])
        torch.testing.assert_close(evaluate(gm, values), [torch.full((3,), torch.nan)], equal_nan=True)


@pytest.mark.parametrize(
    ("example", "number", "dtype", "kind"),
    [
        (0.3, 3, torch.int8, "a whole number, as mul reads"), (7, 0.5, torch.int32, "a whole number, as mul reads"),
        (0.3, True, torch.float32, "a truth value"), (7, True, torch.int32, "a truth value"),
        (0.3, 3, torch.float32, ""), (7, 0.5, torch.float32, ""), (7, 5, torch.int8, ""),
    ],
)  # fmt: skip
def test_a_number_of_another_kind_is_refused_where_it_counts(
    example: float, number: float, dtype: torch.dtype, kind: str
) -> None:
    """An int8 tensor times an integer wraps around, and ``add`` takes no truth value as ``alpha``; the rest is the same."""

    def product(x: Any) -> Any:
        return scaled(x, number)

    with register_replacement(scaled, scaled_otherwise, [half(2)], scalar_workaround={"factor": example}) as rule:
        gm = aot_graph(product, torch.ones(4, dtype=dtype))
        report = optimise(gm)
        said = f"factor is {number}; the rule was registered with {example}, and only one of them is {kind}"
        assert [miss.reason for miss in report.near_misses(rule.name)] == ([said] if kind else [])
        assert report.fusions(rule.name) == (not kind)


@pytest.mark.parametrize("given", [True, False])
def test_a_truth_value_matches_a_truth_value(given: bool) -> None:
    """It is an argument of the rule as any number is; the replacement gets the matched one."""

    def kept(x: Any, keep: bool) -> Any:
        return torch.relu(x).sum(-1, keepdim=keep)

    def kept_otherwise(x: Any, keep: bool) -> Any:
        return torch.clamp(x, min=0).sum(-1, keepdim=keep)

    with register_replacement(kept, kept_otherwise, [half(2, 2)], scalar_workaround={"keep": True}) as rule:
        gm = aot_graph(lambda x: kept(x, given), half(4, 4))
        assert optimise(gm).fusions(rule.name) == 1
        x = torch.randn(4, 4, dtype=torch.float16)
        assert torch.equal(evaluate(gm, x)[0], kept(x, given))


def test_a_truth_value_is_no_one() -> None:
    """`True == 1`, but an operator that takes 1 has not taken the truth value."""
    with pytest.raises(ReplacementError, match="takes its number flag"):
        register_replacement(
            lambda x, flag: torch.relu(x) + int(flag), lambda x, flag: x, [half(2)], scalar_workaround={"flag": True}
        )
