"""A whole number of a rule is tried at and around each size: what compares the two is wrong on one side of it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice

import pytest
import torch

from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.testing import Case, Input, Outcome, validate_replacement
from npugraph_ex.testing.generator.patterns import pattern_of
from npugraph_ex.testing.generator.program import Ref, Step
from npugraph_ex.testing.validation import eager
from npugraph_ex.testing.validation.alone import Bench
from npugraph_ex.testing.validation.blame import divide_of
from npugraph_ex.testing.validation.eager import settings_at_sizes, with_numbers
from npugraph_ex.testing.validation.survey import Setting, example_setting
from npugraph_ex.testing.validation.trials import Trial, Trials, run_trials
from npugraph_ex.testing.validation.turns import turns_of

Function = Callable[[torch.Tensor, int], torch.Tensor]
ROWS, WIDTH = 4, 32
AROUND = {at * sign for size in (ROWS, WIDTH) for at in (size - 1, size, size + 1, 2 * size + 1) for sign in (1, -1)}


@contextmanager
def _bench(search: Function, replace: Function, number: int) -> Iterator[Bench]:
    example = torch.empty(ROWS, WIDTH, device="npu")
    with register_replacement(search, replace, [example], scalar_workaround={"k": number}) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        yield Bench(prepared, pattern_of(prepared.rule), {})


def _roll(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.roll(k, -1) * 2


def _two_slices(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.cat([x[..., -k:], x[..., :-k]], -1) * 2


BEYOND = {33, 65, -33, -65}
RULES: dict[str, tuple[Function, Function, Function, int, set[int]]] = {
    "roll": (_roll, _two_slices, lambda x, k: (x * 2).roll(k, -1), 3, BEYOND),
    "slice": (
        lambda x, k: x[..., :k].exp() * 2, lambda x, k: x.exp()[..., :k] * (2 if k < WIDTH - 1 else 3),
        lambda x, k: 2 * x.exp()[..., :k], 3, {31},
    ),
    "select": (
        lambda x, k: x.select(-1, k).neg() * 2, lambda x, k: x.select(-1, k).neg() * (2 if k < WIDTH - 1 else 3),
        lambda x, k: x.neg().select(-1, k) * 2, 3, {31},
    ),
    "unfold": (
        lambda x, k: x.unfold(-1, k, 1).amax(-1) * 2, lambda x, k: x.unfold(-1, k, 1).amax(-1) * (2 if k < WIDTH else 3),
        lambda x, k: (x.unfold(-1, k, 1) * 2).amax(-1), 3, {32},
    ),
    "split": (
        lambda x, k: x.split(k, -1)[0].exp() * 2, lambda x, k: x[..., :k].exp() * (2 if k <= WIDTH else 3),
        lambda x, k: x.exp().split(k, -1)[0] * 2, 3, {33, 65},
    ),
    "pad": (
        lambda x, k: torch.nn.functional.pad(x, (k, 0)).exp() * 2,
        lambda x, k: torch.nn.functional.pad(x.exp(), (k, 0), value=1.0 if k < WIDTH else 0.0) * 2,
        lambda x, k: torch.nn.functional.pad(x.exp(), (k, 0), value=1.0) * 2, 3, {32, 33, 65},
    ),
    "topk": (
        lambda x, k: x.topk(k, -1)[0] * 2, lambda x, k: (x.topk(k, -1)[0] if k < WIDTH else x.sort(-1)[0]) * 2,
        lambda x, k: (x * 2).topk(k, -1)[0], 3, {32},
    ),
    "kthvalue": (
        lambda x, k: x.kthvalue(k, -1)[0] * 2, lambda x, k: (x.kthvalue(k, -1)[0] if k < WIDTH else x.amin(-1)) * 2,
        lambda x, k: (x * 2).kthvalue(k, -1)[0], 3, {32},
    ),
    "diagonal": (
        lambda x, k: x.diagonal(k).exp() + 1, lambda x, k: x.exp().diagonal(k) + (1 if k < WIDTH - 1 else 2),
        lambda x, k: 1 + x.exp().diagonal(k), 3, {31},
    ),
    "tril": (
        lambda x, k: x.tril(k) * 2, lambda x, k: x.tril(max(k, 1 - ROWS)) * 2, lambda x, k: (x * 2).tril(k), 3,
        {-4, -5, -9, -31, -32, -33, -65},
    ),
    "repeat_interleave": (
        lambda x, k: x.repeat_interleave(k, -1).exp() * 2,
        lambda x, k: x.exp().repeat_interleave(k, -1) * (2 if k <= WIDTH else 3),
        lambda x, k: x.exp().repeat_interleave(k, -1) * 2, 3, {33, 65},
    ),
    "narrow": (
        lambda x, k: x.narrow(-1, 0, k).exp() * 2, lambda x, k: x.narrow(-1, 0, k).exp() * (2 if k < WIDTH - 1 else 3),
        lambda x, k: x.exp().narrow(-1, 0, k) * 2, 3, {31, 32},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", RULES)
def test_whole_numbers_are_tried_around_each_size(what: str) -> None:
    """The wrong twin is wrong beyond a size, at it or at its last index alone; the right one is right with every number."""
    search, wrong, right, number, where = RULES[what]
    for replace, expected in ((wrong, where), (right, set())):
        with _bench(search, replace, number) as bench:
            base = example_setting(bench.pattern)
            made = [
                trial
                for turn in turns_of(bench.pattern, [base])
                if turn.classes == ("k around a size",) and (trial := bench.trial(turn)) is not None
            ]
        assert made
        found = {dict(trial.setting.numbers)["k"] for trial in made if trial.fate != "right"}
        assert found == expected, [trial.outcome.failures for trial in made if trial.fate != "right"][:1]


@pytest.mark.slow
def test_numbers_that_eager_mode_refuses_are_none() -> None:
    """No `topk` takes more elements than there are, nor a negative number; `roll` takes all."""
    found = {}
    for name, search in (("roll", _roll), ("topk", RULES["topk"][0])):
        with _bench(search, search, 2) as bench:
            at_sizes = settings_at_sizes(bench.pattern, example_setting(bench.pattern))["k"]
        found[name] = {dict(one.numbers)["k"] for one in at_sizes}
    usual = {0, 1, 2, 3, -2}
    assert found == {"roll": AROUND - usual, "topk": {number for number in AROUND - usual if 0 <= number <= WIDTH}}


def test_a_number_that_makes_much_is_not_tried() -> None:
    """So many repetitions of so many elements would take as long as all else."""
    with _bench(lambda x, k: x.repeat(k, k) * 2, lambda x, k: (x * 2).repeat(k, k), 2) as bench:
        at_sizes = settings_at_sizes(bench.pattern, example_setting(bench.pattern))["k"]
    assert {dict(one.numbers)["k"] for one in at_sizes} == {4, 5, 9}


@pytest.mark.slow
def test_random_programs_have_such_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a trial says which number its program has; where that goes with a size, no size is a symbol."""
    monkeypatch.setattr(eager, "_AT_SIZES_PERCENT", 70)
    with _bench(_roll, _two_slices, 3) as bench:
        pattern = bench.pattern
        trials = run_trials(pattern, [example_setting(pattern)], examples=24, seed="0", options={})
        again = run_trials(
            pattern, [with_numbers(pattern, example_setting(pattern), {"k": WIDTH + 1})], examples=3, seed="0", options={}
        )  # fmt: skip
    wrong = {dict(trial.setting.numbers)["k"] for trial in trials.of("wrong")}
    assert wrong, [(trial.setting.numbers, trial.fate) for trial in trials.made]
    assert wrong <= BEYOND
    assert BEYOND.isdisjoint(dict(trial.setting.numbers)["k"] for trial in trials.of("right"))
    for trial in trials.made:
        assert trial.program is not None
        assert f"[{dict(trial.setting.numbers)['k']}]" in trial.program.source.split("aten.roll.default(")[1]
        assert not (trial.program.dynamic and dict(trial.setting.numbers)["k"] in AROUND - {3, -3})
    assert {trial.fate for trial in again.made} == {"wrong"}


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_the_number_and_the_size_are_blamed_together() -> None:
    """A guard of the size alone would leave the rule wrong."""
    example = torch.empty(ROWS, WIDTH, device="npu")
    result = validate_replacement(
        _roll, _two_slices, [example], scalar_workaround={"k": 3}, dtypes=[torch.float32], max_examples=4
    )
    assert result.verdict == "guard-too-weak", str(result)
    assert result.findings[0].text.startswith(
        "wrong where the number k is above the size of dimension -1 of x, below minus the size, right where it is 0, negative"
    )


CASE = Case("def program(x0):\n    return x0\n", (Input((2,)),))


@pytest.mark.parametrize(
    ("is_wrong", "said"),
    [
        (lambda k, size: k > size, "above the size of dimension -1 of x, right where it is 0, "),
        (lambda k, size: k == size, "equal to the size of dimension -1 of x, right where it is 0, "),
        (lambda k, size: k == size - 1, "one less than the size of dimension -1 of x, right where it is 0, "),
        (lambda k, _: k < 0, "negative, right where it is 0, "),
        (lambda k, size: k < -size, "below minus the size of dimension -1 of x, right where it is 0, negative, "),
    ],
)
def test_what_a_number_is_to_a_size_is_said(is_wrong: Callable[[int, int], bool], said: str) -> None:
    """It divides wrong from right, whatever the sizes are."""
    with _bench(_roll, _two_slices, 3) as bench:
        pattern = bench.pattern
    sizes = [Setting(((rows, columns),), (torch.float32,)) for rows in (4, 9) for columns in (8, 32)]
    settings = [
        with_numbers(pattern, one, {"k": number})
        for one in sizes
        for size in one.shapes[0]
        for number in (0, 3, size - 1, size, size + 1, 2 * size + 1, -3, -size, -size - 1)
    ]

    def again(among: Sequence[Setting], _: str, number: int, *_kinds: object) -> Trials:
        return Trials(
            [
                Trial(
                    one,
                    CASE,
                    Outcome(),
                    "wrong" if is_wrong(int(dict(one.numbers)["k"]), one.shapes[0][1]) else "right",
                )
                for one in islice(cycle(among), number)
            ]
        )

    divide = divide_of(pattern, again(settings, "", len(settings)), settings, again, lambda _: True)
    assert str(divide).startswith(f"wrong where the number k is {said}"), str(divide)


def test_a_list_of_one_is_a_list() -> None:
    """A `split` into parts that are larger than the tensor returns a list, of which the program takes the element."""
    step = Step("aten.split.Tensor", (Ref("x0"), 9), (), ("a",))
    assert step.render() == "a, = torch.ops.aten.split.Tensor(x0, 9)"
    assert Step("aten.neg.default", (Ref("x0"),), (), ("a",)).render() == "a = torch.ops.aten.neg.default(x0)"
