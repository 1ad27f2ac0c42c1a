"""Whether a class of arguments is tried does not depend on chance: the seed, or how many programs were asked for."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch
from judged_rules import example

from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.fusion.rules import DEFAULT_RULES
from npugraph_ex.testing import Outcome, validate_replacement
from npugraph_ex.testing.generator.patterns import Argument, Pattern, pattern_of
from npugraph_ex.testing.oracle.checking import check_optimised
from npugraph_ex.testing.validation import alone, validate
from npugraph_ex.testing.validation.alone import Bench, run_alone
from npugraph_ex.testing.validation.blame import divide_of
from npugraph_ex.testing.validation.classes import deciding
from npugraph_ex.testing.validation.survey import Setting, example_setting
from npugraph_ex.testing.validation.trials import Trial, Trials
from npugraph_ex.testing.validation.turns import Turn, special_turns_of, turns_of
from npugraph_ex.testing.validation.warnings_once import with_warnings_once


def search(x: torch.Tensor, y: torch.Tensor, s: float) -> torch.Tensor:
    """A pattern with a number."""
    return (x * s + y).relu()


def replace(x: torch.Tensor, y: torch.Tensor, s: float) -> torch.Tensor:
    """The same values."""
    return torch.relu(y + x * s)


@contextmanager
def _bench(**settings: Any) -> Iterator[Bench]:
    """The rule, to be computed alone."""
    examples = [example(4, 32), example(4, 32)]
    with register_replacement(search, replace, examples, scalar_workaround={"s": 0.7}, **settings) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        yield Bench(prepared, pattern_of(prepared.rule), {})


@pytest.fixture(scope="module")
def plans() -> list[tuple[Sequence[Turn], Sequence[Turn]]]:
    """What validation computes alone, for several seeds and numbers of programs; no program is run."""
    found: list[list[Sequence[Turn]]] = []

    def kept(_: Bench, turns: Sequence[Turn]) -> alone.Alone:
        found[-1].append(turns)
        return alone.Alone()

    right = Trial(Setting(((4, 32),) * 2, (torch.float16,) * 2), None, Outcome(fusions=1), "right")  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(validate, "run_alone", kept)
        patched.setattr(validate, "run_trials", lambda *_, **__: Trials([right]))
        for seed, examples in ((0, 60), (2, 1)):
            found.append([])
            validate_replacement(
                search, replace, [example(4, 32), example(4, 32)], scalar_workaround={"s": 0.7}, seed=seed,
                max_examples=examples,
            )  # fmt: skip
    return [(first, special) for first, special in found]


@pytest.mark.slow
def test_the_plan_is_the_same_for_every_seed(plans: list[tuple[Sequence[Turn], Sequence[Turn]]]) -> None:
    """And for every number of programs: what is tried at all is not a matter of luck."""
    assert plans[0] == plans[1]


@pytest.mark.slow
def test_every_class_has_its_turn(plans: list[tuple[Sequence[Turn], Sequence[Turn]]]) -> None:
    """Numbers of dimensions, equal sizes, sizes of one and zero, dtypes, values, memory, numbers, symbols, one tensor twice."""
    turns, special = plans[0]
    shapes = {turn.setting.shapes[0] for turn in turns}
    assert {len(shape) for shape in shapes} == {0, 1, 2, 3, 4}
    for rank in (2, 3, 4):
        equal = {
            tuple(pair for pair in combinations(range(rank), 2) if shape[pair[0]] == shape[pair[1]])
            for shape in shapes
            if len(shape) == rank
        }
        assert equal >= {(), tuple(combinations(range(rank), 2)), *((pair,) for pair in combinations(range(rank), 2))}
    assert {(4, 1), (1, 32), (4, 0), (0, 32)} <= shapes
    assert any(size > 2048 for shape in shapes for size in shape)
    assert any(turn.setting.broadcasts is not None for turn in turns)
    of_dtype: dict[torch.dtype, set[str]] = {}
    for turn in turns:
        of_dtype.setdefault(turn.setting.dtypes[0], set()).add(turn.kind)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert of_dtype[dtype] == {"near", "few", "large", "plain", "growing", "rows"}
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool):
        assert of_dtype[dtype] >= {"large", "few"}
    for names in ({"x"}, {"y"}, {"x", "y"}):
        layouts = {layout for turn in turns if set(turn.layouts) == names for layout in turn.layouts.values()}
        alone_in_cubes = {"row", "column"} if names == {"x", "y"} else set()
        assert layouts == {"transposed", "strided", "offset", "inside", "expanded", *alone_in_cubes}
    numbers = {dict(turn.setting.numbers)["s"] for turn in turns if turn.setting.numbers}
    assert numbers == {-0.7, 1.4, 0.0, 0.5, 2.0, 1.0, 3.0, 41.0}
    assert any(turn.dynamic for turn in turns)
    assert any(turn.same == {"y": "x"} for turn in turns)
    assert len({turn.special for turn in special}) == 4
    assert {turn.setting.dtypes[0] for turn in special} == {torch.float16, torch.bfloat16, torch.float32}


@pytest.mark.slow
def test_each_turn_computes_what_it_says() -> None:
    """The programs are of the sizes, layouts and numbers of their turns, and a rule that is right is right in all of them."""
    with _bench() as bench:
        base = example_setting(bench.pattern)
        found = run_alone(bench, turns_of(bench.pattern, [base]))
        special = run_alone(bench, special_turns_of(bench.pattern, [base]))
    made = found.trials.made
    assert {trial.fate for trial in (*made, *special.trials.made)} == {"right"}
    assert len(made) > 25
    programs = [trial.program for trial in made if trial.program is not None]
    layouts = {tuple(one.layout for one in program.inputs) for program in programs}
    assert layouts >= {("strided", "strided"), ("strided", "contiguous"), ("contiguous", "expanded")}
    assert any(program.dynamic and program.inputs[0].shape == ("s0", 32) for program in programs)
    assert any(program.inputs[1].alias_of == 0 for program in programs)
    assert any("aten.mul.Tensor(x0, -0.7)" in program.source for program in programs)


ORDERS: dict[str, tuple[Any, Any, tuple[int, ...], dict[str, int]]] = {
    "two": (lambda x, a, b: x.transpose(a, b) * 2, lambda x, a, b: x.movedim(a, b) * 2, (4, 16, 4), {"a": 1, "b": 2}),
    "one": (lambda x, a: x.transpose(a, 2) * 2, lambda x, a: x.movedim(a, 2) * 2, (4, 16, 4), {"a": 1}),
    "flipped": (lambda x, a: x.flip(a) * 2, lambda x, a: x.flip(min(a, 1)) * 2, (4, 16, 4), {"a": 1}),
    "none": (lambda x: x.transpose(0, 2).relu(), lambda x: x.permute(2, 0, 1).relu(), (4, 4, 4), {}),
    "a square": (lambda x: x.t() + 1, lambda x: x + 1, (4, 4), {}),
    "right": (lambda x, a, b: x.transpose(a, b) * 2, lambda x, a, b: 2 * x.swapdims(b, a), (4, 16, 4), {"a": 1, "b": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_a_wrong_order_of_dimensions_is_found_where_no_shape_and_no_stride_shows_it(name: str) -> None:
    """Dimensions as numbers, equal sizes and expanded memory together; each alone is refused by the matcher, or right."""
    search, replacement, shape, numbers = ORDERS[name]
    with register_replacement(search, replacement, [example(*shape)], scalar_workaround=numbers) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        bench = Bench(prepared, pattern_of(prepared.rule), {})
        turns = turns_of(bench.pattern, [example_setting(bench.pattern)])
        cubes = [turn for turn in turns if turn.classes == ("equal sizes and the order of dimensions",)]
        fates = [trial.fate for turn in cubes if (trial := bench.trial(turn)) is not None]
    assert {turn.layouts.get("x", "") for turn in cubes} == {"", "transposed", "expanded", "row", "column"}
    assert set(fates) == {"right"} if name == "right" else "wrong" in fates


def test_a_class_that_could_not_be_judged_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is wrong in one class alone, and the programs of that class cannot be captured."""
    with _bench() as bench:
        base = example_setting(bench.pattern)
        masks = dataclasses.replace(base, dtypes=(torch.int8,) * 2, foreign=True)
        wrong = Outcome(["optimised, call 0, output 0: wrong"], 1)
        monkeypatch.setattr(
            alone,
            "check_optimised",
            lambda case, *rest: wrong if case.inputs[0].dtype == "int8" else check_optimised(case, *rest),
        )
        lost = Outcome(["raised CaptureError: no"], 1)
        monkeypatch.setattr(
            alone, "tried", lambda _, trial, **__: dataclasses.replace(trial, outcome=lost, fate="not captured")
        )
        found = run_alone(bench, [Turn(("float16",), base), Turn(("the dtype int8",), masks)])
    assert found.left_out == {"the dtype int8": "raised CaptureError: no"}
    assert "Not tried is the dtype int8: raised CaptureError: no" in found.tried()


@pytest.mark.slow
def test_a_pattern_that_fuses_nowhere_alone_is_told() -> None:
    """With what the rule's guard said of the first turn."""
    with _bench(extra_check=lambda _: False) as bench:
        found = run_alone(bench, turns_of(bench.pattern, [example_setting(bench.pattern)]))
    assert found.trials.made == []
    assert re.fullmatch(
        r"\. Not tried is the pattern alone, in any class of arguments: nothing fused there, extra_check .* returned False",
        found.tried(),
    )


@pytest.mark.slow
def test_a_pattern_that_cannot_be_computed_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the verdict of the random programs, with the first error's class and line."""

    def broken(*_: object) -> None:
        raise ValueError("no number\nand more")

    monkeypatch.setattr(alone, "program_of", broken)
    found = validate_replacement(
        search, replace, [example(4, 32), example(4, 32)], scalar_workaround={"s": 0.7}, max_examples=5
    )
    (proven,) = [one for one in found.findings if one.kind == "proven"]
    assert proven.text.endswith(
        "reference. Not tried is the pattern alone, in any class of arguments: ValueError: no number"
    )
    assert found.ok


@pytest.mark.slow
def test_sizes_that_must_agree_agree_in_every_class() -> None:
    """The inner sizes of a product of two matrices stay equal, in each pair of equal sizes."""
    examples = [example(4, 16), example(16, 8)]
    with register_replacement(lambda x, y: (x @ y) * 2, lambda x, y: 2 * (x @ y), examples) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        pattern = pattern_of(prepared.rule)
        found = [one.setting.shapes for one in deciding(prepared, pattern, [example_setting(pattern)])]
    assert {((16, 16), (16, 8)), ((4, 8), (8, 8)), ((8, 16), (16, 8)), ((4, 0), (0, 8))} <= {*found}
    assert all(x[-1] == y[max(0, len(y) - 2)] for x, y in found)


def test_a_pair_of_equal_sizes_is_blamed() -> None:
    """Wrong for squares alone: neither size tells right from wrong."""
    pattern = Pattern("a rule", (Argument("x", (4, 8), torch.float16),), (), DEFAULT_RULES[0])
    settings = [Setting(((rows, columns),), (torch.float16,)) for rows in (2, 4, 8) for columns in (2, 4, 8)]

    def again(among: Sequence[Setting], _: str, number: int, *_kinds: object) -> Trials:
        drawn = [among[place % len(among)] for place in range(number)]
        fates = ["wrong" if len({*one.shapes[0]}) == 1 else "right" for one in drawn]
        return Trials([Trial(one, None, Outcome(), fate) for one, fate in zip(drawn, fates, strict=True)])  # type: ignore[arg-type]

    divide = divide_of(pattern, again(settings, "", 9), settings, again, bool)
    assert divide is not None
    assert (divide.what, divide.wrong, divide.right) == ("pair of sizes -2 and -1 of x", ("equal",), ("different",))


def test_warnings_of_kernels_are_kept_away(capfd: pytest.CaptureFixture[str]) -> None:
    """Called as torch.ops, an operator would print it each time; a warning of the user's function is shown once."""

    def run() -> int:
        for _ in range(3):
            torch.ops.aten.std.correction(torch.ones(3, 1), [-1])
            torch.ones(3, 1).std(-1)
            warnings.warn("of the function", stacklevel=1)
        return 7

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert with_warnings_once(run) == 7
    assert [str(one.message) for one in caught] == ["of the function"]
    assert "degrees of freedom" not in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        with_warnings_once(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
