"""What depends on no input, or is computed twice, is computed once; its bits stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import spelled_products
import torch
from fx_helpers import aot_graph, optimise, targets
from random_tensors import tensors
from spelled_norms import NORM_SPECS
from torch.nn import functional

import npu_emulator

Function = Callable[..., Any]
HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize(
    "function", [spelled_products.masked_by_constants, spelled_products.masked_by_sums_of_constants]
)
def test_what_depends_on_no_input_is_computed_once(function: Function) -> None:
    """A mask is a constant of the module, to the bit; the sum that needs it is still computed."""
    gm = aot_graph(function, *tensors(NORM_SPECS, HALF))
    report = optimise(gm, lift="exact")
    assert report.fusions("lift_constants") == 1, report.table()
    assert [name for name in targets(gm) if name not in {"slice", "transpose"}] == ["mul", "add"], report.table()
    (mask,) = (value for name, value in gm.named_buffers() if name.startswith("_lifted_"))
    expected = torch.full((64, 64), torch.finfo(HALF).min, dtype=HALF).triu(1)
    assert torch.equal(mask.cpu(), expected)


@pytest.mark.slow
def test_layers_share_the_causal_mask() -> None:
    """torch_npu makes it anew in each call of attention, of a size of its own."""

    def layers(q: Any, k: Any, v: Any) -> Any:
        for _ in range(3):
            q = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return q

    given = tensors(((2, 4, 6, 64), (2, 4, 6, 64), (2, 4, 6, 64)), HALF)
    gm, expected = aot_graph(layers, *given), layers(*given)
    report = optimise(gm, lift="exact")
    assert report.fusions("lift_constants") == 3, report.table()
    assert set(targets(gm)) == {"npu_fusion_attention_v3"}, targets(gm)
    (mask,) = (value for name, value in gm.named_buffers() if name.startswith("_lifted_"))
    assert torch.equal(mask.cpu(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    assert torch.equal(gm(*given)[0], expected)
    with npu_emulator.kernel_log("aten.*") as log:  # AOT compiles under its own fake tensors
        compiled = torch.compile(layers, backend="npugraph_ex", options={"lift": "exact"}, dynamic=False)
        assert torch.equal(torch.inference_mode()(compiled)(*given), expected)
    assert not log.of("aten.triu*")


def test_the_device_counts_in_fractions() -> None:
    """In which order a sum over fractions is made, nobody says, nor what all of them are as whole numbers."""

    def block(x: Any) -> Any:
        halves = torch.full((64,), 0.5, dtype=x.dtype, device=x.device)
        return x * halves.cumsum(0), x * (halves * -3).long()

    gm = aot_graph(block, *tensors(((64,),), HALF))
    report = optimise(gm, lift="exact")
    assert targets(gm) == ["cumsum", "mul", "_to_copy", "mul"], report.table()
    assert report.fusions("lift_constants") == 2, report.table()


def test_what_changes_no_rounding_says_so() -> None:
    """Computed once: every bit is that of before, and the report has no distance to measure."""

    def block(x: Any) -> Any:
        mask = torch.ones(64, dtype=torch.bool, device=x.device).logical_not()
        return (x * 3).relu().masked_fill(mask, 0.5) + (x * 3).sigmoid() * 1

    (x,) = tensors(((3, 64),), HALF)
    gm, before = aot_graph(block, x), block(x)
    report = optimise(gm, lift="judged")
    assert torch.equal(gm(x)[0], before)
    made = [one for record in report.rules for one in record.fusions]
    assert sorted({one.rule for one in made}) == ["lift_constants", "lift_repeated"], report.table()
    assert all(one.ulps == (0.0, 0.0) and one.bit_equal for one in made)
    assert report.table().count("bit-equal by construction") == len(made) == 3


def test_norms_without_a_weight_share_their_ones() -> None:
    """The ones are one constant, which no call fills, and a sum before such a norm is part of it."""

    def norm(x: Any) -> Any:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def block(x: Any, y: Any) -> Any:
        first = norm(x)
        return norm(first + y) + first

    given = tensors(((2, 3, 64), (2, 3, 64)), HALF)
    gm = aot_graph(block, *given)
    report = optimise(gm, lift="judged")
    assert targets(gm).count("ones") == 0, report.table()
    assert report.fusions("lift_add_rms_norm") == 1, report.table()
    (ones,) = (value for name, value in gm.named_buffers() if name.startswith("_lifted_"))
    assert torch.equal(ones.cpu(), torch.ones(64, dtype=HALF))


def _replayed(compiled: Function, *given: torch.Tensor) -> int:
    """How many kernels the second call starts."""
    compiled(*given)
    torch.npu.synchronize()
    before = sum(npu_emulator.kernel_counts().values())
    compiled(*given)
    torch.npu.synchronize()
    return sum(npu_emulator.kernel_counts().values()) - before


@pytest.mark.parametrize("force_eager", [False, True], ids=["replayed", "eager"])
def test_a_norm_without_a_weight_fills_nothing_in_a_call(force_eager: bool) -> None:
    """Its ones are there before the call, as ones of the program's are; a call starts a sum and the norm."""

    def norm(x: Any) -> Any:
        x = x + torch.ones(64, dtype=x.dtype, device=x.device)
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    options = {"lift": "judged", "force_eager": force_eager}
    compiled = torch.compile(norm, backend="npugraph_ex", options=options, dynamic=False)
    (x,) = tensors(((2, 3, 64),), HALF)
    with torch.no_grad():
        assert _replayed(compiled, x) == 2
        assert torch.allclose(compiled(x), norm(x), rtol=1e-2, atol=1e-3)


def test_repeated_values_are_computed_once() -> None:
    """Equal values come from one operator; what is written, drawn at random, or leaves the graph stays its own."""

    def function(x: Any, y: Any) -> Any:
        one, other = torch.sin(x) + y, torch.sin(x) * y
        drawn = torch.rand_like(x) + torch.rand_like(x)
        kept, also = torch.cos(x), torch.cos(x)
        return one + other, drawn, kept, also

    gm = aot_graph(function, *tensors(((4, 8), (4, 8)), SINGLE))
    report = optimise(gm, lift="exact")
    counts = {name: targets(gm).count(name) for name in ("sin", "rand_like", "cos")}
    assert counts == {"sin": 1, "rand_like": 2, "cos": 2}, report.table()
