"""What `exact` lifts and refuses, and what the judge of values refuses whatever a form says."""

from __future__ import annotations

from typing import Any

import pytest
import routers
import spelled_activations
import spelled_attention
import spelled_norms
import spelled_rotary
import spelled_upcasts
import torch
from fx_helpers import aot_graph, optimise, targets
from random_tensors import tensors
from routers import ROUTER_SPECS
from spelled_activations import ACTIVATION_SPECS
from spelled_attention import SPELLED_SPECS
from spelled_norms import NORM_SPECS
from spelled_rotary import ROTARY_SPECS

from npugraph_ex.lifting import judging

HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["float16", "float32"])
def test_exact_wants_every_bit(dtype: torch.dtype) -> None:
    """The norm's root is nearer to float64 than eager mode's, which rounding to float16 hides in nearly all elements."""
    gm = aot_graph(spelled_norms.llama_norm, *tensors(NORM_SPECS, dtype))
    before = targets(gm)
    report = optimise(gm, lift="exact")
    assert targets(gm) == before, report.table()
    reasons = " / ".join(miss.reason for miss in report.near_misses("lift_rms_norm"))
    assert "elements are not eager mode's" in reasons
    assert ("computed in" in reasons) == (dtype == HALF)


def test_exact_wants_a_known_order_of_sums() -> None:
    """Bits of a few small products may be equal by chance; with other sizes they are not."""
    gm = aot_graph(spelled_attention.attention_with_a_bias, *tensors(SPELLED_SPECS, HALF))
    report = optimise(gm, lift="exact")
    (miss,) = report.near_misses("lift_attention")
    assert "sums over rows have no documented order" in miss.reason


def test_a_product_that_is_cast_back_is_refused_once() -> None:
    """In float32 the operator has other bits; that the product by itself has another dtype than its halves is no reason."""
    report = optimise(aot_graph(spelled_upcasts.gated_in_float32, *tensors(ACTIVATION_SPECS, HALF)), lift="exact")
    (miss,) = report.near_misses("lift_swiglu")
    assert "computed in float32 throughout" in miss.reason


def test_exact_wants_known_roundings() -> None:
    """No document says that the device's SiLU on 16 bits rounds its result alone."""
    report = optimise(aot_graph(spelled_upcasts.silu_of_float32, *tensors(ACTIVATION_SPECS, HALF)), lift="exact")
    assert "may not round where the spelling does" in report.near_misses("lift_upcast")[0].reason, report.table()


def test_exact_wants_a_known_choice() -> None:
    """Which of two equal experts eager mode chooses is not said anywhere."""
    report = optimise(aot_graph(routers.router_of_qwen3, *tensors(ROUTER_SPECS, HALF)), lift="exact")
    assert "no documented order among equal elements" in report.near_misses("lift_gating")[0].reason, report.table()


def test_equal_experts_may_change_places() -> None:
    """Places are judged by what they choose: an equal element is as good, the same one twice is not."""
    scores = torch.tensor([[3.0, 5.0, 5.0]], dtype=torch.float64)
    places = [[torch.tensor([chosen])] for chosen in ([2, 1], [1, 1], [1, 2])]
    other, twice, right = (found for (found,) in judging._elements_for_places(*places, of=scores))
    assert torch.equal(other.double(), right)
    assert bool(twice.isnan().all())


def test_exact_lifts_what_rounds_alike() -> None:
    """In float32 the products and the sum of a rotary embedding are those of the operator."""
    gm = aot_graph(spelled_rotary.rotated_halves, *tensors(ROTARY_SPECS, SINGLE))
    report = optimise(gm, lift="exact")
    assert report.fusions("lift_rotary") == 1, report.table()


@pytest.mark.slow
def test_judge_refuses_what_the_form_read_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge does not believe the form: a wrong epsilon, sign or mode is refused by values alone."""
    from npugraph_ex.lifting.forms import gating, group_norm_silu, rms_norm, rotary, softmax_attention

    judging.forget()
    right = rms_norm._build

    monkeypatch.setattr(
        rms_norm, "_build", lambda epsilon, *shape, from_one: right(epsilon * 4, *shape, from_one=from_one)
    )
    report = optimise(aot_graph(spelled_norms.llama_norm, *tensors(NORM_SPECS, HALF)), lift="judged")
    assert report.fusions("lift_rms_norm") == 0, report.table()
    assert "farther from float64" in report.near_misses("lift_rms_norm")[0].reason

    monkeypatch.setattr(
        rms_norm, "_build", lambda epsilon, *shape, from_one: right(epsilon, *shape, from_one=not from_one)
    )
    report = optimise(aot_graph(spelled_norms.llama_norm, *tensors(NORM_SPECS, HALF)), lift="judged")
    assert "npu_gemma_rms_norm" not in str(report.rules), report.table()

    turned = rotary._build
    swapped = lambda *mode, **how: lambda emit, x, cos, sin: turned(*mode, **how)(emit, x, sin, cos)  # noqa: E731
    monkeypatch.setattr(rotary, "_build", swapped)
    report = optimise(aot_graph(spelled_rotary.rotated_halves, *tensors(ROTARY_SPECS, HALF)), lift="judged")
    assert report.fusions("lift_rotary") == 0, report.table()
    monkeypatch.setattr(rotary, "_build", lambda _, dtype, **how: turned("interleave", dtype, **how))
    report = optimise(aot_graph(spelled_rotary.rotated_halves, *tensors(ROTARY_SPECS, HALF)), lift="judged")
    assert report.fusions("lift_rotary") == 0, report.table()

    routed, router = gating._build, routers.router_of_qwen3
    flipped = lambda k, dtype, *, shared: routed(k, dtype, shared=not shared)  # noqa: E731

    def others(*k: Any, **how: Any) -> Any:
        """The weights are right, and the experts those of -x."""
        make, minus = routed(*k, **how), torch.ops.aten.neg.default
        return lambda emit, x: (make(emit, x)[0], make(emit, emit(minus, x))[1])

    for wrong in (flipped, others):
        monkeypatch.setattr(gating, "_build", wrong)
        report = optimise(aot_graph(router, *tensors(ROUTER_SPECS, HALF)), lift="judged")
        assert "farther from float64" in report.near_misses("lift_gating")[0].reason, report.table()

    grouped = group_norm_silu._build
    for groups, epsilon in ((2, 1e-6), (1, 0.1)):
        monkeypatch.setattr(group_norm_silu, "_build", lambda group, _, g=groups, e=epsilon: grouped(g * group, e))
        report = optimise(
            aot_graph(spelled_activations.silu_of_a_group_norm, *tensors(ACTIVATION_SPECS, HALF)), lift="judged"
        )
        assert "farther from float64" in report.near_misses("lift_group_norm_silu")[0].reason, report.table()

    attended = softmax_attention._build
    monkeypatch.setattr(softmax_attention, "_build", lambda scale, *sizes: attended(scale * 1.01, *sizes))
    graph = aot_graph(spelled_attention.attention_with_a_bias_for_all_heads, *tensors(SPELLED_SPECS, HALF))
    report = optimise(graph, lift="judged")
    assert "farther from float64" in report.near_misses("lift_attention")[0].reason, report.table()

    monkeypatch.setattr(softmax_attention, "_build", attended)
    masked, roll = softmax_attention._for_every_score, torch.ops.aten.roll.default
    off_by_one = lambda emit, *scores: emit(roll, masked(emit, *scores), [1], [3])  # noqa: E731
    monkeypatch.setattr(softmax_attention, "_for_every_score", off_by_one)
    graph = aot_graph(spelled_attention.attention_under_the_diagonal, *tensors(SPELLED_SPECS, HALF))
    report = optimise(graph, lift="judged")
    assert "farther from float64" in report.near_misses("lift_attention")[0].reason, report.table()
