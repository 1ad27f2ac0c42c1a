"""Dynamic quantisation and products of quantised numbers: each spelling is lifted, each near-miss is left alone with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import quantising
import torch
from fx_helpers import aot_graph, optimise, targets
from quantising import BOUNDED, NOT_QUANTISED, QUANTISED, SPECS

from npugraph_ex.lifting import judging
from npugraph_ex.lifting.forms import dynamic_quant

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


def test_exact_quantisation() -> None:
    """What is spelled as the operator computes has its bits; a reciprocal, or a scale of 16 bits, has not."""
    lifted = {
        function: optimise(aot_graph(function, drawn()), lift="exact").fusions("lift_dynamic_quant")
        for function in (quantising.in_float32, quantising.by_the_reciprocal, quantising.rounded_all_along)
    }
    assert list(lifted.values()) == [1, 0, 0]


def test_quantised_on_the_device() -> None:
    """Lifted and replayed: rows of zeros, of tiny numbers and of NaN are as eager mode has them, others no farther from float64."""
    functions = list(ALL)
    torch._dynamo.reset()
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
            assert (whole.cpu() != wanted).float().mean() < 1e-2, function


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
