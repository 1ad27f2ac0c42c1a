"""Sizes that are products of three and more, which torch's tracing writes as one call of three arguments."""

from __future__ import annotations

import operator

import pytest
import torch
from device_helpers import NPU
from torch import fx

from npugraph_ex.frontend.upstream_repairs import nary_products


@pytest.mark.slow
def test_inputs_that_share_memory_have_their_strides() -> None:
    """A base of two inputs is read with the strides that they have in each call."""

    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x.copy_(y + z)
        return x * 2

    def inputs(first: int, second: int) -> list[torch.Tensor]:
        base = torch.arange(float(first * second * 384), device=NPU).view(first, second, 16, 24)
        return [base[..., ::2], base[..., ::2], torch.ones(12, device=NPU)]

    mine = [inputs(*sizes) for sizes in ((6, 5), (5, 7), (6, 5), (3, 9))]
    eagers = [inputs(*sizes) for sizes in ((6, 5), (5, 7), (6, 5), (3, 9))]
    torch.compiler.reset()
    graph = torch.compile(program, backend="npugraph_ex", fullgraph=True, options={"require_capture": True})
    for got, want in zip(mine, eagers, strict=True):
        assert torch.equal(graph(*got).cpu(), program(*want).cpu())
        assert torch.equal(got[0].cpu(), want[0].cpu())


def test_every_factor_counts() -> None:
    """A product of five is four products of two, each with the value that it has."""
    graph = fx.Graph()
    factors = [graph.placeholder(f"s{number}") for number in range(4)]
    for node, value in zip(factors, (2, 3, 5, 7), strict=True):
        node.meta["val"] = value
    product = graph.call_function(operator.mul, (192, *factors))
    product.meta["val"] = 192 * 210
    graph.output(product)
    nary_products.pair(graph)
    assert fx.GraphModule({}, graph)(2, 3, 5, 7) == 192 * 210
    calls = graph.find_nodes(op="call_function", target=operator.mul)
    assert [call.meta["val"] for call in calls] == [384, 1152, 5760, 40320]
