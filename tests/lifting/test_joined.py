"""Gate and up in one product: the operator, the weights that it follows, and what is left alone."""

# The calls of the modules are what their names say.
# ruff: noqa: D102

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import npugraph_ex
from npugraph_ex.frontend.entry import joined_inputs
from npugraph_ex.lifting import judging
from npugraph_ex.lifting.forms import joined_swiglu

WIDTH, INNER = 32, 48


class Mlp(torch.nn.Module):
    """As Llama has it."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(WIDTH, INNER, bias=bias) for _ in range(2))
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class UpFirst(Mlp):
    """The factors the other way round."""

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x) * functional.silu(self.gate(x)))


class OfTwo(Mlp):
    """The gate is of another value."""

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(self.gate(x + 1)) * self.up(x))


class OfOneWeight(Mlp):
    """Both projections are the same."""

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(functional.linear(x, self.up.weight)) * self.up(x))


class OfComputedWeights(Mlp):
    """The gate's weight is no parameter, but made in the call."""

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(functional.linear(x, self.up.weight * 2)) * self.up(x))


def made(kind: Callable[..., Mlp], seed: int = 0, **how: Any) -> Any:
    """A module in float16 on the device."""
    torch.manual_seed(seed)
    return kind(**how).half().npu()


def drawn(seed: int = 0) -> Any:
    """Its input."""
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed)).half().npu()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function with lifting and joined weights."""
    torch._dynamo.reset()
    judging.forget()
    every = {"lift": "judged", "join_projections": True, **options}
    return torch.compile(function, backend="npugraph_ex", options=every, dynamic=False, fullgraph=True)


def fused() -> int:
    """How often the last graph was lifted so."""
    report = npugraph_ex.last_report()
    assert report is not None
    return report.fusions(joined_swiglu.NAME)


@pytest.mark.parametrize("force_eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("kind", [Mlp, UpFirst])
def test_one_product_follows_its_weights(kind: Callable[..., Mlp], force_eager: bool) -> None:
    """One graph serves several modules, and weights that are written, replaced and loaded."""
    one, other = made(kind, 1), made(kind, 2)
    x = drawn()
    run = compiled(lambda module, x: module(x), force_eager=force_eager)
    plain = {id(module): module(x).detach() for module in (one, other)}
    with torch.no_grad():
        for module in (one, other, one, one):
            assert torch.allclose(run(module, x), plain[id(module)], rtol=1e-2, atol=1e-3)
        assert fused() == 1
        one.gate.weight.mul_(3)
        assert torch.allclose(run(one, x), one(x), rtol=1e-2, atol=1e-3)
        one.up.weight = torch.nn.Parameter(torch.ones_like(one.up.weight) / 8)
        assert torch.allclose(run(one, x), one(x), rtol=1e-2, atol=1e-3)
        one.load_state_dict(other.state_dict())
        assert torch.equal(run(one, x), run(other, x))


def test_weights_of_a_module_that_is_gone_are_freed() -> None:
    """Joined weights live as long as the parameters."""
    inputs: list[joined_inputs.JoinedInputs] = []
    right = joined_inputs.JoinedInputs.around
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined_inputs.JoinedInputs, "around", lambda self, run: inputs.append(self) or right(self, run))
        run = compiled(lambda x, gate, up: functional.silu(functional.linear(x, gate)) * functional.linear(x, up))
        weights = [torch.nn.Parameter(torch.randn(INNER, WIDTH).half().npu()) for _ in range(2)]
        with torch.no_grad():
            run(drawn(), *weights)
    assert len(inputs[0]._kept) == 1
    weights.clear()
    gc.collect()
    assert not inputs[0]._kept


NEAR_MISSES = {
    (OfTwo, False): "and the other factor of",
    (OfOneWeight, False): "one and the same",
    (OfComputedWeights, False): "",
    (Mlp, True): "have biases",
}


@pytest.mark.parametrize(("kind", "bias"), NEAR_MISSES)
def test_near_miss_is_left_alone(kind: Callable[..., Mlp], bias: bool) -> None:
    """Two products stay where one would compute something else, or what the form does not read."""
    module, x = made(kind, bias=bias), drawn()
    with torch.no_grad():
        found = compiled(module)(x)
        assert torch.equal(found, module(x))
    report = npugraph_ex.last_report()
    assert report is not None
    assert fused() == 0, report.table()
    reasons = " / ".join(miss.reason for miss in report.near_misses(joined_swiglu.NAME))
    assert NEAR_MISSES[kind, bias] in reasons
    assert bool(reasons) == bool(NEAR_MISSES[kind, bias])


def test_exact_joins_nothing() -> None:
    """A product's order of sums is not documented."""
    module = made(Mlp)
    with torch.no_grad():
        assert torch.equal(compiled(module, lift="exact")(drawn()), module(drawn()))
    assert fused() == 0


@pytest.mark.parametrize("step", ["_joined", "_gated"])
def test_the_judge_sees_each_step(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Gate and up in each other's place are refused by values, in the product and in the operator."""
    right = getattr(joined_swiglu, step)
    swapped = {
        "_joined": lambda emit, x, gate, up: right(emit, x, up, gate),
        "_gated": lambda emit, both: right(emit, emit(torch.ops.aten.roll.default, both, [INNER], [-1])),
    }
    monkeypatch.setattr(joined_swiglu, step, swapped[step])
    module = made(Mlp)
    with torch.no_grad():
        compiled(module)(drawn())
    report = npugraph_ex.last_report()
    assert report is not None
    assert fused() == 0
    assert "farther from float64" in report.near_misses(joined_swiglu.NAME)[0].reason
