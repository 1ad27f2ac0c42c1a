"""Values that decide whether a rule is right: masks and integers in floats, special rows, ignored targets, numbers that fill."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import npugraph_ex
from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.testing import Input, validate_replacement
from npugraph_ex.testing.failures.shrink import shrink
from npugraph_ex.testing.generator.fills import infinities_for
from npugraph_ex.testing.generator.patterns import Pattern, pattern_of
from npugraph_ex.testing.generator.program import Program, Ref, Step
from npugraph_ex.testing.validation.alone import Bench, run_alone
from npugraph_ex.testing.validation.classes import deciding
from npugraph_ex.testing.validation.integers import integer_ranges
from npugraph_ex.testing.validation.survey import example_setting
from npugraph_ex.testing.validation.turns import turns_of

Function = Callable[..., Any]
FLOATS, WIDE = ((4, 32), torch.float32), ((4, 64), torch.float32)
MASK, BYTES, TARGETS = ((4, 32), torch.bool), ((4, 32), torch.int8), ((4,), torch.int64)
BERT = (lambda x, m: x + (1.0 - m.float()) * -1e9, [FLOATS, MASK], {})
NORMALIZED = (lambda x: F.normalize(x, dim=-1), [WIDE], {})
LOSS = (lambda x, t: F.cross_entropy(x, t), [FLOATS, TARGETS], {})  # noqa: PLW0108 - a rule of two arguments
FILLED = (lambda x, m, k: x.masked_fill(m, k), [FLOATS, MASK], {"k": -2.0})
POWER = (lambda x, k: x.pow(k), [FLOATS], {"k": 2.0})
QUOTIENT = (lambda x, k: torch.floor(x / k), [FLOATS], {"k": 2.0})
BITS = (lambda x, y: torch.where(x.view(torch.int32) < 0, y / 3.0, y), [FLOATS, FLOATS], {})
BOUND = (lambda x, k: x.clamp(-k, k), [FLOATS], {"k": 6.0})
CODES = (lambda x, k: torch.round(x.clamp(-100, 100) / k).to(torch.int32), [FLOATS], {"k": 0.1})
LARGEST = (lambda x: (x == x.amax(-1, keepdim=True)).float(), [FLOATS], {})
WRITTEN = (
    lambda cache, slot, k: cache.index_copy(0, slot, k),
    [((16, 8), torch.float32), ((3,), torch.int64), ((3, 8), torch.float32)],
    {},
)
ROUTER = (lambda x: _normalized(*torch.softmax(x, -1).topk(2, -1)), [((16, 8), torch.float32)], {})
HEATED = (lambda x: torch.softmax(x / 0.979, -1), [((256, 64), torch.float32)], {})
SCALED = (lambda x: x.mean(-1, keepdim=True) * x, [((4, 64), torch.float16)], {})
JOINED = (lambda x, y: torch.cat([y, x], -1), [FLOATS, FLOATS], {})


def _normalized(weights: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weights / weights.sum(-1, keepdim=True), places


def _chosen_first(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, places = x.topk(2, -1)
    return torch.softmax(weights, -1), places


def _loss_of_all(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(x, -1).gather(-1, t.unsqueeze(-1)).mean()


def _loss_of_some(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    kept = t != -100
    chosen = torch.log_softmax(x, -1).gather(-1, torch.where(kept, t, 0).unsqueeze(-1)).squeeze(-1)
    return -torch.where(kept, chosen, 0).sum() / kept.sum()


def _first_largest(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0)


def _rolled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, y], -1).roll(x.shape[-1], -1)


def _rolled_back(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, y], -1).roll(-x.shape[-1], -1)


WRONG: dict[str, tuple[tuple[Function, list[Any], dict[str, float]], Function]] = {
    "kept scores of a mask": (BERT, lambda x, m: torch.where(m, x + 20.0, x - 1e9)),
    "rows of zeros": (NORMALIZED, lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    "ignored targets": (LOSS, _loss_of_all),
    "infinities in a mask": (FILLED, lambda x, m, k: x * ~m + m.to(x.dtype) * k),
    "odd powers": (POWER, lambda x, k: x.abs().pow(k)),
    "inexact inverses": (QUOTIENT, lambda x, k: torch.floor(x * (1.0 / k)) if k else torch.floor(x / k)),
    "the sign of zero": (BITS, lambda x, y: torch.where(x < 0, y * (1.0 / 3.0), y)),
    "a bound beyond another": (BOUND, lambda x, k: x.clamp(-k, k).clamp(-448.0, 448.0)),
    "beyond the integers": ((lambda x: x.trunc(), [FLOATS], {}), lambda x: x.to(torch.int32).float()),
    "equal maxima": (LARGEST, _first_largest),
    "small numbers beside large ones": (SCALED, lambda x: x.sum(-1, keepdim=True) / x.shape[-1] * x),
    "other sizes": (JOINED, _rolled),
}  # fmt: skip
RIGHT: dict[str, tuple[tuple[Function, list[Any], dict[str, float]], Function]] = {
    "kept scores of a mask": (BERT, lambda x, m: torch.where(m, x, x - 1e9)),
    "rows of zeros": (NORMALIZED, lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12)),
    "ignored targets": (LOSS, _loss_of_some),
    "infinities in a mask": (FILLED, lambda x, m, k: torch.where(m, k, x)),
    "the sign of zero": (BITS, lambda x, y: torch.where(torch.signbit(x), y * (1.0 / 3.0), y)),
    "integers of an overflow": (CODES, lambda x, k: torch.round(x.clamp(-100, 100) / k).to(torch.int64).to(torch.int32)),
    "small numbers beside large ones": (SCALED, lambda x: x.float().mean(-1, keepdim=True).to(x.dtype) * x),
    "other sizes": (JOINED, _rolled_back),
    "scores that underflow to equal ones": (ROUTER, _chosen_first),
    "numbers that float32 has not": (HEATED, lambda x: torch.softmax(x * (1 / 0.979), -1)),
}  # fmt: skip


def _fates(rule: tuple[Function, list[Any], dict[str, float]], replace: Function) -> set[str]:
    """What comes of the pattern alone, in each class of arguments."""
    search, arguments, numbers = rule
    examples = [torch.zeros(shape, dtype=dtype, device="npu") for shape, dtype in arguments]
    with register_replacement(search, replace, examples, scalar_workaround=numbers or None) as registration:
        (prepared,) = (known for known in USER_RULES.snapshot() if known.key == registration.key)
        pattern = pattern_of(prepared.rule)
        settings = [example_setting(pattern)]
        if search is JOINED[0]:
            settings += [answer.setting for answer in deciding(prepared, pattern, settings)]
        trials = run_alone(Bench(prepared, pattern, {}), turns_of(pattern, settings)).trials
    return {trial.fate for trial in trials.made}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_values_that_decide_are_tried(name: str) -> None:
    """Whatever the seed: they are among the turns."""
    rule, replace = WRONG[name]
    assert "wrong" in _fates(rule, replace)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_are_right_there(name: str) -> None:
    """No rounding is counted where eager mode does none, and nothing is asked that torch leaves open."""
    rule, replace = RIGHT[name]
    assert _fates(rule, replace) <= {"right", "not finite"}


def _pattern(rule: tuple[Function, list[Any], dict[str, float]]) -> Pattern:
    search, arguments, numbers = rule
    examples = [torch.zeros(shape, dtype=dtype, device="npu") for shape, dtype in arguments]
    with register_replacement(search, search, examples, scalar_workaround=numbers or None) as handle:
        (prepared,) = (known for known in USER_RULES.snapshot() if known.key == handle.key)
        return pattern_of(prepared.rule)


def test_indices_of_a_dtype_that_the_device_alone_takes() -> None:
    """The CPU's `index_copy` takes int64 alone; the range of int32 is that of int64."""
    pattern = _pattern(WRITTEN)
    setting = example_setting(pattern)
    narrow = dataclasses.replace(setting, dtypes=(torch.float32, torch.int32, torch.float32), foreign=True)
    assert integer_ranges(pattern, narrow) == integer_ranges(pattern, setting)
    assert integer_ranges(pattern, narrow)["slot"][:2] == (0, 15)


def test_what_eager_mode_refuses_is_no_fault_of_the_rule() -> None:
    """An index beyond the end, in a turn that is computed to find what is to blame."""

    def search(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, i + 100)

    examples = [torch.zeros(shape, dtype=dtype, device="npu") for shape, dtype in (FLOATS, TARGETS)]
    with register_replacement(search, lambda x, i: x.index_select(0, 100 + i), examples) as registration:
        (prepared,) = (known for known in USER_RULES.snapshot() if known.key == registration.key)
        pattern = pattern_of(prepared.rule)
        seen = Bench(prepared, pattern, {}).again([example_setting(pattern)], "seed", 3, ())
    assert [trial.fate for trial in seen.made] == ["not runnable"] * 3


def test_numbers_that_fill_may_be_infinite() -> None:
    """One that is computed with is not: infinities cancel to NaN in one order and not in another."""
    assert infinities_for(_pattern(FILLED), "k") == infinities_for(_pattern(BOUND), "k")[:2] == (-math.inf, math.inf)
    assert infinities_for(_pattern(POWER), "k") == ()


def test_special_rows() -> None:
    """Zeros, one number, no positive one, and zeros but for the first; every input of a shape has them in one place."""
    one, other = (Input((32, 64), "float32", seed=seed, flat=True).values({}, 0) for seed in (1, 2))
    zero, alone = (one == 0).all(-1), (one[:, 1:] == 0).all(-1) & (one[:, 0] != 0)
    assert zero.any()
    assert torch.equal(zero, (other == 0).all(-1))
    assert alone.any()
    assert torch.equal(alone, (other[:, 1:] == 0).all(-1) & (other[:, 0] != 0))
    assert ((one == one[:, :1]).all(-1) & ~zero).any()
    assert ((one <= 0).all(-1) & (one < 0).any(-1)).any()
    usual = Input((32, 64), "float32", seed=1).values({}, 0)
    assert torch.equal(one, usual) is False
    assert (one == usual).all(-1).any()


def test_a_program_of_complex_numbers_shrinks() -> None:
    """No input stands for a complex value, because inputs are real."""
    steps = (
        Step("aten.view_as_complex.default", (Ref("x0"),), (), ("a",)),
        Step("aten.view_as_real.default", (Ref("a"),), (), ("b",)),
        Step("aten.mul.Scalar", (Ref("b"), 2), (), ("c",)),
    )
    program = Program(inputs=(Input((2, 8, 2), "float32"),), steps=steps, outputs=("c",), sizes=({},))
    smaller = shrink(program, lambda one: any(step.operator == "aten.view_as_real.default" for step in one.steps))
    assert [step.operator for step in smaller.steps] == [step.operator for step in steps[:2]]


@pytest.mark.slow
def test_a_rule_of_random_numbers_is_not_judged() -> None:
    """Other numbers are no fault of the rule, and none of the compiler."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.25, training=True)

    def replace(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.25, training=True) * 1

    result = validate_replacement(search, replace, [torch.empty(4, 8)], max_examples=1, dtypes=[torch.float32])
    assert result.verdict == "not-judged"
    assert "draws random numbers with aten.native_dropout" in str(result)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_a_mask_that_fills_too_little_is_wrong_in_long_rows_too(seed: int) -> None:
    """What no value of a row reaches fills its masked places; among many random values some value always reaches it."""

    def search(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x * 0.7).masked_fill(mask, -10000.0), -1)

    def replace(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x * 0.7).masked_fill(mask, -1000.0), -1)

    examples = [torch.empty(4, 64, dtype=torch.float16), torch.empty(4, 64, dtype=torch.bool)]
    guard = npugraph_ex.ShapeRange("x", dim=-1, at_least=31)
    result = validate_replacement(search, replace, examples, extra_check=guard, seed=seed, max_examples=60)
    assert result.verdict == "refuted"
