"""Validation of rules for training: the joint graph's results and gradients decide, and whether torch.compile fuses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from torch._inductor.pattern_matcher import joint_fwd_bwd

from npugraph_ex.testing import validate_replacement
from npugraph_ex.testing.validation import survey


@pytest.fixture(autouse=True)
def _few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a trace of the joint graph."""
    monkeypatch.setattr(survey, "_MOST", 4)


def written(x: Any, gamma: Any) -> Any:
    """A norm in ATen operators."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma


def fused(x: Any, gamma: Any) -> Any:
    """The same norm."""
    return torch_npu.npu_rms_norm(x, gamma, 1e-6)[0]


def other_epsilon(x: Any, gamma: Any) -> Any:
    """Wrong where values are small."""
    return torch_npu.npu_rms_norm(x, gamma, 1e-5)[0]


def other_gradient(x: Any, gamma: Any) -> Any:
    """Forward the same norm; the gradient of gamma is twice as large."""
    return fused(x, 2 * gamma - gamma.detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replacement", "verdict"), [(fused, "proven on 8"), (other_epsilon, "refuted"), (other_gradient, "refuted")]
)
def test_results_and_gradients_are_judged(replacement: Any, verdict: str) -> None:
    """A wrong replacement is found by its results, or by its gradients alone."""
    examples = [torch.empty(shape, device="npu", requires_grad=True) for shape in ((4, 8), (8,))]
    found = validate_replacement(
        written, replacement, examples, trace_fn=joint_fwd_bwd, dtypes=[torch.float32], max_examples=8
    )
    assert found.verdict == verdict, found
    assert found.fused + found.wrong == found.programs == 8
    assert ("output 0" in str(found)) == (replacement is other_epsilon)


def other_in_dynamo(x: Any, gamma: Any) -> Any:
    """The norm, but where Dynamo traces."""
    return x * gamma if torch.compiler.is_dynamo_compiling() else written(x, gamma)


@pytest.mark.slow
def test_a_rule_that_no_compiled_model_meets() -> None:
    """It fuses in the joint graph of the rule alone."""
    examples = [torch.empty(shape, device="npu", requires_grad=True) for shape in ((4, 8), (8,))]
    found = validate_replacement(
        other_in_dynamo, fused, examples, trace_fn=joint_fwd_bwd, dtypes=[torch.float32], max_examples=2
    )
    assert found.verdict == "never-matches", found
    assert "not through torch.compile" in str(found)


class _OtherSign(torch.autograd.Function):
    """The hyperbolic tangent of ``x * a``; the gradient is right where the number is positive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.a = a
        return torch.tanh(a * x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * abs(ctx.a) * (1 - torch.tanh(ctx.a * x).square()), None


def other_sign(x: Any, a: float) -> Any:
    """Forward the same."""
    return _OtherSign.apply(x, a)


def scaled_before(x: Any, a: float) -> Any:
    """The same."""
    return torch.tanh(a * x)


def scaled(x: Any, a: float) -> Any:
    """A pattern with a numeric argument."""
    return (x * a).tanh()


@pytest.mark.slow
@pytest.mark.parametrize(("replacement", "verdict"), [(scaled_before, "proven on 12"), (other_sign, "refuted")])
def test_other_numbers_are_tried(replacement: Any, verdict: str) -> None:
    """The number is no input of the joint graph; a negative one shows the wrong gradient."""
    found = validate_replacement(
        scaled, replacement, [torch.empty(4, 8, device="npu", requires_grad=True)],
        trace_fn=joint_fwd_bwd, scalar_workaround={"a": 0.7}, dtypes=[torch.float32], max_examples=12,
    )  # fmt: skip
    assert found.verdict == verdict, found
    assert found.programs == 12
