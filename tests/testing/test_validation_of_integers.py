"""Rules with indices, masks, divisors and other arguments that cannot be any number: right ones are proven, wrong ones refuted."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from npugraph_ex.fusion.conditions import ShapeRange
from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.testing import Case, Input, check, validate_replacement
from npugraph_ex.testing.generator.numbers import near_numbers
from npugraph_ex.testing.generator.patterns import Pattern, pattern_of
from npugraph_ex.testing.generator.program import Ref, function_of, literal
from npugraph_ex.testing.generator.strategies import planted_programs, sample
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.validation import validate
from npugraph_ex.testing.validation.alone import Bench, run_alone
from npugraph_ex.testing.validation.classes import deciding
from npugraph_ex.testing.validation.eager import runs
from npugraph_ex.testing.validation.integers import NONE, clashes, integer_ranges, is_indexable
from npugraph_ex.testing.validation.survey import Setting, example_setting
from npugraph_ex.testing.validation.trials import run_trials
from npugraph_ex.testing.validation.turns import turns_of

F = torch.nn.functional
Function = Callable[..., Any]


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="npu")


def _index(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int64)


def _x() -> torch.Tensor:
    return _empty(8, 64)


def _mask() -> torch.Tensor:
    return _empty(8, 64, dtype=torch.bool)


def _whole() -> torch.Tensor:
    return _empty(2, 64, dtype=torch.int32)


RIGHT: dict[str, tuple[Function, Function, tuple[Callable[[], torch.Tensor], ...]]] = {
    "embedding": (
        lambda w, i: F.embedding(i, w) * 2, lambda w, i: w.index_select(0, i.flatten()).view(*i.shape, -1) * 2,
        (_x, lambda: _index(2, 3)),
    ),
    "gather": (lambda x, i: x.gather(-1, i) * 2, lambda x, i: (x * 2).gather(-1, i), (_x, lambda: _index(8, 2))),
    "gather in a part": (
        lambda x, i: x[:, :32].gather(1, i) * 2, lambda x, i: x.gather(1, i) * 2, (_x, lambda: _index(8, 2)),
    ),
    "index_select": (
        lambda x, i: x.index_select(0, i) * 2, lambda x, i: (x * 2).index_select(0, i), (_x, lambda: _index(2)),
    ),
    "index": (lambda x, i: x[:, i] * 2, lambda x, i: (x * 2)[:, i], (_x, lambda: _index(2))),
    "index with two": (lambda x, i, j: x[i, j] * 2, lambda x, i, j: (x * 2)[i, j], (_x, *[lambda: _index(2)] * 2)),
    "take": (lambda x, i: x.take(i) * 2, lambda x, i: (x * 2).flatten()[i], (_x, lambda: _index(2))),
    "scatter": (
        lambda x, i, y: x.scatter(1, i, y) * 2, lambda x, i, y: (x * 2).scatter(1, i, y * 2),
        (_x, lambda: _index(8, 2), lambda: _empty(8, 2)),
    ),
    "index_add": (
        lambda x, i, y: x.index_add(0, i, y) * 2, lambda x, i, y: (x * 2).index_add(0, i, y * 2),
        (_x, lambda: _index(2), lambda: _empty(2, 64)),
    ),
    "index_copy": (
        lambda x, i, y: x.index_copy(0, i, y) * 2, lambda x, i, y: (x * 2).index_copy(0, i, y * 2),
        (_x, lambda: _index(2), lambda: _empty(2, 64)),
    ),
    "index_fill": (
        lambda x, i: x.index_fill(0, i, 1.0) * 2, lambda x, i: (x * 2).index_fill(0, i, 2.0), (_x, lambda: _index(2)),
    ),
    "index_put": (
        lambda x, i, y: x.index_put((i,), y) * 2, lambda x, i, y: (x * 2).index_put((i,), y * 2),
        (_x, lambda: _index(2), lambda: _empty(2, 64)),
    ),
    "where": (
        lambda x, m: torch.where(m, x, 0.0) * 2, lambda x, m: (x * 2).masked_fill(~m, 0.0), (_x, _mask),
    ),
    "masked_fill": (
        lambda x, m: x.masked_fill(m, float("-inf")).relu(), lambda x, m: x.relu().masked_fill(m, 0.0), (_x, _mask),
    ),
    "a mask of two": (
        lambda a, b, x: torch.where(a & b, x, -x), lambda a, b, x: torch.where(b & a, x, -x), (_mask, _mask, _x),
    ),
    "division": (
        lambda x, y: torch.div(x, y, rounding_mode="floor") * 3, lambda x, y: 3 * (x // y), (_whole, _whole),
    ),
    "sum": (lambda x, y: (x + y) * 2, lambda x, y: x * 2 + y * 2, (_whole, _whole)),
}  # fmt: skip
WRONG: dict[str, tuple[str, Function]] = {
    "an index that may be negative": ("index", lambda x, i: x.index_select(1, i) * 2),
    "the order of the index": ("index", lambda x, i: x[:, i.flip(0)] * 2),
    "an index off by one": ("gather", lambda x, i: x.gather(-1, (i + 1).clamp(max=x.shape[-1] - 1)) * 2),
    "the last index": ("index_select", lambda x, i: x.index_select(0, i.clamp(max=x.shape[0] - 2)) * 2),
    "another dimension": ("index_fill", lambda x, i: (x * 2).index_fill(1, i, 2.0)),
    "what adds": ("index_copy", lambda x, i, y: (x * 2).index_add(0, i, y * 2)),
    "the mask": ("where", lambda x, m: (x * 2).masked_fill(m, 0.0)),
    "how a quotient is rounded": ("division", lambda x, y: torch.div(x, y, rounding_mode="trunc") * 3),
}


@contextmanager
def _registered(what: str, replace: Function | None = None) -> Iterator[Pattern]:
    search, right, examples = RIGHT[what]
    with register_replacement(search, replace or right, [make() for make in examples]) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        yield pattern_of(prepared.rule)


@pytest.mark.slow
@pytest.mark.parametrize("what", RIGHT)
def test_a_right_rule_is_fused_and_right_in_every_program(what: str) -> None:
    """Its integers are those that it takes, and no program is thrown away."""
    with _registered(what) as pattern:
        trials = run_trials(pattern, [example_setting(pattern)], examples=3, seed="0", options={})
    assert Counter(trial.fate for trial in trials.made) == {"right": 3}, [trial.outcome for trial in trials.made]
    assert all(trial.outcome.fusions for trial in trials.made)


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_twin_is_seen(what: str) -> None:
    """Another index, another dimension, another mask: a program comes out wrong, or raises where eager mode does not."""
    name, replace = WRONG[what]
    with _registered(name, replace) as pattern:
        trials = run_trials(pattern, [example_setting(pattern)], examples=3, seed="0", options={})
    assert trials.of("wrong"), [trial.fate for trial in trials.made]


RANGES: dict[str, dict[str, tuple[int, int]]] = {
    "embedding": {"i": (0, 7)},
    "gather in a part": {"i": (0, 31)},
    "index": {"i": (-64, 63)},
    "index with two": {"i": (-8, 7), "j": (-64, 63)},
    "take": {"i": (-512, 511)},
    "division": {"y": (1, 2**31 - 1)},
    "sum": {},
}


@pytest.mark.parametrize("what", RANGES)
def test_the_range_of_an_integer_is_found_by_trying(what: str) -> None:
    """An index, with or without negative ones, a divisor, and a number of which there are no bounds."""
    with _registered(what) as pattern:
        ranges = integer_ranges(pattern, example_setting(pattern))
    assert {name: (found.least, found.most) for name, found in ranges.items()} == RANGES[what]


EMPTY: dict[str, tuple[str, Function | None, tuple[tuple[int, ...], ...], tuple[int, int] | bool | None]] = {
    "an index into no rows": ("index_add", None, ((0, 64), (2,), (2, 64)), False),
    "no index at all": ("index_add", None, ((0, 64), (0,), (0, 64)), None),
    "rows without elements": ("index_add", None, ((8, 0), (2,), (2, 0)), (0, 7)),
    "columns of no rows": ("index", None, ((0, 64), (2,)), (-64, 63)),
    "columns that are not there": ("index", None, ((8, 0), (2,)), False),
    "rows behind the last": ("index_add", lambda x, i, y: x[8:].index_add(0, i, y) * 2, ((8, 64), (2,), (2, 64)), False),
    "rows of a part": ("index_add", lambda x, i, y: x[4:].index_add(0, i, y) * 2, ((8, 64), (2,), (2, 64)), (0, 3)),
    "rows of no columns": (
        "index_add", lambda x, i, y: x[:, 32:].index_add(0, i, y[:, 32:]) * 2, ((5, 31), (2,), (2, 31)), (0, 4),
    ),
    "a sum of nothing": ("sum", None, ((0, 64), (0, 64)), None),
}  # fmt: skip


@pytest.mark.parametrize("what", EMPTY)
def test_a_run_in_which_nothing_is_indexed_says_nothing(what: str) -> None:
    """The CPU looks at no index into a tensor without elements: it takes any number there, and none of them is valid."""
    name, search, shapes, expected = EMPTY[what]
    own, _, makers = RIGHT[name]
    examples = [make() for make in makers]
    if search is not None:
        examples[0] = _empty(16, 64)
    with register_replacement(search or own, search or own, examples) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        pattern = pattern_of(prepared.rule)
        setting = Setting(shapes, tuple(argument.dtype for argument in pattern.arguments))
        ranges = integer_ranges(pattern, setting)
        assert is_indexable(pattern, setting) is (expected is not False)
    assert [(found.least, found.most) for found in ranges.values()] == {
        False: [(NONE.least, NONE.most)], None: [],
    }.get(expected, [expected])  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_a_replacement_that_looks_at_an_index_into_nothing_is_right() -> None:
    """`scatter_add` refuses an index into no rows that `index_add` takes; sizes of zero are tried in the other dimension."""

    def search(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, i, y) * 2

    def replace(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.scatter_add(0, i[:, None].expand(-1, y.shape[1]), y) * 2

    examples = [_empty(8, 4, dtype=torch.float32), _index(3), _empty(3, 4, dtype=torch.float32)]
    with register_replacement(search, replace, examples) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        pattern = pattern_of(prepared.rule)
        own = example_setting(pattern)
        shapes = {entry.setting.shapes for entry in deciding(prepared, pattern, [own])}
    assert {((8, 0), (3,), (3, 0)), ((8, 4), (0,), (0, 4))} <= shapes
    assert ((0, 4), (3,), (3, 4)) not in shapes
    result = validate_replacement(search, replace, examples, max_examples=1, dtypes=[torch.float32])
    assert result.verdict == "proven on 1", str(result)


OVERFLOWING: dict[str, tuple[Function, Function, Function]] = {
    "the largest double": (
        lambda x, y: (x + x).argmax(-1) + y[:, 0], lambda x, y: (x + x).neg().argmin(-1) + y[:, 0],
        lambda x, y: (x * 2).argmax(-1) + y[:, 0],
    ),
    "the magnitude of a sum": (
        lambda x, y: (x + y).abs() * 3, lambda x, y: (x + y).abs().clamp(min=0) * 3,
        lambda x, y: torch.maximum(x + y, -(x + y)) * 3,
    ),
    "the negative of a double": (
        lambda x, y: torch.maximum(-(x * 2), y), lambda x, y: torch.maximum(torch.minimum(x * 2, 0 * x).abs(), y),
        lambda x, y: torch.maximum(x * -2, y),
    ),
    "the sign of a product": (
        lambda x, y: (x * y).sign() * 2, lambda x, y: (-(x * y)).sign() * -2, lambda x, y: (y * x * 1).sign() * 2,
    ),
    "the sign of a square": (
        lambda x, y: (x * x * 2).sign() + y, lambda x, y: y - (-(x * x * 2)).sign(),
        lambda x, y: (x.abs() * x.abs() * 2).sign() + y,
    ),
    "a shift": (
        lambda x, y: (x << 2).abs() + y, lambda x, y: (x << 2).abs().clamp(min=0) + y,
        lambda x, y: (x * 4).abs() + y,
    ),
    "the midpoint": (
        lambda x, y: torch.div(x + y, 2, rounding_mode="floor"), lambda x, y: x + torch.div(y - x, 2, rounding_mode="floor"),
        lambda x, y: (y + x) >> 1,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("what", OVERFLOWING)
def test_what_is_wrong_only_where_a_result_in_between_overflows_is_seen(what: str, dtype: torch.dtype) -> None:
    """Where a sum, a double or a product is the smallest number, it is its own negative; the right twin stays right."""
    search, wrong, right = OVERFLOWING[what]
    examples = [_empty(4, 16, dtype=dtype)] * 2
    for replace, fate in ((wrong, "wrong"), (right, "right")):
        with register_replacement(search, replace, examples) as registration:
            (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
            pattern = pattern_of(prepared.rule)
            own = example_setting(pattern)
            turns = [turn for turn in turns_of(pattern, [own]) if not turn.layouts]
            trials = run_alone(Bench(prepared, pattern, {}), turns).trials
        fates = {trial.fate for trial in trials.made}
        assert fate in fates <= {"right", fate}, [trial.outcome for trial in trials.made]


def test_an_index_of_an_npu_operator_counts_from_the_start() -> None:
    """Its formula takes negative ones, as torch's own indexing does; what the device does with them nobody has said."""

    def search(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.npu.npu_scatter_nd_update.default(x, i, y) * 2

    examples = [_x(), _index(2, 1), _empty(2, 64)]
    with register_replacement(search, lambda x, i, y: search(x, i, y) * 1, examples) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        pattern = pattern_of(prepared.rule)
        assert integer_ranges(pattern, example_setting(pattern)) == {"i": (0, 7, True, None)}


def test_where_trying_finds_nothing_the_examples_say_the_range() -> None:
    """The pattern takes neither zeros nor ones: the values of the example bound it; a fake example has none."""

    def search(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.index_select(torch.index_select(x, 0, i - 4), 0, i - 4)

    example = torch.tensor([4, 5, 6], device="npu")
    with register_replacement(search, lambda x, i: search(x, i) * 1, [_empty(3, 8), example]) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        pattern = pattern_of(prepared.rule)
        assert integer_ranges(pattern, example_setting(pattern)) == {"i": (4, 6, False, None)}


@pytest.mark.parametrize(
    "value",
    [
        torch.device("npu", 0), torch.device("cpu"), torch.bfloat16, torch.strided, torch.channels_last, float("inf"),
        float("-inf"), -0.0, 1e-7, complex(0, float("inf")), True, None, "floor", (0, (1, None), torch.device("npu")),
    ],
    ids=str,
)  # fmt: skip
def test_every_argument_of_an_operator_can_be_printed(value: Any) -> None:
    """The text of a program knows torch alone."""
    as_lists: Callable[[Any], Any] = lambda x: list(map(as_lists, x)) if isinstance(x, tuple) else x  # noqa: E731
    got = function_of(f"def program():\n    return {literal(value)}\n")()
    assert got == as_lists(value)
    assert repr(got) == repr(as_lists(value))
    assert literal((Ref("x0"), None, (Ref("v1"),))) == "[x0, None, [v1]]"
    assert literal(float("nan")) == "float('nan')"


def test_a_program_that_eager_mode_refuses_in_a_later_call_says_nothing() -> None:
    """The index fits the first call and not the second; what raises is the program itself, on the device and without one."""
    source = "def program(x0, x1):\n    return torch.ops.aten.index_select.default(x0, 0, x1)\n"
    inputs = (Input(("s0",)), Input((64,), "int64", below=8))
    for route in ("graph", "fx"):
        outcome = check(Case(source, inputs, ({"s0": 8}, {"s0": 2}), route=route, dynamic=True))
        assert not outcome.runnable, outcome.failures
        assert outcome.failures[0].startswith("in eager mode it raised IndexError")


@pytest.mark.slow
def test_programs_around_a_mask_are_legal(caplog: pytest.LogCaptureFixture) -> None:
    """Torch subtracts no masks, and would write its traceback into the output of a validation."""
    with _registered("a mask of two") as pattern, caplog.at_level(logging.ERROR):
        make = planted_programs(pattern=pattern)
        for seed in range(30):
            program = sample(make, seed)
            tracing.trace(
                program.function(), program.inputs, program.sizes[0], dynamic=program.dynamic, functional=False
            )
    assert not caplog.records


def test_an_infinity_in_a_pattern_is_no_number_to_be_near_to() -> None:
    """Inputs of a validation are finite, but for those of which it says otherwise."""
    with _registered("masked_fill") as pattern:
        program = near_numbers(sample(planted_programs(pattern=pattern), 0), [pattern.rule])
    assert {number for x in program.inputs for number in x.around} <= {0.0}


@pytest.mark.slow
def test_an_example_with_values_is_not_computed_with() -> None:
    """A divisor of zeros is no fault of the rule: examples have sizes and dtypes only."""
    search, replace, _ = RIGHT["division"]
    zeros = torch.zeros(2, 64, dtype=torch.int32, device="npu")
    result = validate_replacement(search, replace, [zeros, zeros], max_examples=2)
    assert result.verdict == "proven on 2", str(result)


def test_what_nobody_foresaw_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule that breaks the validation leaves the others their verdicts."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("integer division\nby zero")

    monkeypatch.setattr(validate, "survey", broken)
    search, replace, examples = RIGHT["sum"]
    result = validate_replacement(search, replace, [make() for make in examples], max_examples=1)
    assert result.verdict == "not-judged"
    assert "broke off with ZeroDivisionError: integer division." in result.findings[0].text
    assert not result.ok


def test_indices_of_writes_differ() -> None:
    """Of two writes to one place nobody knows which is last; what adds takes the same index twice."""
    for shape, size in (((5,), 8), ((3, 2), 8), ((4, 4), 5)):
        spec = Input(shape, "int64", below=size, least=-size, distinct=True)
        places = spec.values({}, 0) % size
        assert all(
            len(row.unique()) == len(row)
            for rows in (places, places.movedim(0, -1))
            for row in rows.view(-1, rows.shape[-1])
        )
    for what, distinct in (("index_copy", True), ("index_put", True), ("scatter", True), ("index_add", False)):
        with _registered(what) as pattern:
            setting = example_setting(pattern)
            assert integer_ranges(pattern, setting)["i"].distinct is distinct
            more = Setting((setting.shapes[0], (9,), (9, 64)), setting.dtypes)
            assert what == "scatter" or clashes(pattern, more) is distinct
            assert what == "scatter" or runs(pattern, more) is not distinct


@pytest.mark.slow
def test_what_could_not_be_captured_before_is_judged_all_the_same() -> None:
    """The host reads the classes of `one_hot`; the replacement is right."""

    def search(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.one_hot.default(i, 64).to(x.dtype) * x

    def replace(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * torch.ops.aten.one_hot.default(i, 64).to(x.dtype)

    with register_replacement(search, replace, [_index(8), _x()]) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        pattern = pattern_of(prepared.rule)
        trials = run_trials(pattern, [example_setting(pattern)], examples=2, seed="0", options={})
    assert [trial.fate for trial in trials.made] == ["right", "right"], [trial.outcome for trial in trials.made]


def _masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(mask, -math.inf).softmax(-1)


def _filled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(mask, -10000.0).softmax(-1)


def _attended(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _masked(x, mask) @ x.mT


def _attended_by_numbers(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _masked(x, mask).nan_to_num() @ x.mT


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("rule", [(_masked, _filled), (_attended, _attended_by_numbers)], ids=["softmax", "attention"])
@pytest.mark.parametrize("examples", [1, 5])
def test_a_mask_may_cover_a_whole_row(rule: tuple[Any, Any], examples: int) -> None:
    """The softmax of minus infinities is NaN, and the replacement's is not: an infinity that is written down is no overflow."""
    wide = ShapeRange("x", dim=-1, at_least=64)  # no row is masked by chance
    result = validate_replacement(*rule, [_x(), _mask()], extra_check=wide, max_examples=examples)
    assert result.verdict == "refuted", str(result)
    assert "the reference nan" in result.findings[0].text
