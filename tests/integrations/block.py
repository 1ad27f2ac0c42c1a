"""A decoder block in small, with a cache that it writes in place: what an engine compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from torch import fx

WIDTH = 32


class Block(torch.nn.Module):
    """Norm with residual, a product, a gate, and a write into a cache; the first dimension is the batch."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.gamma = torch.nn.Parameter(torch.rand(WIDTH, generator=generator, dtype=torch.float16))
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float16) / 8)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two results of ``x``'s shape; the first rows of ``cache`` grow."""
        y, _, summed = torch_npu.npu_add_rms_norm(x, residual, self.gamma, 1e-6)
        cache[: x.shape[0]] += summed
        z = torch.nn.functional.gelu(y @ self.weight) * cache[: x.shape[0]]
        return z, summed


def block() -> Block:
    """The same block in every process."""
    return Block().npu().requires_grad_(requires_grad=False)


def inputs(batch: int) -> list[torch.Tensor]:
    """Inputs for one batch size, the same in every process; the last is the cache."""
    generator = torch.Generator().manual_seed(batch)
    made = [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float16) for rows in (batch, batch, 16)]
    return [tensor.npu() for tensor in made]


_SOURCES = ("L_x_", "L_residual_", "L_cache_")


class Compiled:
    """A block that Dynamo traced, with a symbolic batch, and a compiler of the test's choice compiled.

    Args:
        model: the block.
        compiler: ``compiler(graph, example_inputs)`` gives the callable.

    Attributes:
        graph: Dynamo's graph.
        names: of the graph's inputs, in order.
        function: what the compiler returned.
        model: the block under `torch.compile`.
    """

    def __init__(self, model: Block, compiler: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]) -> None:
        def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            self.graph = graph
            self.names = [node.target for node in graph.graph.find_nodes(op="placeholder")]
            self.function = compiler(graph, example_inputs)
            return self.function

        torch.compiler.reset()
        self.model = torch.compile(model, backend=backend, fullgraph=True)
        arguments = inputs(4)
        for argument in arguments[:2]:
            torch._dynamo.mark_dynamic(argument, 0)
        with torch.no_grad():
            self.model(*arguments)


def bind(names: list[str], model: Block, arguments: list[torch.Tensor]) -> list[Any]:
    """The graph's inputs for one call, in its order."""
    given: dict[str, Any] = dict(zip(_SOURCES, arguments, strict=True))
    given.update({f"L_self_parameters_{name}_": parameter for name, parameter in model.named_parameters()})
    return [given.get(name, arguments[0].shape[0]) for name in names]


def check(
    model: Block, function: Callable[..., Any], names: list[str], *, batches: tuple[int, ...] = (4, 7, 2)
) -> None:
    """Call a compiled graph for several batch sizes: results and the cache must be as in eager mode."""
    for batch in batches:
        mine, eager = inputs(batch), inputs(batch)
        with torch.no_grad():
            want, have = model(*eager), function(*bind(names, model, mine))
        for expected, found in zip([*want, *eager], [*have, *mine], strict=True):
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0, atol=0, msg=f"batch {batch}")
            assert found.stride() == expected.stride()
