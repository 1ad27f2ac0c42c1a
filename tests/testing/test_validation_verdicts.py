"""A verdict does not depend on luck, nor on a fault of the compiler: what is wrong now and then, overflows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from npugraph_ex import testing
from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.fusion.rules import DEFAULT_RULES
from npugraph_ex.testing import Case, Input, Outcome, validate_replacement
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.patterns import Argument, Pattern
from npugraph_ex.testing.generator.program import Program, Ref, Step
from npugraph_ex.testing.validation import blame, counterexample, eager, validate
from npugraph_ex.testing.validation.blame import divide_of
from npugraph_ex.testing.validation.infinities import meets_infinities, wrong_by_infinities
from npugraph_ex.testing.validation.survey import Setting
from npugraph_ex.testing.validation.trials import Trial, Trials, in_turn

CASE = Case("def program(x0):\n    return x0\n", (Input((2,)),))
PATTERN = Pattern("a rule", (Argument("x", (4, 64), torch.float16),), (), DEFAULT_RULES[0])
FLOATING = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
SETTINGS = [
    *(
        Setting(((rows, columns),), (dtype,))
        for dtype in FLOATING
        for rows, columns in ((4, 64), (4, 31), (1, 64), (4, 128))
    ),
    *(Setting(((4, 64),), (dtype,), foreign=True) for dtype in INTEGERS),
]


class _Chance:
    """Programs that are wrong with a probability that the setting decides."""

    def __init__(self, seed: int, floating: float, integers: float) -> None:
        self.numbers = random.Random(seed)
        self.floating, self.integers = floating, integers

    def __call__(self, among: Sequence[Setting], seed: str, number: int, *_: object) -> Trials:
        drawn = in_turn(among, Choices(Sampled(f"{self.numbers.random()}{seed}")))
        made = []
        for setting, _turn in zip(drawn, range(number), strict=False):
            wrong = self.numbers.random() < (self.integers if setting.foreign else self.floating)
            made.append(Trial(setting, CASE, Outcome(), "wrong" if wrong else "right"))
        return Trials(made)

    def start(self) -> Trials:
        """The programs that were asked for: as many as show a fault."""
        trials = Trials()
        while not trials.of("wrong"):
            trials.made += self(SETTINGS, "first", 60).made
        return trials


@pytest.mark.parametrize("share", [0.2, 0.35, 0.8])
def test_integers_that_are_wrong_now_and_then_blame_the_guard(share: float) -> None:
    """Most programs of integers are right, and all of floating-point numbers: it is a dtype that divides them, for every seed."""
    for seed in range(40):
        chance = _Chance(seed, floating=0.0, integers=share)
        divide = divide_of(PATTERN, chance.start(), SETTINGS, chance, bool)
        assert divide is not None, seed
        assert divide.what == "dtype of x"
        assert {*divide.right} >= {"float16", "bfloat16", "float32"}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_what_is_wrong_now_and_then_everywhere_is_not_divided(share: float) -> None:
    """Some dtype or size had no wrong program by luck; more programs of it show that."""
    for seed in range(40):
        chance = _Chance(seed, floating=share, integers=share)
        assert divide_of(PATTERN, chance.start(), SETTINGS, chance, bool) is None, seed


def _overflowing(scale: float) -> Program:
    x = Input((4, 64), "float16", scale=scale, seed=1)
    steps = (
        Step("aten.mul.Tensor", (Ref("x0"), Ref("x0")), results=("v0",)),
        Step("aten.relu.default", (Ref("v0"),), results=("p1_relu_0",)),
        Step("aten.exp.default", (Ref("p1_relu_0"),), results=("v1",)),
    )
    return Program((x,), steps, ("p1_relu_0", "v1"))


@pytest.mark.parametrize(("scale", "infinite"), [(1.0, False), (10.0, False), (600.0, True)])
def test_what_overflows_before_the_pattern_is_not_finite(scale: float, infinite: bool) -> None:
    """Inputs are finite, and their product is not; what overflows behind the pattern is of no account."""
    assert meets_infinities(_overflowing(scale)) is infinite


@pytest.mark.parametrize(
    ("scale", "replacement", "because"), [(600.0, "relu", True), (600.0, "abs", False), (1.0, "relu", False)]
)
def test_what_is_wrong_beside_infinities_stays_wrong(scale: float, replacement: str, because: bool) -> None:
    """`(x > 0) * x` is NaN for negative infinity and relu is not; what differs for finite numbers, too, is wrong."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return (x > 0) * x + 1

    def replace(x: torch.Tensor) -> torch.Tensor:
        return getattr(torch, replacement)(x) + 1

    x = Input((4, 64), "float16", scale=scale, seed=1)
    steps = (
        Step("aten.mul.Tensor", (Ref("x0"), -200.0), results=("v0",)),
        Step("aten.gt.Scalar", (Ref("v0"), 0), results=("p1_gt_0",)),
        Step("aten.mul.Tensor", (Ref("p1_gt_0"), Ref("v0")), results=("p1_mul_0",)),
        Step("aten.add.Tensor", (Ref("p1_mul_0"), 1), results=("p1_add_0",)),
    )
    program = Program((x,), steps, ("p1_add_0",), sizes=({}, {}))
    with register_replacement(search, replace, [torch.empty(4, 64, dtype=torch.float16, device="npu")]):
        case = Case.of(program, options={"check_numerics": False})
        assert testing.check(case).ok is (scale == 1.0 and replacement == "relu")
        assert wrong_by_infinities(program, case) is because


@pytest.mark.parametrize(("added", "because"), [(0, True), (1, False)])
def test_an_overflow_of_the_pattern_itself_is_one_of_infinities(added: int, because: bool) -> None:
    """`log(exp(x) + 1)` is infinite for large x, and softplus is not; what differs for others, too, is wrong."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.exp(x) + 1)

    def replace(x: torch.Tensor) -> torch.Tensor:
        return functional.softplus(x) + added

    x = Input((4, 64), "float32", scale=500.0, seed=1)
    steps = (
        Step("aten.exp.default", (Ref("x0"),), results=("p1_exp_0",)),
        Step("aten.add.Tensor", (Ref("p1_exp_0"), 1), results=("p1_add_0",)),
        Step("aten.log.default", (Ref("p1_add_0"),), results=("p1_log_0",)),
    )
    program = Program((x,), steps, ("p1_log_0",), sizes=({}, {}))
    with register_replacement(search, replace, [torch.empty(4, 64, device="npu")]):
        case = Case.of(program, options={"check_numerics": False})
        assert not testing.check(case).ok
        assert wrong_by_infinities(program, case) is because


def product_then_sigmoid(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A pattern."""
    return torch.sigmoid(torch.mul(x, y))


def the_same_turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same values."""
    return torch.sigmoid(torch.mul(y, x))


@pytest.mark.slow
def test_a_fault_of_the_compiler_is_not_the_replacements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rule off the programs are wrong, too: the replacement stays proven, and the script names the pass."""
    monkeypatch.setattr(counterexample, "_SHRINKING_TRIES", 20)
    example = torch.empty(4, 8, dtype=torch.float16, device="npu")
    with testing.mutant("dead-code-drops-writes"):
        result = validate_replacement(
            product_then_sigmoid, the_same_turned, [example, example], max_examples=16, dtypes=[torch.float16],
            report_dir=tmp_path,
        )  # fmt: skip
    fault, proven = result.findings[:2]
    assert (fault.kind, proven.kind) == ("compiler-fault", "proven"), str(result)
    assert fault.fails
    assert "switched off" in fault.text
    assert "Please report it" in fault.text
    script = Path(fault.script).read_text()
    assert "Guilty: pass dead_code" in script
    assert "the replacement" not in script


def test_what_only_goes_with_the_cause_is_not_blamed() -> None:
    """Products that are wrong for long sums, which were tried with few columns alone: more columns change nothing."""
    sizes = {"bias": (16,), "x": (4, 32), "y": (32, 16)}
    arguments = tuple(Argument(name, dims, torch.float16) for name, dims in sizes.items())
    pattern = Pattern("a rule", arguments, (), DEFAULT_RULES[0])
    shapes = [((columns,), (rows, 32), (32, columns)) for rows in (1, 2, 4) for columns in (15, 16, 32)]
    shapes += [((2,), (rows, long), (long, 2)) for rows in (1, 2, 4) for long in (100, 2048)]
    settings = [Setting(all_of_them, (torch.float16,) * 3) for all_of_them in shapes]

    def again(among: Sequence[Setting], _: str, number: int, *_kinds: object) -> Trials:
        return Trials(
            [
                Trial(one, CASE, Outcome(), "wrong" if one.shapes[1][1] > 32 else "right")
                for one in islice(cycle(among), number)
            ]
        )

    divide = divide_of(pattern, again(settings, "", 30), settings, again, bool)
    assert divide is not None
    assert (divide.what, divide.wrong, divide.right) == ("size of dimension -1 of x", ("100", "2048"), ("32",))
    assert divide.remedy == _CHECK + 'ShapeRange("x", -1, at_most=32)'


_CHECK = "an extra_check can refuse that, such as npugraph_ex."


@pytest.mark.parametrize(
    ("right", "wrong", "check"),
    [
        ({"64", "100", "none"}, {"1", "32"}, _CHECK + 'ShapeRange("x", 0, at_least=64)'),
        ({"16", "48"}, {"1", "31", "65"}, _CHECK + 'ShapeRange("x", 0, multiple_of=16)'),
        ({"16", "31"}, {"15", "48", "17"}, ""),
        ({"none"}, {"15"}, ""),
    ],
)
def test_a_check_of_sizes_refuses_what_was_wrong(right: set[str], wrong: set[str], check: str) -> None:
    """A range or a multiple, where one takes all that was right and nothing that was wrong."""
    pattern = Pattern("a rule", (Argument("x", (16, 4), torch.float16),), (), DEFAULT_RULES[0])
    assert blame._remedy(pattern, "size of dimension 0 of x", right, wrong) == check


@pytest.mark.slow
def test_what_is_wrong_without_infinities_too_is_no_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only programs with a negative number are those with infinities among their inputs; these show the fault without them."""
    plain = validate.run_trials

    def with_numbers(pattern: Any, settings: Any, **how: Any) -> Trials:
        numbers = (-0.7,) if how.get("special") else (0.7,)
        monkeypatch.setattr(eager, "numbers_for", lambda *_: numbers)
        return plain(pattern, settings, **how)

    monkeypatch.setattr(validate, "run_trials", with_numbers)
    examples = [torch.empty(4, 64, dtype=torch.float16, device="npu")]
    result = validate_replacement(
        lambda x, s: torch.relu(x * s), lambda x, s: torch.relu(x) * s, examples, scalar_workaround={"s": 0.7},
        max_examples=6, dtypes=[torch.float16],
    )  # fmt: skip
    assert not result.ok, str(result)
    assert "elements are wrong" in result.findings[0].text


def _amax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1)


def _amax_of_most_rows(x: torch.Tensor) -> torch.Tensor:
    return x[..., :1024].abs().amax(-1) * (2 if x.shape[-1] in {1, 31, 33} else 1)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_sizes_that_blocks_get_wrong_are_tried() -> None:
    """Whatever the seed: for 32 columns one, one more and one less, and a row longer than a block; no dtype is blamed."""
    example = torch.empty(4, 32, dtype=torch.float16, device="npu")
    result = validate_replacement(
        _amax, _amax_of_most_rows, (example,), max_examples=30, dtypes=[torch.float16], seed=1
    )
    kinds = {finding.kind: finding.text for finding in result.findings}
    assert "size of dimension -1 of x is 1, 31, 33, 2048, 2175, right" in kinds["guard-too-weak"], str(result)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_what_cannot_be_captured_without_the_rule_excuses_no_wrong_value() -> None:
    """The search function's operator runs on the CPU; the replacement overflows."""
    examples = [torch.empty(4, 32, dtype=torch.float16, device="npu") for _ in range(2)]

    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.hypot(x, y)

    def replace(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x * x + y * y)

    result = validate_replacement(search, replace, examples, max_examples=8, dtypes=[torch.float16])
    assert not result.ok
    assert {finding.kind for finding in result.findings} & {"refuted", "guard-too-weak"}, str(result)
    assert "compiler-fault" not in {finding.kind for finding in result.findings}


def _low_part(x: torch.Tensor) -> torch.Tensor:
    return x - x.to(torch.float16).to(x.dtype)


def _is_exact(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).to(x.dtype) == x


def _in_eight_bits(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype) * 2


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("search", "replace"),
    [
        (_low_part, lambda x: torch.zeros_like(x)),  # noqa: PLW0108 - its arguments can be read
        (_is_exact, lambda x: torch.ones_like(x, dtype=torch.bool)),
        (_in_eight_bits, lambda x: x * 2),
    ],
    ids=["low part", "truth values", "float8"],
)
def test_what_only_rounding_computes_is_not_judged(search: Any, replace: Any) -> None:
    """The reference has no narrower casts, so that eager mode is as far from it as any replacement."""
    examples = [torch.empty(4, 32, device="npu")]
    result = validate_replacement(search, replace, examples, max_examples=4, dtypes=[torch.float32])
    assert result.verdict == "not-judged", str(result)
    assert "alone its results differ from eager mode's by more than 1/32 of the largest" in result.findings[0].text


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_a_cast_may_be_left_out_where_it_only_rounds() -> None:
    """What is computed without it is nearer to float64."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float16).to(x.dtype) * 2 + 1

    result = validate_replacement(
        search, lambda x: x * 2 + 1, [torch.empty(4, 32, device="npu")], max_examples=4, dtypes=[torch.float32]
    )
    assert result.verdict == "proven on 4", str(result)
