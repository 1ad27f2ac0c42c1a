"""What a rule matches beyond its examples: other numbers of dimensions, dtypes, magnitudes and numeric arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from npugraph_ex.fusion.conditions import LikeExamples
from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.testing import Validation, validate_replacement
from npugraph_ex.testing.generator.patterns import pattern_of
from npugraph_ex.testing.validation.other_dtypes import other_dtypes
from npugraph_ex.testing.validation.survey import example_setting
from npugraph_ex.testing.validation.trials import run_trials

Function = Callable[..., Any]


def _validated(search: Function, replace: Function, *, examples: int = 10, **how: Any) -> Validation:
    x = torch.empty(4, 32, device="npu")
    return validate_replacement(search, replace, [x], max_examples=examples, dtypes=[torch.float32], **how)


def _half() -> torch.Tensor:
    return torch.empty(4, 64, dtype=torch.float16, device="npu")


@contextmanager
def _prepared(
    search: Function, replace: Function, examples: Sequence[torch.Tensor], **how: Any
) -> Iterator[PreparedRule]:
    with register_replacement(search, replace, examples, **how) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        yield prepared


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_other_numbers_of_dimensions_are_tried() -> None:
    """The second dimension is the last one of the examples alone; the check that is named refuses the others.

    Where sizes differ, the shapes of the results do, and nothing fuses: few of the settings show it, and one program is enough.
    """

    def search(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1).relu()

    def replace(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1).clamp_min(0)

    result = _validated(search, replace, examples=1, seed=2)
    assert result.verdict == "guard-too-weak", str(result)
    said = result.findings[0].text
    assert said.startswith("wrong where the number of dimensions of x is 3, 4, right where it is 2;"), said
    assert "LikeExamples(x=...)" in said
    check = LikeExamples(x=torch.empty(4, 32, device="npu"))
    assert _validated(search, replace, examples=4, extra_check=check).verdict == "proven on 4"


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_dtypes_that_are_right_together_are_named() -> None:
    """A product is the conjunction of masks alone; one mask beside whole numbers is not enough."""
    masks = [torch.zeros(4, 8, dtype=torch.bool, device="npu")] * 2
    result = validate_replacement(lambda a, b: a & b, lambda a, b: a * b, masks, max_examples=12)
    assert result.verdict == "guard-too-weak", str(result)
    said = result.findings[0].text
    assert said.startswith(
        "wrong where the combination of dtypes is another one, right where it is that of the examples;"
    ), said
    assert "LikeExamples(a=..., b=...)" in said


@pytest.mark.slow
def test_what_is_right_for_all_numbers_of_dimensions_is_proven() -> None:
    """Among the programs are some with one and with three."""
    result = _validated(lambda x: torch.softmax(x, -1) * 0.5, lambda x: 0.5 * x.softmax(-1))
    assert result.verdict == "proven on 10", str(result)


def _slope(x: torch.Tensor, s: float) -> torch.Tensor:
    return torch.nn.functional.leaky_relu(x, s) + 1


def _slope_below_one(x: torch.Tensor, s: float) -> torch.Tensor:
    return torch.maximum(x, x * s) + 1


def _bound(x: torch.Tensor, s: float) -> torch.Tensor:
    return torch.clamp_min(x, s).neg()


def _bound_from_zero(x: torch.Tensor, s: float) -> torch.Tensor:
    return torch.where(x > s, x, abs(s)).neg()


def _root(x: torch.Tensor, s: float) -> torch.Tensor:
    return (x.square() + s).rsqrt()


def _quotient(x: torch.Tensor, s: float) -> torch.Tensor:
    return 1 / (x * x + s).sqrt()


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("search", "replace", "number", "verdict"),
    [
        (_slope, _slope_below_one, 0.01, "refuted"),
        (_bound, _bound_from_zero, 0.5, "refuted"),
        (_slope, lambda x, s: 1 + torch.nn.functional.leaky_relu(x, s), 0.01, "proven on 10"),
        (_root, _quotient, 1e-6, "proven on 10"),
    ],
    ids=["above one", "below zero", "any slope", "an epsilon"],
)
def test_other_numbers_are_tried(search: Function, replace: Function, number: float, verdict: str) -> None:
    """A numeric argument matches any number: larger ones, and unless it is an epsilon negative ones."""
    scalars: Mapping[str, float] = {"s": number}
    result = _validated(search, replace, scalar_workaround=scalars)
    assert result.verdict == verdict, str(result)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("replace", "verdict"),
    [
        (lambda x, d: 0.5 * torch.cumsum(x, -1 if d < 9 else d), "guard-too-weak"),
        (lambda x, d: 0.5 * torch.cumsum(x, d), "proven"),
    ],
    ids=["the last dimension", "any dimension"],
)
def test_other_whole_numbers_are_tried(replace: Function, verdict: str) -> None:
    """A dimension matches any other; one that is not there is not tried."""

    def search(x: torch.Tensor, d: int) -> torch.Tensor:
        return torch.cumsum(x, d) * 0.5

    check = LikeExamples(x=torch.empty(4, 32, device="npu"))
    result = _validated(search, replace, examples=24, scalar_workaround={"d": 1}, extra_check=check)
    assert result.verdict.startswith(verdict), str(result)
    told = [finding.text for finding in result.findings if finding.kind == "guard-too-weak"]
    assert all(text.startswith("wrong where the number d is 0, -2, right where it is 1, -1 ") for text in told), told


WRONG: dict[str, tuple[Function, Function, Function, tuple[torch.dtype, ...]]] = {
    "squares overflow": (
        lambda x, y: torch.where(x > y, x, y) + torch.linalg.vector_norm(torch.stack([x, y]).float(), dim=0).to(x.dtype),
        lambda x, y: torch.where(x > y, x, y) + torch.sqrt(x * x + y * y),
        lambda x, y: torch.where(y < x, x, y) + torch.sqrt(x.float() ** 2 + y.float() ** 2).to(x.dtype),
        (torch.float16, torch.float16),
    ),
    "a product overflows": (
        lambda x, y: (x.float() * y.float() * 0.0625).half(), lambda x, y: x * y * 0.0625,
        lambda x, y: (0.0625 * (x.float() * y.float())).half(), (torch.float16, torch.float16),
    ),
    "a sum of two overflows": (
        lambda x, y: ((x.float() + y.float()) / 2).half(), lambda x, y: (x + y) / 2,
        lambda x, y: ((y.float() + x.float()) / 2).half(), (torch.float16, torch.float16),
    ),
    "a sum overflows": (
        lambda x: x.mean(-1) + 1, lambda x: x.sum(-1) / x.shape[-1] + 1,
        lambda x: (x.float().sum(-1) / x.shape[-1]).to(x.dtype) + 1, (torch.float16,),
    ),
    "the least integer": (
        lambda i: torch.argmin(i, -1) + 1, lambda i: torch.argmax(-i, -1) + 1,
        lambda i: torch.argmin(i, -1, keepdim=True).squeeze(-1) + 1, (torch.int64,),
    ),
    "integers wrap": (
        lambda i, j: (i + j) // 2, lambda i, j: i + (j - i) // 2, lambda i, j: (j + i) // 2, (torch.int32,) * 2,
    ),
    "equal elements": (
        lambda x: x.max(-1), lambda x: (x.amax(-1), x.flip(-1).argmax(-1).neg() + (x.shape[-1] - 1)),
        lambda x: (x.amax(-1), x.argmax(-1)), (torch.float32,),
    ),
    "two zeros": (
        lambda x, y: torch.xlogy(x, y.abs()) + 1, lambda x, y: x * torch.log(y.abs()) + 1,
        lambda x, y: 1 + torch.xlogy(x, y.abs()), (torch.float32, torch.float32),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_few_distinct_and_large_values_are_tried(what: str) -> None:
    """Among nine programs are some that show what random values hardly do; the right twin stays right."""
    search, wrong, right, dtypes = WRONG[what]
    examples = [torch.empty(4, 64, dtype=dtype, device="npu") for dtype in dtypes]
    for replace, fates in ((wrong, {"wrong"}), (right, {"right"})):
        with _prepared(search, replace, examples) as prepared:
            pattern = pattern_of(prepared.rule)
            trials = run_trials(pattern, [example_setting(pattern)], examples=9, seed="0", options={})
        found = {trial.fate for trial in trials.made}
        assert fates <= found <= {"right", "not fused", *fates}, [trial.outcome for trial in trials.made]


@pytest.mark.slow
def test_where_eager_mode_overflows_nothing_is_asked() -> None:
    """The squares overflow in both: eager mode has NaN, the replacement an infinity, and float64 a number."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return x * x - x * x * 0.5

    with _prepared(search, lambda x: x * x * 0.5, [_half()]) as prepared:
        pattern = pattern_of(prepared.rule)
        trials = run_trials(pattern, [example_setting(pattern)], examples=9, seed="0", options={})
    assert {trial.fate for trial in trials.made} == {"right"}


@pytest.mark.slow
def test_where_float64_overflows_nothing_is_asked() -> None:
    """The logarithm of a sigmoid that is zero even in float64; the fused operator knows it better."""
    examples = [torch.empty(4, 64, device="npu")]

    def written(x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.sigmoid(x))

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(x)

    with _prepared(written, fused, examples) as prepared:
        pattern = pattern_of(prepared.rule)
        trials = run_trials(pattern, [example_setting(pattern)], examples=18, seed="0", options={})
    assert "wrong" not in {trial.fate for trial in trials.made}, [trial.outcome for trial in trials.of("wrong")]


@pytest.mark.slow
def test_rounding_is_tried_at_ties() -> None:
    """Half up is not half to even: the first program of a dtype meets ties, whatever the seed. What is equal there is right."""

    def to_even(x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 3) + 1

    for seed in "0123":
        for fused, fates in (
            (lambda x: torch.floor(x * 3 + 0.5) + 1, {"wrong"}),
            (lambda x: torch.round(x * 4 - x) + 1, {"right"}),
        ):
            with _prepared(to_even, fused, [torch.empty(16, 32, device="npu")]) as prepared:
                pattern = pattern_of(prepared.rule)
                trials = run_trials(pattern, [example_setting(pattern)], examples=1, seed=seed, options={})
            assert {trial.fate for trial in trials.made} == fates, (seed, trials.made[0].outcome)


@pytest.mark.slow
def test_of_equal_elements_torch_leaves_the_order_open() -> None:
    """`topk` and `sort` may return either of two equal elements, so no program asks which."""
    examples = [torch.empty(4, 8, device="npu")]
    sort: Function = lambda x: tuple(part[..., :3].clone() for part in x.sort(descending=True))  # noqa: E731
    with _prepared(lambda x: tuple(part.clone() for part in x.topk(3)), sort, examples) as prepared:
        pattern = pattern_of(prepared.rule)
        trials = run_trials(pattern, [example_setting(pattern)], examples=8, seed="0", options={})
    assert {trial.fate for trial in trials.made} == {"right"}, [trial.outcome for trial in trials.made]


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_a_rule_that_is_wrong_for_integers_needs_a_guard() -> None:
    """It is right for the example's dtype and for signed integers; uint8 has no negative numbers. The check that is named helps."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.abs(x) + 1

    def replace(x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, -x) + 1

    result = validate_replacement(search, replace, [_half()], max_examples=16)
    assert result.verdict == "guard-too-weak", str(result)
    said = result.findings[0].text
    assert said.startswith("wrong where the dtype of x is uint8, right where it is "), said
    assert "LikeExamples(x=...)" in said
    with _prepared(search, replace, [_half()], extra_check=LikeExamples(x=_half())) as prepared:
        pattern = pattern_of(prepared.rule)
        assert not other_dtypes(prepared, pattern, [example_setting(pattern)], floating=True)


@pytest.mark.slow
def test_other_dtypes_are_those_in_which_the_rule_fuses() -> None:
    """Integers of either kind and masks in place of floating-point numbers, unless dtypes are asked for; and the reverse."""
    with _prepared(lambda x: x * 2 + x, lambda x: x + 2 * x, [_half()]) as prepared:
        pattern = pattern_of(prepared.rule)
        setting = example_setting(pattern)
        found = other_dtypes(prepared, pattern, [setting], floating=True)
        assert {one.setting.dtypes[0] for one in found} >= {torch.uint8, torch.int8, torch.int32, torch.int64}
        assert not other_dtypes(prepared, pattern, [setting], floating=False)
    whole = torch.empty(4, 64, dtype=torch.int32, device="npu")
    with _prepared(lambda x: x * 2 + x, lambda x: x + 2 * x, [whole]) as prepared:
        pattern = pattern_of(prepared.rule)
        found = other_dtypes(prepared, pattern, [example_setting(pattern)], floating=False)
        assert {one.setting.dtypes[0] for one in found} >= {torch.uint8, torch.int64, torch.float16, torch.float32}


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_operands_of_two_dtypes_are_tried() -> None:
    """`y * 3` of an int8 `y` wraps around before the sum promotes it, and `alpha` comes after. The check that is named helps."""

    def search(x: torch.Tensor, y: torch.Tensor, k: int) -> torch.Tensor:
        return x + y * k

    def replace(x: torch.Tensor, y: torch.Tensor, k: int) -> torch.Tensor:
        return torch.add(x, y, alpha=k)

    examples = [_half(), _half()]
    result = validate_replacement(search, replace, examples, scalar_workaround={"k": 3}, max_examples=4)
    assert result.verdict == "guard-too-weak", str(result)
    said = result.findings[0].text
    assert said.startswith("wrong where the pair of dtypes of x and y is different, right where it is equal;"), said
    assert "LikeExamples(x=..., y=...)" in said
    check = LikeExamples(x=_half(), y=_half())
    with _prepared(search, replace, examples, scalar_workaround={"k": 3}, extra_check=check) as prepared:
        pattern = pattern_of(prepared.rule)
        assert not other_dtypes(prepared, pattern, [example_setting(pattern)], floating=True)


@pytest.mark.slow
def test_an_index_does_not_become_a_mask() -> None:
    """As uint8 or bool it would select the elements that are written, which is another operator of the same name."""
    rows, columns = _half().shape
    examples = [_half(), torch.empty(rows, dtype=torch.int64, device="npu"), torch.empty(columns, device="npu").half()]

    def search(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.index_put(x, (i,), y) * 2

    def same(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.index_put(x * 2, (i,), y * 2)

    with _prepared(search, same, examples) as prepared:
        pattern = pattern_of(prepared.rule)
        found = other_dtypes(prepared, pattern, [example_setting(pattern)], floating=True)
    assert {one.setting.dtypes[1] for one in found} == {torch.int64, torch.int32}


@pytest.mark.slow
def test_a_replacement_that_cannot_be_captured_is_not_called_wrong() -> None:
    """Its operator runs on the CPU; its values are right."""
    result = _validated(lambda x: x.abs().sqrt() + 1, lambda x: torch.hypot(x, x * 0).sqrt() + 1, examples=2)
    assert result.verdict == "not-judged", str(result)
    said = result.findings[0].text
    assert "with the replacement no program can be captured" in said
    assert said.endswith(".\nhelp: npugraph-ex help 107030")


@pytest.mark.slow
def test_a_pattern_that_makes_zeros_is_computed_alone() -> None:
    """Torch puts a `detach` behind them, which a compilation removes before it fuses: a NaN times zero shows this rule."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, torch.zeros_like(x))

    result = _validated(search, lambda x: x * (x > 0), examples=4)
    assert " times alone" in str(result), str(result)
    assert "differs-for-inf-or-nan" in result.verdict
