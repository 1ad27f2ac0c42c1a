"""What one rule leaves, another may fuse, in every layer of a model: repeated matches do not seem to share memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import npugraph_ex
from npugraph_ex import testing
from npugraph_ex.testing import Case, Input

LAYERS = 3
RULE = "add_rms_norm_dynamic_quant"


def _source() -> str:
    lines, total = ["def program(x0, x1, x2):"], "x0"
    for layer in range(LAYERS):
        lines += [
            f"s{layer} = torch.ops.aten.add.Tensor({total}, x1)",
            f"y{layer}, r{layer} = torch.ops.npu.npu_rms_norm.default(s{layer}, x2)",
            f"q{layer}, d{layer} = torch.ops.npu.npu_dynamic_quant.default(y{layer})",
        ]
        total = f"s{layer}"
    results = ", ".join(f"q{layer}, d{layer}" for layer in range(LAYERS))
    return "\n    ".join([*lines, f"return ({results}, {total})"]) + "\n"


def _sum_and_norm(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.add(x, residual)
    return torch.ops.npu.npu_rms_norm(total, gamma)[0], total


def _both(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, gamma)
    return y, total


def _case(*, dynamic: bool) -> Case:
    rows = Input(("s0", 64), seed=1)
    sizes = ({"s0": 3}, {"s0": 5 if dynamic else 3}, {"s0": 3}, {"s0": 3})
    inputs = (rows, Input(("s0", 64), seed=2), Input((64,), seed=3))
    return Case(_source(), inputs, sizes=sizes, dynamic=dynamic, expected=2 * LAYERS)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_users_rule_and_then_a_built_in_one_fuse_every_layer(*, dynamic: bool) -> None:
    """The residual sum of one layer is an input of the next one's match, and another tensor than its result."""
    with FakeTensorMode():
        examples = [torch.empty(shape, dtype=torch.float16, device="npu") for shape in ((2, 64), (2, 64), (64,))]
    with npugraph_ex.register_replacement(_sum_and_norm, _both, examples) as rule:
        outcome = testing.check(_case(dynamic=dynamic))
    assert outcome.failures == []
    assert outcome.report.fusions(rule.name) == outcome.report.fusions(RULE) == LAYERS
