"""Batch normalisation's running statistics, which operators of torch write though their schemas do not say so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from device_helpers import NPU, check
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from npugraph_ex.frontend.entry.backend import compile_fx
from npugraph_ex.graph.operators import written_by

Tensors = Sequence[torch.Tensor]


def test_statistics_of_several_processes() -> None:
    """`SyncBatchNorm` writes them from those of each process: reads before and after it, and the arguments, are eager mode's."""

    def program(x: torch.Tensor, means: torch.Tensor, deviations: torch.Tensor, *rest: torch.Tensor) -> Tensors:
        before, (mean, var, counts) = rest[0] + 0, rest
        found = torch.batch_norm_gather_stats_with_counts(x, means, deviations, mean, var, 0.1, 1e-3, counts)
        return before, found[0] + 1, mean * 2, var * 2

    def inputs() -> Tensors:
        each = torch.arange(6.0, device=NPU).view(2, 3)
        ones, counts = torch.ones(2, 3, device=NPU), torch.tensor([8.0, 12.0], device=NPU)
        return torch.ones(4, 3, 5, device=NPU), each, each + 1, *ones, counts

    check(program, [inputs() for _ in range(2)])


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_of_make_fx(training: bool) -> None:
    """Its batch norm writes its arguments in training alone, also where nothing reads what it returns."""

    def program(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Tensors:
        before = mean + 1
        functional.batch_norm(x, mean, var, training=training)
        return before, mean * 2

    def inputs() -> Tensors:
        return torch.arange(60.0, device=NPU).view(4, 3, 5), torch.ones(3, device=NPU), torch.ones(3, device=NPU)

    gm = make_fx(program)(*inputs())
    (norm,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm.default)
    assert len(written_by(norm)) == 2 * training
    graph, own = compile_fx(gm, list(inputs())), inputs()
    expected = program(*own)
    for _ in range(2):
        mine = inputs()
        assert all(map(torch.equal, graph(*mine), expected))
        assert all(map(torch.equal, mine, own))
