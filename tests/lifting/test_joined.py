"""Projections in one product, gate and up and others: the weights that it follows, and what is left alone."""

# The calls of the modules are what their names say.
# ruff: noqa: D102

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import npugraph_ex
from npugraph_ex.errors import SessionError
from npugraph_ex.frontend.entry import joined_inputs
from npugraph_ex.inference import cache_compile, session
from npugraph_ex.lifting import judging
from npugraph_ex.lifting.forms import joined_gates, joined_projections
from npugraph_ex.report.captures import captures_so_far

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


class OfGelu(Mlp):
    """As Gemma has it."""

    approximate = "tanh"

    def forward(self, x: Any) -> Any:
        return self.down(functional.gelu(self.gate(x), approximate=self.approximate) * self.up(x))


class OfGeluByErf(OfGelu):
    """By an error function."""

    approximate = "none"


class InFloat32(Mlp):
    """With the activation and the product in float32."""

    def forward(self, x: Any) -> Any:
        gated = functional.silu(self.gate(x).float()) * self.up(x).float()
        return self.down(gated.to(x.dtype))


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
    torch.compiler.reset()
    judging.forget()
    every = {"lift": "judged", "join_projections": True, **options}
    return torch.compile(function, backend="npugraph_ex", options=every, dynamic=False, fullgraph=True)


def fused(rule: str = joined_gates.JoinedSwiGlu.name) -> int:
    """How often the last graph was lifted so."""
    report = npugraph_ex.last_report()
    assert report is not None
    return report.fusions(rule)


@pytest.mark.parametrize("force_eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("kind", [Mlp, UpFirst, InFloat32, OfGelu, OfGeluByErf])
def test_one_product_follows_its_weights(kind: type[Mlp], force_eager: bool) -> None:
    """One graph serves several modules, and weights that are written, replaced and loaded."""
    one, other = made(kind, 1), made(kind, 2)
    x = drawn()
    run = compiled(lambda module, x: module(x), force_eager=force_eager)
    plain = {id(module): module(x).detach() for module in (one, other)}
    with torch.no_grad():
        for module in (one, other, one, one):
            assert torch.allclose(run(module, x), plain[id(module)], rtol=1e-2, atol=1e-3)
        assert fused(joined_gates.JoinedGeGlu.name if issubclass(kind, OfGelu) else joined_gates.JoinedSwiGlu.name) == 1
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


JOINED = {"lift": "judged", "join_projections": True}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_session_follows_its_weights(mode: Callable[[], Any]) -> None:
    """A weight that is written or replaced is seen at the next call of each form; one with other memory after refresh()."""
    model, other, sizes = made(Mlp, 1), made(Mlp, 2), (2, 1)
    torch.compiler.reset()
    with mode():
        step = session(model, (drawn(),), options=JOINED, dynamic=False)
        assert fused() == 1
        step.warm_up(sizes, lambda size: (drawn()[:size],))

        def agree() -> None:
            for seed in range(3):
                for size in sizes:
                    x = drawn(seed)[:size]
                    found = step(x)
                    assert torch.allclose(found, model(x), rtol=1e-2, atol=1e-3)

        def settled() -> int:
            before = captures_so_far()
            agree()
            return captures_so_far() - before

        assert any(settled() == 0 for _ in range(4))  # where inputs lie at first depends on what ran before
        changes: tuple[Callable[[], object], ...] = (
            lambda: model.gate.weight.mul_(3),
            lambda: model.load_state_dict(other.state_dict()),
            lambda: setattr(model.up, "weight", torch.nn.Parameter(torch.ones_like(model.up.weight) / 8)),
        )
        for change in changes:
            change()
            agree()
            step.debug = True
            agree()
            step.debug = False
        assert any(settled() == 0 for _ in range(4))
        before = model(drawn())
        model.up.weight.data = -model.up.weight.data
        assert torch.allclose(step(drawn()), before, rtol=1e-2, atol=1e-3)
        step.refresh()
        agree()


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, partial(torch.optim.AdamW, eps=1e-3)])
@pytest.mark.parametrize("force_eager", [False, True], ids=["captured", "eager"])
def test_one_product_follows_an_optimiser(optimiser: Callable[..., torch.optim.Optimizer], force_eager: bool) -> None:
    """Its steps write lists of tensors, which no kernel of an NPU counts by itself."""
    model, x = made(Mlp, 1), drawn()
    run, step = compiled(model, force_eager=force_eager), optimiser(model.parameters(), lr=0.1, foreach=True)
    for _ in range(3):
        with torch.no_grad():
            assert torch.allclose(run(x), model(x), rtol=1e-2, atol=1e-3)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        step.step()
    assert fused() == 1


@pytest.mark.slow
def test_weights_that_change_unseen_are_joined_again_on_request() -> None:
    """By invalidate(), for all; of a session by refresh(), and its debug mode says that it is time."""
    model, x = made(Mlp, 1), drawn()
    torch.compiler.reset()
    with torch.no_grad():
        run, step = compiled(model), session(model, (x,), options=JOINED)
        for refresh in (npugraph_ex.invalidate, step.refresh):
            for function in (run, step):
                assert torch.allclose(function(x), model(x), rtol=1e-2, atol=1e-3)
            before = model(x)
            model.gate.weight.untyped_storage().copy_((model.gate.weight * -2).untyped_storage())
            assert torch.allclose(step(x), before, rtol=1e-2, atol=1e-3)
            assert not torch.allclose(step(x), model(x), rtol=1e-2, atol=1e-3)
            step.debug = True
            with pytest.raises(SessionError, match="weights that join_projections joined"):
                step(x)
            refresh()
            assert torch.allclose(step(x), model(x), rtol=1e-2, atol=1e-3)
            step.debug = False
            assert torch.allclose(run(x), model(x), rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_a_saved_compilation_names_the_option(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Joined weights are not saved; the program runs, and the line says which option is the reason."""
    module, x = made(Mlp), drawn()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="npugraph_ex"):
        found = cache_compile(module.forward, cache_dir=tmp_path, options=JOINED)(x)
        assert torch.allclose(found, module(x), rtol=1e-2, atol=1e-3)
    (line,) = [record.getMessage() for record in caplog.records if "every process" in record.getMessage()]
    assert line.splitlines()[0].endswith("the option join_projections joins weights anew in each process")


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
        assert bias or torch.equal(found, module(x))  # the other forms join what has biases
    report = npugraph_ex.last_report()
    assert report is not None
    assert fused() == 0, report.table()
    reasons = " / ".join(miss.reason for miss in report.near_misses(joined_gates.JoinedSwiGlu.name))
    assert NEAR_MISSES[kind, bias] in reasons
    assert bool(reasons) == bool(NEAR_MISSES[kind, bias])


class UpBeforeGate(Mlp):
    """With the gate computed last."""

    def forward(self, x: Any) -> Any:
        up = self.up(x)
        gate = self.gate(x)
        return self.down(up * torch.sigmoid(gate) * gate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "halves"), [(Mlp, "lift_swiglu"), (UpBeforeGate, "lift_swiglu"), (OfGelu, "lift_geglu")]
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_projections_with_biases_become_halves(kind: type[Mlp], halves: str, dynamic: bool) -> None:
    """They are joined as any projections are, and the halves of the one product are gated by one operator."""
    module, x = made(kind, bias=True), drawn()
    run = compiled(module)
    with torch.no_grad():
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        assert torch.allclose(run(x), module(x), rtol=1e-2, atol=1e-3)
        assert (fused("lift_joined_projections"), fused(halves)) == (1, 1)
        module.up.bias.mul_(-3)
        assert torch.allclose(run(x), module(x), rtol=1e-2, atol=1e-3)


def test_exact_joins_nothing() -> None:
    """A product's order of sums is not documented."""
    module = made(Mlp)
    with torch.no_grad():
        assert torch.equal(compiled(module, lift="exact")(drawn()), module(drawn()))
    assert fused() == 0


@pytest.mark.parametrize("step", ["joined", "gated"])
def test_the_judge_sees_each_step(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Gate and up in each other's place are refused by values, in the product and in the operator."""
    joined, halves = joined_gates._joined, joined_gates.JoinedSwiGlu.halves

    def gated(activated: Any, *, first: bool) -> Any:
        right: Any = halves.build(activated, first=first)
        return lambda emit, both: right(emit, emit(torch.ops.aten.roll.default, both, [INNER], [-1]))

    if step == "joined":
        swapped = lambda **how: lambda emit, x, gate, up: joined(**how)(emit, x, up, gate)  # noqa: E731
        monkeypatch.setattr(joined_gates, "_joined", swapped)
    else:
        monkeypatch.setattr(joined_gates.JoinedSwiGlu, "halves", replace(halves, build=gated))
    module = made(Mlp)
    with torch.no_grad():
        compiled(module)(drawn())
    report = npugraph_ex.last_report()
    assert report is not None
    assert fused() == 0
    assert "farther from float64" in report.near_misses(joined_gates.JoinedSwiGlu.name)[0].reason


class Attention(torch.nn.Module):
    """As `transformers` has it: one head of keys and values for two of queries."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, width, bias=bias) for width in (WIDTH, 16, 16, WIDTH))

    def projected(self, x: Any) -> Any:
        return [one(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for one in (self.q, self.k, self.v)]

    def forward(self, x: Any) -> Any:
        attended = functional.scaled_dot_product_attention(*self.projected(x), enable_gqa=True)
        return self.o(attended.transpose(1, 2).reshape(x.shape))


class OfAnother(Attention):
    """Keys and values are of another input than queries, as in cross attention."""

    def projected(self, x: Any) -> Any:
        y = x + 1
        return [
            one(of).view(*x.shape[:2], -1, 8).transpose(1, 2) for one, of in ((self.q, x), (self.k, y), (self.v, y))
        ]


class ValuesLeave(Attention):
    """Values are a result, as those of a new cache are."""

    def forward(self, x: Any) -> Any:
        queries, keys, values = self.projected(x)
        return functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True), values


class OnlyOneWeight(Attention):
    """Keys are values."""

    def projected(self, x: Any) -> Any:
        keys = [functional.linear(x, self.k.weight).view(*x.shape[:2], -1, 8).transpose(1, 2) for _ in range(2)]
        return [self.q(x).view(*x.shape[:2], -1, 8).transpose(1, 2), *keys]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bias"), [(Attention, False), (Attention, True), (OfAnother, False)])
def test_projections_of_one_input(kind: Callable[..., Any], bias: bool) -> None:
    """Queries, keys and values are one product, replayed and with weights and biases that change; a decode step has one row."""
    one, other = (made(kind, seed, bias=bias) for seed in (1, 2))
    run = compiled(lambda module, x: module(x))
    for x in (drawn(), drawn(3)[:1, :1]):
        with torch.no_grad():
            for module in (one, other, one):
                found, plain = run(module, x), module(x)
                assert torch.allclose(found, plain, rtol=1e-2, atol=1e-3)
                assert found.stride() == plain.stride()
            assert fused(joined_projections.NAME) == 1
            for parameter in one.k.parameters():
                parameter.mul_(3)
            assert torch.allclose(run(one, x), one(x), rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Mlp, Attention])
def test_the_numeric_check_joins_its_own_weights(kind: Callable[..., Any]) -> None:
    """It runs the graph with weights of its own, random ones and wide ones, which the joined weight of the call does not fit."""
    with torch.no_grad():
        compiled(lambda module, x: module(x), check_numerics=True)(made(kind, 1), drawn())
    report = npugraph_ex.last_report()
    assert report is not None
    assert [record.outcome for record in report.passes if record.name == "lifting"] == ["changed"]
    assert report.compared, report.table()


LEFT_ALONE = {ValuesLeave: "leaves the graph, and would share memory", OnlyOneWeight: "one and the same"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_projections_that_stay_apart(kind: Callable[..., Any]) -> None:
    """Where a program could see that the parts share memory, they do not."""
    module, x = made(kind), drawn()
    with torch.no_grad():
        found, plain = compiled(module)(x), module(x)
    for one, expected in zip(*((pair if isinstance(pair, tuple) else (pair,)) for pair in (found, plain)), strict=True):
        assert torch.equal(one, expected)
        assert one.stride() == expected.stride()
    report = npugraph_ex.last_report()
    assert report is not None
    assert fused(joined_projections.NAME) == 0, report.table()
    assert LEFT_ALONE[kind] in " / ".join(miss.reason for miss in report.near_misses(joined_projections.NAME))


@pytest.mark.slow
def test_the_judge_sees_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values in each other's place are refused by values."""
    right = joined_projections._build

    def swapped(shape: Any, sizes: Any, **how: Any) -> Any:
        def build(emit: Any, *operands: Any) -> Any:
            queries, keys, values = right(shape, sizes, **how)(emit, *operands)
            return queries, values, keys

        return build

    monkeypatch.setattr(joined_projections, "_build", swapped)
    module = made(Attention)
    with torch.no_grad():
        compiled(module)(drawn())
    report = npugraph_ex.last_report()
    assert report is not None
    assert fused(joined_projections.NAME) == 0
    assert "farther from float64" in report.near_misses(joined_projections.NAME)[0].reason
