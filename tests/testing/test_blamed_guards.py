"""Validation blames the guard of a rule for what fails in a part of what the guard admits, and nothing that was right by luck."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from judged_rules import product_then_sigmoid, the_same_turned, validated

from npugraph_ex.fusion.conditions import ShapeRange
from npugraph_ex.fusion.rules import DEFAULT_RULES
from npugraph_ex.testing import Case, Input, Outcome
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.patterns import Argument, Pattern
from npugraph_ex.testing.validation.blame import divide_of
from npugraph_ex.testing.validation.guards import numbers_in
from npugraph_ex.testing.validation.survey import Setting
from npugraph_ex.testing.validation.trials import Trial, Trials, in_turn

WIDTH = 96


CASE = Case("def program(x0):\n    return x0\n", (Input((2,)),))


@pytest.mark.slow
def test_what_fails_for_one_dtype_blames_the_guard() -> None:
    """Wrong for bfloat16 alone: the guard should have said so, and the finding says what divides right from wrong."""

    def replace(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.add(x, y) if x.dtype == torch.bfloat16 else torch.mul(x, y))

    result = validated(product_then_sigmoid, replace, max_examples=4, dtypes=[torch.float16, torch.bfloat16])
    assert result.verdict == "guard-too-weak", str(result)
    assert "dtype of x is bfloat16" in result.findings[0].text
    assert not result.ok


@pytest.mark.parametrize("with_gaps", [False, True])
def test_what_fails_for_arguments_that_are_not_contiguous_blames_their_layout(*, with_gaps: bool) -> None:
    """A replacement that reads rows one after the other is right where they lie so; another fault is not called one of layouts."""

    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.mul(x, y)).sum(-1)

    def replace(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dense = x.as_strided(x.shape, (x.shape[1], 1))
        return torch.sigmoid(torch.mul(dense if with_gaps else x, y if with_gaps else y + 0.5)).sum(-1)

    result = validated(search, replace, max_examples=12, dtypes=[torch.float16])
    assert result.verdict == ("guard-too-weak" if with_gaps else "refuted"), str(result)
    assert ("right where the same one is" in result.findings[0].text) == with_gaps


@pytest.mark.slow
def test_a_dtype_that_was_right_beside_its_like_is_not_called_right() -> None:
    """A product of small integers wraps around before it is added to float16; beside integers the sum wraps in either order."""

    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 3 + y

    def replace(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(y, x, alpha=3)

    result = validated(search, replace, max_examples=6)
    assert result.verdict == "guard-too-weak", str(result)
    assert "dtype of x is int8, uint8, right" in result.findings[0].text


@pytest.mark.parametrize("tried", [1, 6])
def test_few_examples_blame_the_guard_as_many_do(tried: int) -> None:
    """Wrong for wide rows alone: however few programs were asked for, the sizes divide right from wrong where they should."""
    pattern = Pattern(
        "a rule", tuple(Argument(name, (0, 1), torch.float16) for name in ("x", "y")), (), DEFAULT_RULES[0]
    )
    sizes = [(rows, columns) for rows in range(1, 200) for columns in (2, 16, 20, 21, 64, 100)]
    settings = [Setting((size, size), (torch.float16,) * 2) for size in sizes]

    def run(among: Sequence[Setting], seed: str, number: int, *_: object) -> Trials:
        drawn = islice(in_turn(among, Choices(Sampled(seed))), number)
        return Trials([Trial(one, CASE, Outcome(), "wrong" if one.shapes[0][1] > 20 else "right") for one in drawn])

    for seed in range(20):
        first = Trials([*run(settings[5:6], "", 1).made, *run(settings, f"{seed}", tried - 1).made])
        divide = divide_of(
            pattern,
            first,
            settings,
            lambda among, name, number, _, seed=seed: run(among, f"{seed}:{name}", number),
            bool,
        )
        assert divide
        assert divide.what == "size of dimension -1 of x"
        wrong, right = ({int(size) for size in side} for side in (divide.wrong, divide.right))
        assert max(right) <= 20 < min(wrong)


@pytest.mark.parametrize("luck", ["broadcasts", "dtypes"])
def test_what_is_wrong_as_its_examples_are_is_refuted(luck: str) -> None:
    """Where one argument broadcasts, or has another dtype, fewer elements may show a fault: nobody means a rule for those alone."""
    pattern = Pattern(
        "a rule", tuple(Argument(name, (0, 1), torch.float16) for name in ("x", "y")), (), DEFAULT_RULES[0]
    )
    own = [Setting(((rows, 8),) * 2, (torch.float16,) * 2) for rows in range(2, 9)]
    if luck == "broadcasts":
        others = [Setting((one.shapes[0], (8,)), one.dtypes, broadcasts=1) for one in own]
    else:
        others = [Setting(one.shapes, (torch.float16, torch.float32)) for one in own]

    def run(among: Sequence[Setting], seed: str, number: int, *_: object) -> Trials:
        drawn = islice(in_turn(among, Choices(Sampled(seed))), number)
        return Trials([Trial(one, CASE, Outcome(), "wrong" if one in own else "right") for one in drawn])

    settings = [*own, *others]
    assert divide_of(pattern, run(settings, "first", 12), settings, run, bool) is None


def test_what_is_wrong_in_every_setting_is_not_divided() -> None:
    """No property of the arguments tells wrong from right where there is no right."""
    pattern = Pattern("a rule", (Argument("x", (0, 1), torch.float16),), (), DEFAULT_RULES[0])
    settings = [Setting(((rows, 8),), (torch.float16,)) for rows in range(1, 9)]

    def again(among: Sequence[Setting], _: str, number: int, *_kinds: object) -> Trials:
        return Trials([Trial(one, CASE, Outcome(), "wrong") for one in islice(cycle(among), number)])

    assert divide_of(pattern, again(settings, "", 4), settings, again, bool) is None


def test_a_size_that_was_right_by_luck_is_not_called_right() -> None:
    """Most settings are of one column, which is always right; 128 columns are wrong now and then, as with ties."""
    pattern = Pattern("a rule", (Argument("x", (0, 1), torch.float16),), (), DEFAULT_RULES[0])
    sizes = [*((rows, 1) for rows in range(1, 31)), (4, 64), (4, 128)]
    settings = [Setting((size,), (torch.float16,)) for size in sizes]
    times: Counter[int] = Counter()

    def again(among: Sequence[Setting], seed: str, number: int, *_: object) -> Trials:
        made = []
        for one in islice(in_turn(among, Choices(Sampled(seed))), number):
            columns = one.shapes[0][1]
            times[columns] += 1
            wrong = columns == 64 or (columns == 128 and times[columns] > 4 and times[columns] % 2)
            made.append(Trial(one, CASE, Outcome(), "wrong" if wrong else "right"))
        return Trials(made)

    first = again(settings[-2:], "first", 4)
    divide = divide_of(pattern, first, settings, again, bool)
    assert divide is None or "128" not in divide.right


def test_a_size_too_small_to_show_a_fault_is_not_called_right() -> None:
    """One element in a thousand is wrong, wherever it is: all programs of 8,192 elements are wrong, and hardly one of eight."""
    pattern = Pattern("a rule", (Argument("x", (0, 1), torch.float16),), (), DEFAULT_RULES[0])
    settings = [Setting(((1, columns),), (torch.float16,)) for columns in (8, 8192)]

    def run(among: Sequence[Setting], seed: str, number: int, *_: object) -> Trials:
        made = []
        for place, one in enumerate(islice(cycle(among), number)):
            size = one.shapes[0][1]
            is_wrong = random.Random(f"{seed} {place}").random() > 0.999**size
            outcome = Outcome(elements=size, wrong=is_wrong * math.ceil(size / 1000))
            made.append(Trial(one, CASE, outcome, "wrong" if is_wrong else "right"))
        return Trials(made)

    assert divide_of(pattern, run(settings, "first", 12), settings, run, bool) is None


def test_a_size_that_a_dtype_of_few_digits_had_is_not_called_right() -> None:
    """128 columns come in bfloat16 alone, which does not show so small a difference; in float32 they are wrong, too."""
    pattern = Pattern("a rule", (Argument("x", (0, 1), torch.float32),), (), DEFAULT_RULES[0])
    settings = [Setting(((rows, 64),), (dtype,)) for rows in range(1, 9) for dtype in (torch.float32, torch.bfloat16)]
    settings.append(Setting(((4, 128),), (torch.bfloat16,)))

    def again(among: Sequence[Setting], _: str, number: int, *_kinds: object) -> Trials:
        right = settings[-1]
        return Trials(
            [Trial(one, CASE, Outcome(), "right" if one == right else "wrong") for one in islice(cycle(among), number)]
        )

    assert divide_of(pattern, again(settings[-4:] * 3, "", 12), settings, again, bool) is None


def test_settings_come_in_turn() -> None:
    """Dtypes alternate, and no setting comes again before all of its dtype have come."""
    shapes = [((size,),) for size in range(1, 6)]
    settings = [Setting(shape, (dtype,)) for dtype in (torch.float16, torch.float32) for shape in shapes]
    drawn = list(islice(in_turn(settings, Choices(Sampled(1))), 20))
    assert set(drawn[:10]) == set(drawn[10:]) == set(settings)
    assert len({setting.dtypes for setting in drawn[::2]}) == 1
    assert list(islice(in_turn([], Choices(Sampled(1))), 1)) == []


@pytest.mark.slow
def test_a_guard_that_wants_what_the_examples_are_not_is_met() -> None:
    """The guard mentions a size, and that size is tried; a size that no argument can have makes it too strong."""

    def wide(match: Any) -> bool:
        return bool(match.kwargs["x"].meta["val"].shape[-1] == WIDTH)

    result = validated(product_then_sigmoid, the_same_turned, extra_check=wide, max_examples=4, dtypes=[torch.float16])
    assert result.verdict.startswith("proven"), str(result)
    assert result.settings["guard"] > result.settings["fused"] > 0
    never = validated(
        product_then_sigmoid, the_same_turned, extra_check=lambda match: not match, max_examples=3,
        dtypes=[torch.float16],
    )  # fmt: skip
    assert never.verdict == "guard-too-strong"
    assert "right in all" in never.findings[0].text
    assert not never.ok


@pytest.mark.parametrize(
    ("check", "numbers"),
    [
        (ShapeRange("x", dim=-1, at_least=256, at_most=8192, multiple_of=32), {32, 256, 8192}),
        (lambda match: match.kwargs["x"].meta["val"].shape[-1] in (512, 1024), {512, 1024}),
        (lambda match: match.kwargs["x"].meta["val"].numel() % WIDTH == 0, {WIDTH}),
    ],
)
def test_numbers_of_a_guard(check: Callable[..., bool], numbers: set[int]) -> None:
    """Fields of an object, constants of the code, and numbers at the top of the module."""
    assert numbers <= set(numbers_in(check))
