"""The oracle passes no kernel that is a little wrong, and fails none that is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npugraph_ex import testing
from npugraph_ex.operators import OPERATORS
from npugraph_ex.testing import Case, Input, judge_floating
from npugraph_ex.testing.generator.inputs import make_inputs
from npugraph_ex.testing.oracle import host, verdict
from npugraph_ex.testing.oracle.judge import Judgement
from npugraph_ex.testing.oracle.reference64 import run_reference
from npugraph_ex.testing.oracle.spread import FEW_RUNS, MANY_RUNS, run_spread
from npugraph_ex.testing.oracle.tracing import trace
from npugraph_ex_conformance.examples import FAMILIES

SMALL = (Input((16, 64), scale=0.001, seed=1), Input((16, 64), scale=0.001, seed=2), Input((64,), seed=3))
DYNAMIC = Case(
    "def program(x0, x1, x2):\n"
    "    y, _, total = torch.ops.npu.npu_add_rms_norm.default(x0, x1, x2)\n"
    "    q, scale = torch.ops.npu.npu_dynamic_quant.default(y)\n"
    "    return (q, scale, total)\n",
    SMALL, route="fx", expected=1,
)  # fmt: skip
STATIC = Case(
    "def program(x0, x1, x2, x3, x4):\n"
    "    scales = torch.ops.aten.add.Tensor(torch.ops.aten.abs.default(x3), 0.02)\n"
    "    zero_points = torch.ops.aten.bitwise_and.Scalar(x4, 7)\n"
    "    y, _, total = torch.ops.npu.npu_add_rms_norm.default(x0, x1, x2)\n"
    "    q = torch.ops.npu.npu_quantize.default(y, scales, zero_points, torch.int8, -1, True)\n"
    "    return (q, total)\n",
    (*SMALL, Input((64,), "float32", scale=0.02, seed=4), Input((64,), "int32", seed=5)), route="fx", expected=1,
)  # fmt: skip
UNLUCKY = Case(
    "def program(x0, x1, x2, x3, x4, x5):\n"
    "    v0 = torch.ops.aten.mean.dim(x0, [-1])\n"
    "    v1 = torch.ops.aten.slice.Tensor(v0, -1, 0, 128)\n"
    "    v2 = torch.ops.aten._to_copy.default(x2, dtype=torch.bfloat16)\n"
    "    v3 = torch.ops.aten.slice.Tensor(v2, -1, 3, 131)\n"
    "    v4 = torch.ops.aten.maximum.default(v3, v3)\n"
    "    v5 = torch.ops.aten.silu.default(x5)\n"
    "    v6 = torch.ops.aten.slice.Tensor(v5, -1, 8, 136)\n"
    "    v7 = torch.ops.aten.clone.default(v1, memory_format=torch.contiguous_format)\n"
    "    v8 = torch.ops.aten.clone.default(x1, memory_format=torch.contiguous_format)\n"
    "    v9 = torch.ops.aten.clone.default(v4, memory_format=torch.contiguous_format)\n"
    "    v10 = torch.ops.aten.clone.default(v6, memory_format=torch.contiguous_format)\n"
    "    y, _, total = torch.ops.npu.npu_add_rms_norm.default(v7, v8, v9)\n"
    "    biased = torch.ops.aten.add.Tensor(y, x3)\n"
    "    q = torch.ops.npu.npu_quantize.default(biased, x4, v10, 1, axis=-1)\n"
    "    v11 = torch.ops.aten.silu.default(total)\n"
    "    return (q, total)\n",
    (
        Input(("s0", "s1", 136, 4), "bfloat16", scale=30.0, seed=730), Input(("s0", "s1", 128), "bfloat16", "strided", seed=478),
        Input((136,), "float32", "strided", seed=901), Input((128,), "bfloat16", seed=153),
        Input((128,), "bfloat16", scale=0.001, seed=27), Input((136,), "bfloat16", scale=30.0, seed=254),
    ),
    sizes=({"s0": 2, "s1": 5}, {"s0": 3, "s1": 5}, {"s0": 2, "s1": 5}, {"s0": 2, "s1": 5}),
    options={"fusion_rules": {"add_rms_norm_bias_quant": True}}, route="fx", expected=1,
)  # fmt: skip
FUSED = {"npu::npu_add_rms_norm_dynamic_quant": DYNAMIC, "npu::npu_add_rms_norm_quant": STATIC}
ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "truncates": lambda value: value.trunc(),
    "rounds up": lambda value: value.ceil(),
    "rounds twice": lambda value: value.to(torch.bfloat16).double().round(),
    "saturates one early": lambda value: value.round().clamp(-127, 126),
    "adds one to the zero point": lambda value: value.round() + 1,
}


def _check(case: Case, fused: str, kernel: Callable[..., Any], patch: pytest.MonkeyPatch) -> list[str]:
    right = host.callable_of

    def found(target: Any) -> Any:
        is_it = isinstance(target, torch._ops.OpOverload) and target._schema.name == fused
        return kernel if is_it else right(target)

    patch.setattr(host, "callable_of", found)
    return testing.check(case).failures


@pytest.mark.parametrize("fused", FUSED)
def test_the_right_kernel_passes(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference itself, by the way that the wrong ones go."""
    assert _check(FUSED[fused], fused, OPERATORS[fused].formula, monkeypatch) == []


@pytest.mark.parametrize("wrong", ROUNDINGS)
@pytest.mark.parametrize("fused", FUSED)
def test_a_kernel_that_rounds_wrongly_fails(fused: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value before rounding is right, and the integers made of them are not."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        exact = OPERATORS[fused].before_rounding(*args, **kwargs)
        quotient = exact[0].double()
        return (
            ROUNDINGS[wrong](quotient).clamp(-128, 127).to(torch.int8),
            *OPERATORS[fused].formula(*args, **kwargs)[1:],
        )

    assert _check(FUSED[fused], fused, kernel, monkeypatch)


@pytest.mark.parametrize("fused", FUSED)
def test_a_kernel_without_epsilon_fails(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a thousandth make epsilon matter."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return OPERATORS[fused].formula(*args, **{**kwargs, "epsilon": 0.0})

    assert _check(FUSED[fused], fused, kernel, monkeypatch)


@pytest.mark.parametrize("fused", FUSED)
def test_a_kernel_that_rounds_the_sum_to_bfloat16_fails(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual sum has float16's eleven bits, not eight."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = list(OPERATORS[fused].formula(*args, **kwargs))
        results[2] = results[2].to(torch.bfloat16).to(torch.float16)
        return tuple(results)

    assert _check(FUSED[fused], fused, kernel, monkeypatch)


@pytest.mark.slow
def test_an_element_that_few_runs_with_noise_fail_by_luck_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 1,920 elements of a right program: four runs moved it by less than half a step, many by more."""
    assert testing.check(UNLUCKY).failures == []
    monkeypatch.setattr(verdict, "MANY_RUNS", FEW_RUNS)
    assert testing.check(UNLUCKY).failures


def _normalised(x: torch.Tensor, epsilon: float, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A norm of the last dimension, in another order of operators than torch's."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (w * (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()) + b


BIASED: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "layer_norm": (
        lambda x, w, b: torch.nn.functional.layer_norm(x, (8,), w, b, 1e-5),
        lambda x, w, b, wrong: _normalised(x, 1.2e-5 if wrong else 1e-5, w, b),
    ),
    "group_norm": (
        lambda x, w, b: torch.nn.functional.group_norm(x, 1, w, b, 1e-5),
        lambda x, w, b, wrong: _normalised(x, 1.2e-5 if wrong else 1e-5, w, b),
    ),
    "addmm": (
        lambda x, w, b: torch.addmm(b, x, w.expand(8, 8)),
        lambda x, w, b, wrong: x.flip(1) @ w.expand(8, 8) + b * (1 + 4e-6 * wrong),
    ),
}


@pytest.mark.parametrize("operator", BIASED)
def test_a_bias_that_cancels_excuses_the_order_of_roundings_and_nothing_else(operator: str) -> None:
    """Of 32,768 elements some are near zero, where each order of float32 operators is beyond the error of another one."""
    pattern, candidate = BIASED[operator]
    specs = [Input(shape, "float32", seed=seed) for seed, shape in enumerate(((4096, 8), (8,), (8,)))]
    inputs = make_inputs(specs, device="cpu")
    graph = trace(pattern, specs, {}, dynamic=False, functional=True)
    reference = run_reference(graph, inputs)
    (spread, *_) = run_spread(graph, inputs, reference, runs=MANY_RUNS).values
    right, wrong = (
        judge_floating(candidate(*inputs, wrong), reference.values[0], eager=pattern(*inputs), spread=spread)
        for wrong in (False, True)
    )
    assert right.ok, right.message
    assert wrong.wrong > 1000


def _mean_of_shares(x: torch.Tensor) -> torch.Tensor:
    """A mean whose terms are divided one by one, so that whole numbers are rounded before they cancel."""
    return (x * (1 / 7)).sum(-1)


def _variance(x: torch.Tensor) -> torch.Tensor:
    return _mean_of_shares((x - _mean_of_shares(x)[:, None]).square()) * (7 / 6)


SUMMED: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "sum": (lambda x: x.sum(-1), lambda x: _mean_of_shares(x) * 7),
    "sum of all": (lambda x: x.sum(), lambda x: (_mean_of_shares(x) * 7).sum()),
    "mean": (lambda x: x.mean(-1), _mean_of_shares),
    "mean of all": (lambda x: x.mean(), lambda x: _mean_of_shares(x).mean()),
    "cumsum": (
        lambda x: x.cumsum(-1),
        lambda x: torch.stack([(x[:, : i + 1] * (1 / 7)).sum(-1) * 7 for i in range(7)], -1),
    ),
    "var": (lambda x: x.var(-1), _variance),
    "std": (lambda x: x.std(-1), lambda x: _variance(x).sqrt()),
    "mean of var_mean": (lambda x: torch.var_mean(x, -1)[1], _mean_of_shares),
    "mean of std_mean": (lambda x: torch.std_mean(x, -1)[1], _mean_of_shares),
    "convolution": (
        lambda x: torch.nn.functional.conv1d(x[:, None], x[1:2, None]),
        lambda x: (_mean_of_shares(x * x[1]) * 7)[:, None, None],
    ),
}


@pytest.mark.parametrize("operator", SUMMED)
def test_whole_numbers_that_cancel_may_be_summed_in_another_order(operator: str) -> None:
    """Eager mode computes some sums exactly, so that no rounding of its results tells what another order may do."""
    pattern, candidate = SUMMED[operator]
    numbers = torch.randint(-3, 4, (512, 7), generator=torch.Generator().manual_seed(0)).float()
    numbers[::8] = numbers[::8, :1]
    numbers[-1] -= numbers.sum(0)
    right = _judged(pattern, candidate, numbers)
    assert right.ok, right.message
    assert not _judged(pattern, lambda x: candidate(x) + pattern(x.abs()) * 1e-5, numbers).ok


def _batches(x: torch.Tensor) -> torch.Tensor:
    """The product of each row and the first one, as a sum over 64 products of matrices."""
    batches = x.view(64, 64, 64).transpose(0, 1)
    return torch.bmm(batches, batches[:, :1].transpose(1, 2)).sum(0)[:, 0]


LONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": (lambda x: x.sum(-1), lambda x: x),
    "sum of sums": (lambda x: x.view(64, 64, 64).sum(-1).view(-1, 64).sum(-1), lambda x: x),
    "mean": (lambda x: x.mean(-1), lambda x: x / x.shape[1]),
    "cumsum": (lambda x: x.cumsum(-1)[:, -1], lambda x: x),
    "product": (lambda x: x @ x[0], lambda x: x * x[0]),
    "product and sum": (lambda x: torch.addmm(x[:, -1:], x[:, :-1], x[:1, :-1].t())[:, 0], lambda x: x * x[0]),
    "sum of products": (_batches, lambda x: x * x[0]),
}
"""Sums of 4,096 terms, and the terms."""


@pytest.mark.slow
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("operator", LONG)
def test_many_terms_may_be_added_one_after_another(operator: str, positive: bool) -> None:
    """Eager mode adds them in blocks, and errs less; a fused operator may not."""
    pattern, terms_of = LONG[operator]
    numbers = torch.randn((64, 4096), generator=torch.Generator().manual_seed(0))
    if positive:
        numbers = numbers.abs()
    if operator == "product and sum":
        numbers[0, -1] = 1

    def in_a_row(x: torch.Tensor, terms: int = 4096) -> torch.Tensor:
        total = torch.zeros(64)
        for term in terms_of(x).unbind(1)[:terms]:
            total = total + term
        return total

    right = _judged(pattern, in_a_row, numbers)
    assert right.ok, right.message
    assert _judged(pattern, lambda x: in_a_row(x, 4095), numbers).wrong > 50


STEPPED: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "rounding": (lambda x: torch.round(x * 2), lambda x: torch.floor(x * 2 + 0.5)),
    "comparison": (lambda x: torch.where(x - 1 > 0, x, 0.5), lambda x: torch.where(x - 1 >= 0, x, 0.5)),
    "of a view": (lambda x: torch.round((x * 2).t()), lambda x: torch.floor((x * 2).t() + 0.5)),
}


@pytest.mark.parametrize("what", STEPPED)
def test_where_nothing_is_rounded_no_rounding_error_excuses_a_jump(what: str) -> None:
    """A tie that eager mode computes exactly is no matter of luck."""
    pattern, candidate = STEPPED[what]
    assert not _judged(pattern, candidate, torch.arange(-8, 8).view(4, 4) / 4).ok


@pytest.mark.parametrize("written", [False, True])
def test_where_something_is_rounded_a_rounding_error_excuses_a_jump(written: bool) -> None:
    """Five tenths lie beside a tie by the rounding of a tenth alone; so they do where they are written over an exact value."""

    def pattern(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        flat = y.view(-1)
        tenths = y.mul_(0.1) if written else y * 0.1
        return torch.round((flat.view(4, 4) if written else tenths) * 1)

    found = _judged(pattern, lambda x: torch.floor(x * 0.1 + 0.5), torch.arange(1, 17).view(4, 4).float())
    assert found.ok, found.message


def _judged(pattern: Callable[..., torch.Tensor], candidate: Callable[..., torch.Tensor], x: torch.Tensor) -> Judgement:
    """The judgement on a candidate whose only argument has these values."""
    graph = trace(pattern, [Input(tuple(x.shape), "float32")], {}, dynamic=False, functional=False)
    reference = run_reference(graph, [x])
    (spread, *_) = run_spread(graph, [x], reference, runs=MANY_RUNS).values
    return judge_floating(candidate(x), reference.values[0], eager=pattern(x), spread=spread)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["planted", "near-miss muls_add", "near-miss", "exact", "device"])
def test_right_programs_raise_no_alarm(family: str) -> None:
    """Random programs through the library as it is; far more of them in the profiles of the suite."""
    alarms = {seed: message for seed in range(500, 540) if (message := FAMILIES[family](seed))}
    assert alarms == {}
