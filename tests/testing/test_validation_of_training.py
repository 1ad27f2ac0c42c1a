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


def test_a_rule_that_no_compiled_model_meets() -> None:
    """It fuses in the joint graph of the rule alone."""
    examples = [torch.empty(shape, device="npu", requires_grad=True) for shape in ((4, 8), (8,))]
    found = validate_replacement(
        other_in_dynamo, fused, examples, trace_fn=joint_fwd_bwd, dtypes=[torch.float32], max_examples=2
    )
    assert found.verdict == "never-matches", found
    assert "not through torch.compile" in str(found)
