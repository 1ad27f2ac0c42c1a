"""Rules with a backward: they fuse in the joint graph that AOT makes, before it is cut into forward and backward."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D102, D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from functorch.compile import make_boxed_func
from fx_helpers import aot_graph, optimise, targets
from torch._inductor.pattern_matcher import fwd_only, joint_fwd_bwd

import npugraph_ex
from npugraph_ex import register_replacement
from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.registry import Registration
from npugraph_ex.report.passes import PassReport

Function = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("own_registry")


def tensor(*shape: int, grad: bool = True) -> torch.Tensor:
    """A float32 tensor on the device with values away from zero."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (values + values.sign() / 8).npu().requires_grad_(grad)


def trained(model: Function, *inputs: torch.Tensor, **how: Any) -> PassReport:
    """Compile ``model``; outputs and gradients, in two calls, are those of eager mode; the report on its graph."""
    compiled = torch.compile(model, backend="npugraph_ex", fullgraph=True, **how)
    for factor in (1.0, 0.5):
        eager, ours = ([(t.detach() * factor).requires_grad_(t.requires_grad) for t in inputs] for _ in range(2))
        expected, actual = model(*eager), compiled(*ours)
        torch.testing.assert_close(actual, expected)
        gradient = torch.cos(expected.detach())
        expected.backward(gradient)
        actual.backward(gradient)
        for old, new in zip(eager, ours, strict=True):
            torch.testing.assert_close(new.grad, old.grad)
    report = npugraph_ex.last_report()
    assert report is not None
    assert all(record.outcome != "rolled back" for record in report.passes), report.table()
    return report


def written_norm(x: Any, gamma: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma


def fused_norm(x: Any, gamma: Any) -> Any:
    return torch_npu.npu_rms_norm(x, gamma, 1e-6)[0]


def norm_rule(trace_fn: Any = joint_fwd_bwd) -> Registration:
    """A norm that is written out, forward and backward, becomes the norm operator and its gradient operator."""
    return register_replacement(written_norm, fused_norm, [tensor(4, 8), tensor(8)], trace_fn=trace_fn)


def two_layers(x: Any, gamma: Any, w: Any) -> Any:
    hidden = torch.tanh(written_norm(x @ w, gamma))
    return torch.exp(written_norm(hidden @ w, gamma) * 0.1) + x


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_training_rules_fuse_in_compiled_models(dynamic: bool) -> None:
    """Both norms of a model in the middle of its layers: their gradients come from layers that follow them."""
    handle = norm_rule()
    with torch.no_grad():
        assert "npu_rms_norm" not in targets(aot_graph(two_layers, tensor(3, 8), tensor(8), tensor(8, 8)))
    report = trained(two_layers, tensor(3, 8), tensor(8), tensor(8, 8), dynamic=dynamic)
    assert report.fusions(handle.name) == 2, report.table()
    assert report.near_misses(handle.name) == ()
    (record,) = [record for record in report.rules if record.name == handle.name]
    assert record.inactive == ""
    assert record.fusions[0].by == ("npu_rms_norm_default", "npu_rms_norm_backward_default")
    assert record.fusions[0].source.startswith(__file__)


class Gate(torch.autograd.Function):
    """``x * act(y)``, whose gradients are products, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x.mul(torch.tanh(y))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (grad,), (x, y) = grads, ctx.saved_tensors
        t = torch.tanh(y)
        return grad * t, grad * x * (1 - t * t)


def _gate(x: torch.Tensor, y: torch.Tensor) -> Any:
    return Gate.apply(x, y)


@pytest.mark.parametrize("swapped", [False, True])
def test_products_of_a_forward_and_of_its_backward_are_told_apart(swapped: bool) -> None:
    """A gradient ``g * t`` is, up to ``g``, the forward's ``x * t``: a choice of one for the other is taken back."""

    def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(y) * x if swapped else x * torch.tanh(y)

    handle = register_replacement(gate, _gate, [tensor(4, 8)] * 2, trace_fn=joint_fwd_bwd)
    report = trained(lambda x, y, z: (gate(x + 1, y) * z).sin(), tensor(3, 8), tensor(3, 8), tensor(3, 8))
    assert report.fusions(handle.name) == 1, report.table()


@pytest.mark.slow
def test_forward_and_backward_each_get_their_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused operator is in the forward graph alone, its gradient operator in the backward graph alone."""
    graphs: dict[str, list[str]] = {}

    def compiler(name: str) -> Function:
        def compile_one(gm: Any, inputs: Any) -> Function:
            graphs[name] = targets(gm)
            boxed: Function = make_boxed_func(gm.forward)
            return boxed

        return compile_one

    norm_rule()
    from npugraph_ex.frontend.entry import backend

    monkeypatch.setattr(backend, "_uncompiled", compiler("backward"))
    report = trained(two_layers, tensor(3, 8), tensor(8), tensor(8, 8))
    assert report.fusions() == 2
    assert graphs["backward"].count("npu_rms_norm_backward") == 2
    assert "npu_rms_norm" not in graphs["backward"]
    assert "rsqrt" not in graphs["backward"]


def scaled_sum(x: Any, y: Any, scale: Any) -> Any:
    return torch.relu(x) * scale + y


def scaled_sum_fused(x: Any, y: Any, scale: Any) -> Any:
    return torch.addcmul(y, torch.clamp_min(x, 0), scale)


def test_gradients_that_no_operator_makes_are_no_part_of_the_pattern() -> None:
    """The gradient of an argument that is only added is the incoming one; one that needs none has None."""
    handle = register_replacement(
        scaled_sum, scaled_sum_fused, [tensor(4, 8), tensor(4, 8), tensor(4, 8, grad=False)], trace_fn=joint_fwd_bwd
    )
    scale = tensor(2, 8, grad=False)
    report = trained(lambda x, y: torch.tanh(scaled_sum(x.sin(), y.cos(), scale)), tensor(2, 8), tensor(2, 8))
    assert report.fusions(handle.name) == 1, report.table()


def test_a_broadcast_argument_has_another_gradient() -> None:
    """Its gradient is a sum, which the pattern traced on equal shapes does not have: refused, with a reason."""
    handle = register_replacement(
        scaled_sum, scaled_sum_fused, [tensor(4, 8), tensor(4, 8), tensor(4, 8, grad=False)], trace_fn=joint_fwd_bwd
    )
    scale = tensor(2, 8, grad=False)
    report = trained(lambda x, y: torch.tanh(scaled_sum(x.sin(), y.cos(), scale)), tensor(2, 8), tensor(8))
    assert report.fusions(handle.name) == 0
    (miss,) = report.near_misses(handle.name)
    assert "gives other gradients" in miss.reason


def test_a_value_of_the_forward_that_is_used_elsewhere_stays() -> None:
    """What vanishes must not be used by anything else, here the root."""

    def also(x: Any, gamma: Any) -> Any:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * rstd * gamma + rstd.detach()

    handle = norm_rule()
    report = trained(also, tensor(3, 8), tensor(8))
    assert report.fusions(handle.name) == 0
    assert [miss.reason for miss in report.near_misses(handle.name)] == ["rsqrt is also used by add_1"]


def relu(x: Any) -> Any:
    return torch.relu(x)


def clamped(x: Any) -> Any:
    return torch.clamp_min(x, 0)


@pytest.mark.parametrize("written", [False, True])
def test_a_backward_must_not_come_to_read_what_is_written(written: bool) -> None:
    """The gradient of relu needs its result, that of clamp_min its argument, which the model writes after it."""

    def body(x: Any) -> Any:
        y = torch.relu(x)
        if written:
            x.sub_(3)
        return y * 2

    handle = register_replacement(relu, clamped, [tensor(4, 8)], trace_fn=joint_fwd_bwd)
    compiled = torch.compile(body, backend="npugraph_ex", fullgraph=True)
    results = []
    for function in (body, compiled):
        leaf = tensor(3, 8).detach().requires_grad_()
        x = leaf * 1
        result = function(x) + x
        result.sum().backward()
        results.append((result, leaf.grad))
    torch.testing.assert_close(results[1], results[0])
    report = npugraph_ex.last_report()
    assert report is not None
    reasons = [miss.reason for miss in report.near_misses(handle.name)]
    assert ["primals_1" in reason for reason in reasons] == [True] * written
    assert report.fusions(handle.name) == (not written)


@pytest.mark.parametrize("written", [False, True])
def test_nor_what_is_written_in_the_graph(written: bool) -> None:
    """The same for a tensor without a gradient, whose write is in the graph: at its end, but it runs in the forward."""

    def model(x: Any, state: Any) -> Any:
        y = torch.tanh(torch.relu(x.sin()) + state)
        if written:
            state.mul_(2)
        return y

    def search(x: Any, y: Any) -> Any:
        return torch.relu(x) + y

    def replace(x: Any, y: Any) -> Any:
        return torch.clamp_min(x + y, y)

    handle = register_replacement(search, replace, [tensor(4, 8), tensor(4, 8, grad=False)], trace_fn=joint_fwd_bwd)
    compiled = torch.compile(model, backend="npugraph_ex", fullgraph=True)
    results = []
    for function in (model, compiled):
        x, state = tensor(3, 8), tensor(3, 8, grad=False) * 2
        result = function(x, state)
        result.sum().backward()
        results.append((result, x.grad, state))
    torch.testing.assert_close(results[1], results[0])
    report = npugraph_ex.last_report()
    assert report is not None
    assert report.fusions(handle.name) == (not written), report.table()
    reasons = [miss.reason for miss in report.near_misses(handle.name)]
    assert ["primals_2" in reason for reason in reasons] == [True] * written


def test_inference_keeps_to_rules_without_a_backward() -> None:
    """A rule for training says that it is one; the same functions registered for inference fuse there."""
    training = norm_rule()
    gm = aot_graph(written_norm, tensor(3, 8, grad=False), tensor(8, grad=False))
    (record,) = [record for record in optimise(gm).rules if record.name == training.name]
    assert "no backward" in record.inactive
    inference = norm_rule(fwd_only)
    assert inference.name == training.name
    gm = aot_graph(written_norm, tensor(3, 8, grad=False), tensor(8, grad=False))
    report = optimise(gm)
    assert report.fusions(inference.name) == 1
    assert [record.inactive for record in report.rules if record.name == inference.name] == [""]


@pytest.mark.slow
def test_values_are_checked_in_the_forward_only() -> None:
    """``check_numerics`` runs graphs on the CPU, which has no kernel for the backward of a product on the device."""
    norm_rule()
    model = lambda x, gamma, w: torch.tanh(written_norm(x @ w, gamma))  # noqa: E731 - as short as its use
    assert trained(model, tensor(3, 8), tensor(8), tensor(8, 8), options={"check_numerics": True}).fusions() == 1


@pytest.mark.parametrize("off", ["pattern_fusion_pass", "fusion_rules"])
def test_options_switch_training_rules_off(off: str) -> None:
    """All of fusion, or the one rule by its name."""
    handle = norm_rule()
    options: dict[str, Any] = {off: {handle.name: False} if off == "fusion_rules" else False}
    assert trained(written_norm, tensor(3, 8), tensor(8), options=options).fusions() == 0


def test_results_are_counted_with_their_gradients() -> None:
    """A replacement with another number of results is refused when it is registered."""
    with pytest.raises(ReplacementError, match=r"results .* 3; it returns 4"):
        register_replacement(
            lambda x, y: torch.relu(x) * y,
            lambda x, y: (torch.relu(x) * y, torch.relu(y)),
            [tensor(4, 8), tensor(4, 8)],
            trace_fn=joint_fwd_bwd,
        )


class Divided(torch.autograd.Function):
    """``x / (1 / y)``, whose gradient is a product although the forward has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return x / y.reciprocal()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return grads[0] * y, None


@pytest.mark.slow
def test_a_match_without_forward_operators_stays() -> None:
    """Both operators of ``x * y``, where x alone needs a gradient, are like two of the backward; other rules are applied."""

    def product(x: Any, y: Any) -> Any:
        return x * y

    def squared(x: Any) -> Any:
        return torch.tanh(x).square()

    def multiplied(x: Any) -> Any:
        return torch.tanh(x) * torch.tanh(x)

    late = register_replacement(product, lambda x, y: y * x, [tensor(4, 8), tensor(4, 8, grad=False)], joint_fwd_bwd)
    other = register_replacement(squared, multiplied, [tensor(4, 8)], joint_fwd_bwd)

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return squared(Divided.apply(torch.sigmoid(x), y)) + Divided.apply(torch.sin(x), y)

    report = trained(model, tensor(4, 8), tensor(4, 8, grad=False))
    assert report.fusions(other.name) == 1
    assert "all of its operators are of the backward" in str(report.near_misses(late.name))


def test_a_gradient_that_a_replacement_lacks_is_named() -> None:
    """A replacement that detaches an argument has None where the pattern has its gradient."""

    def scaled(x: Any, y: Any) -> Any:
        return torch.tanh(x) * y

    def detached(x: Any, y: Any) -> Any:
        return torch.tanh(x) * y.detach()

    rule = register_replacement(scaled, detached, [tensor(4, 8), tensor(4, 8)], joint_fwd_bwd)
    report = trained(scaled, tensor(4, 8), tensor(4, 8))
    assert report.fusions(rule.name) == 0
    assert "would have None (no gradient) instead of a tensor" in str(report.near_misses(rule.name))
