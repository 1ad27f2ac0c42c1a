"""The text of a graph says nothing of where inputs lie, so a graph that depends on it is not saved."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import npugraph_ex
from tests.device_helpers import NPU


def _writing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


def test_a_graph_that_writes_the_memory_of_two_inputs_is_not_saved() -> None:
    """Loaded, it would read a copy of the second input from before the write."""
    x, alone = torch.ones(4, device=NPU), torch.ones(2, device=NPU)
    for other in (x[:2], alone):
        graph = npugraph_ex.compile_fx(make_fx(_writing, tracing_mode="fake")(x, other), (x, other))
        assert (graph.get_code() is None) == (other is not alone)
