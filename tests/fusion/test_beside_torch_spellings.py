"""Beside torch's matcher: right matches that it loses, since the same call is written in another way."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, D103

from __future__ import annotations

from typing import Any

import pytest
import torch
from matchers import Case, add_mul, half, mul_add, negated, negated_otherwise, pair
from torch import fx

aten, npu = torch.ops.aten, torch.ops.npu


def without_dead_code(gm: fx.GraphModule) -> None:
    gm.graph.eliminate_dead_code()


def both(x: Any, g: Any) -> Any:
    y, rstd = npu.npu_rms_norm(x, g)
    return npu.npu_dynamic_quant(y)[0], rstd


def both_otherwise(x: Any, g: Any) -> Any:
    y, rstd = npu.npu_rms_norm(x, g)
    return npu.npu_dynamic_quant(torch.mul(y, 1))[0], rstd


def spelt_out(gm: fx.GraphModule) -> None:
    """Defaults written out, as a client's own code may: epsilon, trailing Nones, int8."""
    for node in gm.graph.find_nodes(op="call_function", target=npu.npu_rms_norm.default):
        node.args = (*node.args, 1e-6)
    for node in gm.graph.find_nodes(op="call_function", target=npu.npu_dynamic_quant.default):
        node.kwargs = {"smooth_scales": None, "group_index": None, "dst_type": 1, "quant_mode": "pertoken"}


LEGAL: dict[str, Case] = {
    "defaults written out": Case(both, both, both_otherwise, [half(4, 16), half(16)], edit=spelt_out),
    "an output that nobody uses": Case(
        lambda x, g: both(x, g)[0], both, both_otherwise, [half(4, 16), half(16)], edit=without_dead_code
    ),
    "alpha written out": Case(lambda x, y: aten.add.Tensor(x, y, alpha=1) * y, add_mul, mul_add, pair()),
    "a keyword for a positional argument": Case(
        lambda x, g: npu.npu_dynamic_quant(npu.npu_rms_norm(x, g, epsilon=1e-6)[0])[0],
        lambda x, g: npu.npu_dynamic_quant(npu.npu_rms_norm(x, g)[0])[0],
        lambda x, g: npu.npu_dynamic_quant(torch.mul(npu.npu_rms_norm(x, g)[0], 1))[0],
        [half(4, 16), half(16)],
    ),
    "another spelling of int8": Case(
        lambda x, y: npu.npu_dynamic_quant(torch.neg(x), dst_type=torch.int8),
        negated,
        negated_otherwise,
        pair(),
        [half(4, 16)],
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_right_matches_are_not_lost(name: str) -> None:
    """What is the same call is the same pattern, however it is written."""
    report, _ = LEGAL[name].by_us()
    assert report.fusions() == 1, report.table()


@pytest.mark.parametrize("name", ["defaults written out", "an output that nobody uses"])
def test_torch_loses_some_of_them(name: str) -> None:
    """So they are worth a test."""
    assert LEGAL[name].by_torch()[0] == 0
