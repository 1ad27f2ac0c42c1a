"""Dynamic quantisation and products of quantised numbers: each spelling is lifted, each near-miss is left alone with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import quantising
import torch
from fx_helpers import aot_graph, optimise, targets
from quantising import (
    BOUNDED,
    NOT_PRODUCTS,
    NOT_QUANTISED,
    NOT_WEIGHTS,
    PRODUCTS,
    QUANT_SPECS,
    QUANTISED,
    SPECS,
    WEIGHT_SPECS,
    WEIGHTS,
)

from npugraph_ex import last_report
from npugraph_ex.lifting import judging
from npugraph_ex.lifting.forms import dynamic_quant, quant_matmul, weight_quant

HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
_FREE = {"unsqueeze", "squeeze", "view", "reshape", "t"}
"""What starts no kernel."""


def drawn(dtype: torch.dtype = HALF, seed: int = 1) -> torch.Tensor:
    """The input, on the device."""
    return torch.randn(SPECS[0], generator=torch.Generator().manual_seed(seed)).to(dtype).npu()


ALL = {**QUANTISED, **BOUNDED}


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("function", ALL, ids=lambda function: function.__name__)
def test_quantisation_is_lifted(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """One operator, or three where the scale is bounded, is left of each spelling, no farther from the quotient than eager mode."""
    gm = aot_graph(function, drawn(dtype))
    report = optimise(gm, lift="judged")
    wanted = ALL[function]
    if dtype == BF16 and function is quantising.bound_below_all_numbers:  # bfloat16 has smaller numbers
        wanted += " npu_quantize"
    assert [name for name in targets(gm) if name not in _FREE] == wanted.split(), report.table()
    (fusion,) = next(record.fusions for record in report.rules if record.name == "lift_dynamic_quant")
    assert fusion.ulps is not None
    assert fusion.ulps[0] <= max(fusion.ulps[1], 0.51)


@pytest.mark.parametrize("function", NOT_QUANTISED, ids=lambda function: function.__name__)
def test_other_quantisation_is_left_alone(function: Callable[..., Any]) -> None:
    """What computes other numbers stays, with a reason where it resembles the form."""
    gm = aot_graph(function, drawn())
    before = targets(gm)
    report = optimise(gm, lift="judged")
    assert targets(gm) == before, report.table()
    reasons = " / ".join(miss.reason for miss in report.near_misses("lift_dynamic_quant"))
    assert NOT_QUANTISED[function] in reasons
    assert bool(reasons) == bool(NOT_QUANTISED[function]), reasons


def _wrong_quantisers() -> dict[str, tuple[Callable[..., Any], str]]:
    """Builds that give something else, and what the judge says of them."""
    right, aten = dynamic_quant._build, torch.ops.aten

    def shifted(*what: Any) -> Any:
        """Whole numbers in the place of their neighbours in the row."""
        return lambda emit, x: (emit(aten.roll.default, right(*what)(emit, x)[0], [1], [-1]), right(*what)(emit, x)[1])

    def one_off(*what: Any) -> Any:
        return lambda emit, x: (emit(aten.bitwise_xor.Scalar, right(*what)(emit, x)[0], 1), right(*what)(emit, x)[1])

    def doubled(*what: Any) -> Any:
        return lambda emit, x: (right(*what)(emit, x)[0], emit(aten.mul.Tensor, right(*what)(emit, x)[1], 2))

    def of_another(*what: Any) -> Any:
        return lambda emit, x: right(*what)(emit, emit(aten.neg.default, x))

    def unbounded(scale: Any, like: Any) -> Any:
        return right(dynamic_quant.replace(scale, bound=0.0), like)

    return {
        **{wrong.__name__: (wrong, "farther from float64") for wrong in (shifted, one_off, doubled, of_another)},
        "unbounded": (unbounded, "with"),
    }


@pytest.mark.parametrize("name", _wrong_quantisers())
def test_judge_refuses_other_whole_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whole numbers are judged by the quotient that they are rounded from, and the scale by itself."""
    judging.forget()
    wrong, reason = _wrong_quantisers()[name]
    monkeypatch.setattr(dynamic_quant, "_build", wrong)
    report = optimise(aot_graph(quantising.number_added_to_the_scale, drawn()), lift="judged")
    judging.forget()
    assert report.fusions("lift_dynamic_quant") == 0, report.table()
    assert reason in report.near_misses("lift_dynamic_quant")[0].reason


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["float16", "bfloat16"])
def test_judge_refuses_whole_numbers_of_another_scale(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Each is as near as eager mode's by itself, and their product is not."""
    judging.forget()
    right = dynamic_quant._build
    unpaired = lambda scale, like: right(dynamic_quant.replace(scale, paired=False), like)  # noqa: E731
    monkeypatch.setattr(dynamic_quant, "_build", unpaired)
    report = optimise(aot_graph(quantising.rounded_all_along, drawn(dtype)), lift="judged")
    judging.forget()
    assert report.fusions("lift_dynamic_quant") == 0, report.table()
    assert "farther from float64" in report.near_misses("lift_dynamic_quant")[0].reason


@pytest.mark.slow
def test_exact_quantisation() -> None:
    """What is spelled as the operator computes has its bits; a reciprocal, or a scale of 16 bits, has not."""
    lifted = {
        function: optimise(aot_graph(function, drawn()), lift="exact").fusions("lift_dynamic_quant")
        for function in (quantising.in_float32, quantising.by_the_reciprocal, quantising.rounded_all_along)
    }
    assert list(lifted.values()) == [1, 0, 0]


@pytest.mark.slow
def test_quantised_on_the_device() -> None:
    """Lifted and replayed: rows of zeros, of tiny numbers and of NaN are as eager mode has them, others no farther from float64."""
    functions = list(ALL)
    torch.compiler.reset()
    together = lambda x: [function(x) for function in functions]  # noqa: E731
    options = {"lift": "judged", "require_capture": True}
    compiled = torch.compile(together, backend="npugraph_ex", options=options, dynamic=False, fullgraph=True)
    for seed in (1, 2, 3):
        x = drawn(seed=seed)
        x[0, 0], x[0, 1], x[1, 0, 3] = 0.0, 2.0**-24 * x[0, 1].sign(), torch.nan
        with torch.no_grad():
            found, right = compiled(x), together(x.cpu().double())
        for function, one, true in zip(functions, found, right, strict=True):
            whole, wanted = (pair if isinstance(pair, torch.Tensor) else pair[0] for pair in (one, true))
            # A quotient that lies between two whole numbers may be rounded to either.
            assert int((whole.cpu().int() - wanted.int()).abs().max()) <= 1, function
            # 127.5 is the quotient of each row's largest element.
            # A scale of 16 bits divides, as in eager mode.
            most = {quantising.half_the_range: 1 / 32, quantising.rounded_all_along: 1 / 8}.get(function, 1e-2)
            assert (whole.cpu() != wanted).float().mean() < most, function


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("largest", [127, 127.5, 128, 100])
def test_whole_numbers_and_their_scale_are_a_pair(largest: float, dtype: torch.dtype) -> None:
    """Their product is no farther from float64 than eager mode's, whatever the scale's dtype and however small the numbers are."""

    def quantise(x: Any) -> Any:
        scale = x.abs().amax(-1, keepdim=True) / largest
        return torch.round(x / scale).clamp(-128, 127).to(torch.int8), scale

    def product(x: Any) -> Any:
        whole, scale = quantise(x)
        return whole.to(torch.float32) * scale.float()

    weight = (
        (torch.randn(96, quantising.WIDTH, generator=torch.Generator().manual_seed(3)) * 40).round().clamp(-128, 127)
    )

    def layer(x: Any) -> Any:
        whole, scale = quantise(x)
        return whole.float() @ weight.to(x.device).t() * scale

    for function in (product, layer, lambda x: [one.float() for one in quantise(x)]):
        torch.compiler.reset()
        compiled = torch.compile(function, backend="npugraph_ex", options={"lift": "judged"}, dynamic=False)
        for size in (1.0, 1e-4, 1e-5, 3e-6):
            x = (torch.randn(64, quantising.WIDTH, generator=torch.Generator().manual_seed(4)) * size).to(dtype)
            right = function(x.double())
            with torch.inference_mode():
                results = [one(x.npu()) for one in (compiled, function)]
            if isinstance(right, list):
                right, results = x, [whole.cpu().double() * scale.cpu() for whole, scale in results]
            far, far_eager = [(result.cpu().double() - right).square().mean().sqrt() for result in results]
            assert far <= 1.01 * far_eager, (function, size)
        assert last_report().fusions("lift_dynamic_quant") == 1


@pytest.mark.slow
def test_what_the_operators_do_not_take() -> None:
    """In float32 nothing is lifted; with sizes that are symbols all but a bounded scale of more than two dimensions."""
    for function, x, dynamic, reason in (
        (quantising.in_float32, drawn(SINGLE), False, "x is torch.float32"),
        (quantising.in_float32, drawn(), True, ""),
        (quantising.bounded_scale, drawn(), True, "the sizes of x are symbols"),
    ):
        report = optimise(aot_graph(function, x, dynamic=dynamic), lift="judged")
        assert report.fusions("lift_dynamic_quant") == (not reason), report.table()
        assert reason in " ".join(miss.reason for miss in report.near_misses("lift_dynamic_quant"))


def operands(seed: int = 1) -> list[torch.Tensor]:
    """Two int8 matrices, scales and a bias, on the device."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8) for shape in QUANT_SPECS[:2]]
    token, column, bias = (torch.randn(shape, generator=generator) / 64 for shape in QUANT_SPECS[2:])
    return [value.npu() for value in (*whole, token, column, bias.half())]


@pytest.mark.parametrize("function", PRODUCTS, ids=lambda function: function.__name__)
def test_product_is_lifted(function: Callable[..., Any]) -> None:
    """One operator is left of each spelling."""
    gm = aot_graph(function, *operands())
    report = optimise(gm, lift="judged")
    assert [name for name in targets(gm) if name not in {*_FREE, "select"}] == [PRODUCTS[function]], report.table()
    assert report.near_misses("lift_quant_matmul") == (), report.table()


@pytest.mark.parametrize("function", NOT_PRODUCTS, ids=lambda function: function.__name__)
def test_other_product_is_left_alone(function: Callable[..., Any]) -> None:
    """What computes something else, or in a dtype that the operator does not give, stays."""
    gm = aot_graph(function, *operands())
    before = targets(gm)
    report = optimise(gm, lift="judged")
    assert targets(gm) == before, report.table()
    reasons = " / ".join(miss.reason for miss in report.near_misses("lift_quant_matmul"))
    assert NOT_PRODUCTS[function] in reasons
    assert bool(reasons) == bool(NOT_PRODUCTS[function]), reasons


def _scales_swapped(build: Any) -> Any:
    """Each scale of a square product in the place of the other."""
    return lambda emit, token, x, weight, column, *bias: build(emit, column, x, weight, token, *bias)


def _transposed(build: Any) -> Any:
    t = torch.ops.aten.t.default
    return lambda emit, token, x, weight, *rest: build(emit, token, x, emit(t, weight), *rest)


def _bias_forgotten(build: Any) -> Any:
    return lambda emit, token, x, weight, column, *_: build(emit, token, x, weight, column)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [_scales_swapped, _transposed, _bias_forgotten], ids=lambda wrong: wrong.__name__)
def test_judge_refuses_other_products(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    """Operands that fit in each other's place are told apart by values."""
    judging.forget()
    right = quant_matmul._build
    monkeypatch.setattr(quant_matmul, "_build", lambda *what, **how: wrong(right(*what, **how)))
    generator = torch.Generator().manual_seed(1)
    q, w = (torch.randint(-128, 128, (8, 8), generator=generator, dtype=torch.int8).npu() for _ in range(2))
    token, column, bias = (torch.rand(shape, generator=generator).npu() for shape in ((8, 1), (8,), (8,)))
    report = optimise(aot_graph(quantising.in_floating_point, q, w, token, column, bias), lift="judged")
    judging.forget()
    assert report.fusions("lift_quant_matmul") == 0, report.table()
    assert "farther from float64" in report.near_misses("lift_quant_matmul")[0].reason


@pytest.mark.slow
def test_products_on_the_device() -> None:
    """Lifted and replayed, each product is within an ulp, or eager mode's error, of float64."""
    functions = [function for function in PRODUCTS if function is not quantising.one_scale_for_the_weight]
    torch.compiler.reset()
    together = lambda *inputs: [function(*inputs).float() for function in functions]  # noqa: E731
    options = {"lift": "judged", "require_capture": True}
    compiled = torch.compile(together, backend="npugraph_ex", options=options, dynamic=False, fullgraph=True)
    for seed in (1, 2, 3):
        inputs = operands(seed)
        q, w, token, column, bias = (value.cpu().double() for value in inputs)
        with torch.no_grad():
            found = compiled(*inputs)
        for function, one in zip(functions, found, strict=True):
            weight = w.reshape(64, -1) if function is quantising.weight_as_it_lies else w.t()
            with_bias = function not in {quantising.int_mm, quantising.weight_as_it_lies}
            right = ((q @ weight) * token * column + bias * with_bias).view(one.shape)
            assert torch.allclose(one.cpu().double(), right, rtol=2**-11 + 1e-5, atol=2**-20), function


def test_an_inner_dimension_beyond_the_operator_s() -> None:
    """The operator's document ends at 65535; int32 would hold twice as much."""
    q, w = (torch.ones(rows, 65536, dtype=torch.int8).npu() for rows in (2, 3))
    token, column = torch.ones(2, 1).npu(), torch.ones(3).npu()
    report = optimise(aot_graph(quantising.int_mm, q, w, token, column, column), lift="judged")
    assert report.fusions("lift_quant_matmul") == 0, report.table()
    assert "up to 65535" in report.near_misses("lift_quant_matmul")[0].reason


@pytest.mark.slow
def test_large_operands_are_judged_small() -> None:
    """Of operands as large as a model's the judge draws small ones: the sizes in views change with them."""
    x = torch.ones(5, 7, 6000, dtype=HALF).npu()
    report = optimise(aot_graph(quantising.number_added_to_the_scale, x), lift="judged")
    assert report.fusions("lift_dynamic_quant") == 1, report.table()
    q, w = (torch.ones(rows, 128, dtype=torch.int8).npu() for rows in (6, 700))
    token, column = torch.ones(6, 1).npu(), torch.ones(700).npu()

    def product(q: Any, w: Any, token: Any, column: Any) -> Any:
        total = torch._int_mm(q, w.t()).view(2, 3, 700)
        return (total.float() * token.view(2, 3, 1) * column).half()

    report = optimise(aot_graph(product, q, w, token, column), lift="judged")
    assert report.fusions("lift_quant_matmul") == 1, report.table()


def weights(dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    """Activations, an int8 weight, its scales and a bias, on the device."""
    generator = torch.Generator().manual_seed(seed)
    x, scale, bias = (torch.randn(WEIGHT_SPECS[at], generator=generator).to(dtype) for at in (0, 2, 3))
    w = torch.randint(-128, 128, WEIGHT_SPECS[1], generator=generator, dtype=torch.int8)
    return [value.npu() for value in (x, w, scale / 64, bias)]


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("function", WEIGHTS, ids=lambda function: function.__name__)
def test_weight_stays_int8(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """The operator scales the weight; a bias is cast for bfloat16."""
    gm = aot_graph(function, *weights(dtype))
    report = optimise(gm, lift="judged")
    cast = ["_to_copy"] if dtype == BF16 and function is not quantising.weight_scaled_first else []
    assert [name for name in targets(gm) if name not in {*_FREE, "select"}] == [
        *cast,
        "npu_weight_quant_batchmatmul",
    ], report.table()


@pytest.mark.slow
def test_weights_on_the_device() -> None:
    """Lifted and replayed, no product is farther from float64 than eager mode."""
    torch.compiler.reset()
    together = lambda *inputs: [function(*inputs) for function in WEIGHTS]  # noqa: E731
    options = {"lift": "judged", "require_capture": True}
    compiled = torch.compile(together, backend="npugraph_ex", options=options, dynamic=False, fullgraph=True)
    for seed in (1, 2, 3):
        inputs = weights(HALF, seed)
        x, w, scale, bias = (value.cpu().double() for value in inputs)
        with torch.no_grad():
            found, eager, right = compiled(*inputs), together(*inputs), together(x, w.to(torch.int8), scale, bias)
        for function, one, other, true in zip(WEIGHTS, found, eager, right, strict=True):
            far, far_eager = ((each.cpu().double() - true).abs().max() for each in (one, other))
            assert far <= max(far_eager, 2**-11 * true.abs().max()), function


@pytest.mark.parametrize("wrong", ["transposed", "unscaled"])
def test_judge_refuses_other_weights(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A square weight the other way round, and scales of one, are told by values."""
    judging.forget()
    right, aten = weight_quant._build, torch.ops.aten

    def build(*what: Any, **how: Any) -> Any:
        swapped = right(*what, **(how if wrong == "unscaled" else {"transposed": not how["transposed"]}))
        ones = lambda emit, x, w, scale, *bias: swapped(emit, x, w, emit(aten.ones_like.default, scale), *bias)  # noqa: E731
        return ones if wrong == "unscaled" else swapped

    monkeypatch.setattr(weight_quant, "_build", build)
    x, scale = (torch.rand(shape).half().npu() for shape in ((4, 16), (16,)))
    w = torch.randint(-128, 128, (16, 16), dtype=torch.int8).npu()
    report = optimise(aot_graph(quantising.weight_scaled_first, x, w, scale, scale), lift="judged")
    judging.forget()
    assert report.fusions("lift_weight_quant") == 0, report.table()
    assert "farther from float64" in report.near_misses("lift_weight_quant")[0].reason


@pytest.mark.parametrize("function", NOT_WEIGHTS, ids=lambda function: function.__name__)
def test_other_weight_is_left_alone(function: Callable[..., Any]) -> None:
    """What is scaled otherwise is computed as it is spelled, with a reason; of a scaled product the lines are told, too."""
    gm = aot_graph(function, *weights(HALF))
    before = targets(gm)
    report = optimise(gm, lift="judged")
    assert targets(gm) == before, report.table()
    (miss,) = report.near_misses("lift_weight_quant")
    assert NOT_WEIGHTS[function] in miss.reason
    assert ("linear(x, weight.to(x.dtype) * scale.reshape(-1, 1))" in miss.lines) == (
        function is quantising.product_scaled
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [quantising.scaled_before_and_behind, quantising.scaled_before_and_by_a_number],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_a_second_scale_is_told(function: Callable[..., Any]) -> None:
    """The product is lifted, and the report says how the scale behind it could be part of the operator."""
    report = optimise(aot_graph(function, *weights(HALF)), lift="judged")
    assert report.fusions("lift_weight_quant") == 1, report.table()
    (miss,) = report.near_misses("lift_weight_quant")
    assert "the operator takes one scale: multiply the two" in miss.reason
