"""Tensors that a saved graph holds itself: the same memory after it was read as before it was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_helpers import NPU, describe
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import npugraph_ex
from npugraph_ex.frontend.entry.compiler import CompiledFxArtifacts, CompiledFxGraph
from npugraph_ex.saving.nodes import decode_graph, encode_graph

aten = torch.ops.aten


class Holder(torch.nn.Module):
    """Has a constant in a part of its own."""

    def __init__(self, constant: torch.Tensor) -> None:
        super().__init__()
        self.part = torch.nn.Module()
        self.part.register_buffer("held", constant)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Reads it as it lies, copied, and as memory."""
        held = self.part.held
        return x + held, held * 1, torch.as_strided(held, (3,), (1,)) * x.sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).view(3, 4),
        lambda: torch.arange(12.0).view(4, 3).t(),
        lambda: torch.arange(30.0).view(3, 10)[:, 1:9:2],
        lambda: torch.arange(4.0).expand(3, 4),
        lambda: torch.arange(6.0).unfold(0, 4, 1),
    ],
    ids=["rows", "columns", "gaps", "expanded", "windows"],
)
def test_a_constant_keeps_its_layout(make: Callable[[], torch.Tensor]) -> None:
    """Values, and the strides of what follows from it, are those of before."""
    x, host = torch.ones(3, 4, device=NPU), make()
    flat = host.as_strided((host.untyped_storage().nbytes() // 4,), (1,), 0).to(NPU)  # copying to a device may pack
    model = Holder(flat.as_strided(host.size(), host.stride(), host.storage_offset()))
    expected = model(x)
    gm = make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    text = npugraph_ex.compile_fx(gm, [x]).get_code()
    loaded = CompiledFxGraph.load_artifacts(CompiledFxArtifacts(py_code=text))
    for _ in range(2):
        for have, want in zip(loaded(x), expected, strict=True):
            assert describe(have) == describe(want)
            assert torch.equal(have.cpu(), want.cpu())


def test_readers_of_one_constant_share_it() -> None:
    """What one node writes into a constant, a later one reads; and it is written down once."""
    graph = fx.Graph()
    graph.call_function(aten.add_.Tensor, (graph.get_attr("held"), graph.placeholder("x")))
    graph.output(graph.call_function(aten.mul.Tensor, (graph.get_attr("held"), 2)))
    spelt = encode_graph(fx.GraphModule({"held": torch.arange(3.0)}, graph), None)
    assert sum("data" in entry["target"]["constant"] for entry in spelt if entry["op"] == "get_attr") == 1
    loaded = decode_graph(spelt, torch.device("cpu"))
    assert torch.equal(loaded(torch.ones(3)), torch.tensor([2.0, 4.0, 6.0]))


@pytest.mark.parametrize("size", [(0, 3), ()])
def test_constants_without_rows(size: tuple[int, ...]) -> None:
    """An empty constant, and one that is a single number."""
    graph = fx.Graph()
    graph.output(graph.get_attr("held"))
    held = torch.ones(size, dtype=torch.bfloat16)
    loaded = decode_graph(encode_graph(fx.GraphModule({"held": held}, graph), None), torch.device("cpu"))()
    assert describe(loaded) == describe(held)
    assert torch.equal(loaded, held)
