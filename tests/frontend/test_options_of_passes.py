"""What each option of the passes changes: which run, what they fuse, whether their values are checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from option_effects import bump, chain, compiled, fresh, halves, ones, outcome, quantised, shows, told
from torch import fx

from npugraph_ex.config.compiler_config import CompilerConfig
from npugraph_ex.errors import GraphVerificationError


@pytest.mark.slow
@shows("remove_noop_ops")
def test_remove_noop_ops() -> None:
    """The copy of a value that nobody else uses is launched only when the pass is off."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).clone() * 2

    # Reinplacing would find the copy too.
    off = {"inplace_pass": False}
    kernels = {on: told(function, *fresh(2), remove_noop_ops=on, **off).graph.kernels_after for on in (True, False)}
    assert kernels == {True: 2, False: 3}


@pytest.mark.slow
@shows("remove_cat_ops")
def test_remove_cat_ops() -> None:
    """The parts of a concatenation are written in place, or concatenated."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + 1, x * 2])

    done = {on: outcome(told(function, *fresh(2), remove_cat_ops=on), "cat_removal") for on in (True, False)}
    assert done == {True: "changed", False: "skipped"}


@pytest.mark.slow
@shows("inplace_pass")
def test_inplace_pass() -> None:
    """An intermediate result is computed in place, or not."""
    done = {on: outcome(told(chain, *fresh(2), inplace_pass=on), "reinplace_intermediates") for on in (True, False)}
    assert done == {True: "changed", False: "skipped"}


@pytest.mark.slow
@shows("input_inplace_pass")
def test_input_inplace_pass() -> None:
    """A written input is written by the operator itself, or by a copy after it."""
    kernels = {on: told(bump, *fresh(2), input_inplace_pass=on).graph.kernels_after for on in (True, False)}
    assert kernels == {True: 2, False: 3}


@pytest.mark.slow
@shows("pattern_fusion_pass")
def test_pattern_fusion_pass() -> None:
    """Normalisation and quantisation are fused, or not."""
    fused = {on: told(quantised, halves(), pattern_fusion_pass=on).graph.report.fusions() for on in (True, False)}
    assert fused == {True: 1, False: 0}


@pytest.mark.slow
@shows("lift")
def test_lift() -> None:
    """A norm that is spelled in ATen operators becomes the operator, or stays: its root differs in the last bit of float32."""

    def function(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    reports = {how: told(function, (ones(4, 8).half(),), lift=how).graph.report for how in ("off", "exact", "judged")}
    fused = {how: report.fusions("lift_rms_norm") for how, report in reports.items()}
    assert fused == {"off": 0, "exact": 0, "judged": 1}


@pytest.mark.slow
@shows("join_projections")
def test_join_projections() -> None:
    """Gate and up are one product, or two."""
    weights = [torch.nn.Parameter(ones(8, 8).half(), requires_grad=False) for _ in range(2)]

    def function(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())

    entries = {
        on: told(function, (ones(4, 8).half(), *weights), lift="judged", join_projections=on) for on in (False, True)
    }
    fused = {on: entry.graph.report.fusions() for on, entry in entries.items()}
    assert fused == {False: 0, True: 1}


@pytest.mark.slow
@shows("every_row_attends")
def test_every_row_attends() -> None:
    """Attention by a plain softmax is one operator where it is declared, or stays."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x

    fused = {
        on: told(function, (ones(1, 2, 4, 16).half(),), lift="judged", every_row_attends=on).graph.report.fusions()
        for on in (False, True)
    }
    assert fused == {False: 0, True: 1}


@pytest.mark.slow
@shows("auto_streams")
def test_auto_streams() -> None:
    """Two branches of seven kernels run on one stream, or on two."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(7):
            x, y = x * 2, y + 1
        return x - y

    branches = {on: told(function, *fresh(2), auto_streams=on).graph.report.branches for on in (False, True)}
    assert [(on, len(branch.nodes)) for on, found in branches.items() for branch in found] == [(True, 7)]


@pytest.mark.slow
@shows("fusion_rules")
def test_fusion_rules() -> None:
    """One rule is switched off by its name."""
    assert told(quantised, halves()).graph.report.fusions() == 1
    entry = told(quantised, halves(), fusion_rules={"add_rms_norm_dynamic_quant": False})
    assert entry.graph.report.fusions() == 0
    with pytest.raises(Exception, match=r"did you mean 'add_rms_norm_quant'\?"):
        compiled(quantised, fusion_rules={"add_rms_norm_quants": False})(*halves())


def _wrong(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
    """A user's pass that keeps every shape and computes something else."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.target = torch.ops.aten.neg.default


@shows("check_numerics")
def test_check_numerics() -> None:
    """A pass that changes values is accepted without the check and refused with it."""
    compiled(chain, post_grad_custom_pre_pass=_wrong)(ones())
    with pytest.raises(Exception, match="other values") as caught:
        compiled(chain, post_grad_custom_pre_pass=_wrong, check_numerics=True)(ones())
    assert GraphVerificationError.__name__ in repr(caught.value) or isinstance(caught.value, GraphVerificationError)


@shows("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
def test_custom_passes() -> None:
    """The user's passes run, the one before fusion and the other after it, with the config as third argument."""
    seen: list[tuple[str, list[str], object]] = []

    def note(where: str) -> Callable[[fx.GraphModule, object, object], None]:
        def run(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
            calls = [node.target._schema.name for node in gm.graph.nodes if hasattr(node.target, "_schema")]
            seen.append((where, calls, config))

        return run

    told(quantised, halves(), post_grad_custom_pre_pass=note("pre"), post_grad_custom_post_pass=note("post"))
    (first, before, config), (second, after, _) = seen
    assert (first, second) == ("pre", "post")
    assert "npu::npu_dynamic_quant" in before
    assert "npu::npu_add_rms_norm_dynamic_quant" in after
    assert isinstance(config, CompilerConfig)
