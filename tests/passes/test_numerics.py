"""The option `check_numerics`: a pass that keeps every shape and computes something else is found."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.config import Options
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.passes import pipeline
from npugraph_ex.passes.base import Pass, PassContext

aten = torch.ops.aten


def traced() -> fx.GraphModule:
    """`relu(x + y) * 2` on fake device tensors."""
    with FakeTensorMode():
        inputs = [torch.empty(3, 4, device="npu") for _ in range(2)]
        return make_fx(lambda x, y: [torch.relu(x + y) * 2])(*inputs)


def wrong(gm: fx.GraphModule, *_: object) -> None:
    """Turn the addition into a subtraction: same shapes, other values."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.target = aten.sub.Tensor


def run(gm: fx.GraphModule, *, passes: tuple[Pass, ...] | None = None, **options: object) -> list[str]:
    """Run the pipeline and return the outcomes of its passes."""
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    chosen = pipeline.PIPELINE if passes is None else passes
    return [record.outcome for record in pipeline.run(gm, inputs, Options.of(options), passes=chosen).passes]


def test_a_users_wrong_pass_raises() -> None:
    """The error names the pass and the value; without the option nobody notices."""
    run(traced(), post_grad_custom_post_pass=wrong)
    with pytest.raises(GraphVerificationError, match=r"post_grad_custom_post_pass.*mul.*other values"):
        run(traced(), post_grad_custom_post_pass=wrong, check_numerics=True)


def test_a_built_in_wrong_pass_is_rolled_back(caplog: pytest.LogCaptureFixture) -> None:
    """A recoverable pass that changes values is undone and reported."""

    def run_wrong(gm: fx.GraphModule, context: PassContext) -> None:
        wrong(gm, context)

    gm = traced()
    with caplog.at_level(logging.WARNING):
        outcomes = run(gm, passes=(Pass("wrong", run_wrong),), check_numerics=True)
    assert outcomes == ["rolled back"]
    assert next(node.target for node in gm.graph.nodes if node.op == "call_function") is aten.add.Tensor
    assert "other values" in caplog.text


def test_right_passes_pass() -> None:
    """The pipeline's own passes survive the check, symbolic sizes and mutation included."""

    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = torch.cat([x + 1, y * 2]).relu()
        x.copy_(y.exp())
        return [z, z.sum()]

    with FakeTensorMode():
        inputs = [torch.empty(3, 4, device="npu") for _ in range(2)]
        gm = make_fx(torch.func.functionalize(program))(*inputs)
    assert "rolled back" not in run(gm, check_numerics=True)


def test_fusion_passes_the_check() -> None:
    """A fused operator may round less often; that is within the tolerance."""

    def program(x: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        y, _, total = torch.ops.npu.npu_add_rms_norm(x, r, g)
        quantised, scale = torch.ops.npu.npu_dynamic_quant(y)
        return [quantised, scale, total]

    with FakeTensorMode():
        inputs = [torch.empty(*size, device="npu", dtype=torch.float16) for size in ((4, 64), (4, 64), (64,))]
        gm = make_fx(program)(*inputs)
    assert "rolled back" not in run(gm, check_numerics=True)
    assert any("dynamic_quant" in str(node.target) and "add_rms" in str(node.target) for node in gm.graph.nodes)
