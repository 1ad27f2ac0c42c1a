"""The models that the benches compile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]


def between_layers(x: torch.Tensor, norm: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Map (tokens, width) to the same shape: a layer as a function of its parameters."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm
    return x + nn.functional.linear(nn.functional.silu(nn.functional.linear(normed, up)), down)


class Layer(nn.Module):
    """One pre-norm feed-forward layer with three parameters: a norm weight and two projections.

    Args:
        width: size of the last dimension.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, width) to the same shape."""
        return between_layers(x, self.weight, self.up.weight, self.down.weight)


def _run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(x)
    return result


class Stack(nn.Module):
    """A stack of layers with as many inputs and outputs as asked for: small, so that host cost is what one sees.

    Args:
        layers: how many.
        outputs: how many results; the first is the stack's, the others are sums over it.
        width: size of the last dimension.
        regions: whether the layers are calls of one nested compile region.
    """

    def __init__(self, layers: int, *, outputs: int = 2, width: int = 16, regions: bool = False) -> None:
        super().__init__()
        self.outputs = outputs
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self._run = torch.compiler.nested_compile_region(_run) if regions else _run

    def forward(self, *inputs: torch.Tensor) -> Inputs:
        """Add the inputs, (tokens, width) each, run the layers, and return the result and sums of shape (tokens,)."""
        x = inputs[0]
        for other in inputs[1:]:
            x = x + other
        for layer in self.layers:
            x = self._run(layer, x)
        return (x, *((x + number).sum(-1) for number in range(1, self.outputs)))


def stack(
    layers: int, *, inputs: int = 2, outputs: int = 2, width: int = 16, regions: bool = False
) -> tuple[Stack, Inputs]:
    """A stack on the device, and inputs for it."""
    model = Stack(layers, outputs=outputs, width=width, regions=regions).eval().to("npu")
    return model, tuple(torch.randn(4, width).to("npu") for _ in range(inputs))


class CacheStep(nn.Module):
    """A decode step that writes one row of a key cache in place and attends over all of it.

    Args:
        width: size of the last dimension.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Map (1, width) to the same shape; ``cache`` is (length, width), ``row`` one index."""
        cache.index_copy_(0, row, self.key(x))
        weights = torch.softmax(x @ cache.t(), -1)
        return self.out(weights @ cache)


class NormQuant(nn.Module):
    """Residual norms followed by dynamic quantisation: what the default fusion rules are for.

    Args:
        layers: how many norms.
        width: size of the last dimension.
    """

    def __init__(self, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(width, dtype=torch.float16) for _ in range(layers))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Inputs:
        """Quantise the norm of (tokens, width) float16 layer after layer; return int8 values, scales and the residual."""
        for weight in self.weights:
            normed, _, residual = torch.ops.npu.npu_add_rms_norm(x, residual, weight, 1e-6)
            quantised, scale = torch.ops.npu.npu_dynamic_quant(normed)
            x = quantised.to(torch.float16) * scale.unsqueeze(-1).to(torch.float16)
        return quantised, scale, residual


class Heads(nn.Module):
    """Splits, transposes and concatenates, as attention does around its heads: views and copies for the passes to remove."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, 64) to the same shape."""
        first, second = x.view(-1, 4, 16).split(8, dim=-1)
        rotated = torch.cat([(-second).clone(), first * 1], dim=-1).to(x.dtype)
        return (rotated.reshape(x.shape) + 0) * 2


class Gathered(nn.Module):
    """Concatenates rows that were computed for it, pads by nothing, copies what nobody writes, and keeps a running state."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Inputs:
        """Map (tokens, 64) to (2 * tokens, 64); ``state`` of the result's shape is added to."""
        rows = torch.cat([x * 2, torch.tanh(x)], dim=0)
        rows = nn.functional.pad(rows, (0, 0)).clone().contiguous()
        state.add_(rows)
        return (rows.exp() * 2).tanh() + state, rows[:1].neg()


def device_models() -> dict[str, Callable[[], tuple[nn.Module, Inputs]]]:
    """Models for counting what the device does, by name; each call makes one on the device with its inputs."""

    def cache_step() -> tuple[nn.Module, Inputs]:
        return CacheStep().to("npu"), (torch.randn(1, 64).npu(), torch.zeros(32, 64).npu(), torch.tensor([3]).npu())

    def norm_quant() -> tuple[nn.Module, Inputs]:
        half = [torch.randn(8, 128).to(torch.float16).npu() for _ in range(2)]
        return NormQuant().to("npu"), tuple(half)

    def heads() -> tuple[nn.Module, Inputs]:
        return Heads(), (torch.randn(8, 64).npu(),)

    return {
        "feed-forward stack, 4 layers": lambda: stack(4),
        "cache step": cache_step,
        "norms and quantisation": norm_quant,
        "heads": heads,
        "gathered rows and a state": lambda: (Gathered(), (torch.randn(8, 64).npu(), torch.zeros(16, 64).npu())),
    }


class Experts(nn.Module):
    """Two independent feed-forward branches on one input, as a shared expert beside routed ones, added up at the end.

    Args:
        layers: how many products each branch has.
        width: size of the last dimension.
        side: compute the second branch on a stream of its own.
    """

    def __init__(self, layers: int = 6, width: int = 2048, *, side: bool) -> None:
        super().__init__()
        self.side = side
        self.first, self.second = (
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, width) to the same shape."""
        from npugraph_ex.scope import npu_stream_switch

        second = x
        with npu_stream_switch("side") if self.side else nullcontext():
            for layer in self.second:
                second = nn.functional.silu(layer(second))
        first = x
        for layer in self.first:
            first = nn.functional.silu(layer(first))
        return first + second


def modelled_models() -> dict[str, Callable[[], tuple[nn.Module, Inputs]]]:
    """Models of sizes that a chip is used for, in float16, for its modelled clock."""

    def half(model: nn.Module, *shapes: tuple[int, int]) -> tuple[nn.Module, Inputs]:
        return model.half().to("npu").eval(), tuple(torch.randn(shape).half().npu() for shape in shapes)

    return {
        "4 norms with quantisation, 64 x 4096": lambda: half(NormQuant(4, 4096), (64, 4096), (64, 4096)),
        "feed-forward stack, 4 layers, 16 x 1024": lambda: half(Stack(4, width=1024), (16, 1024), (16, 1024)),
        "two branches of 6, 16 x 2048, one stream": lambda: half(Experts(side=False), (16, 2048)),
        "two branches of 6, 16 x 2048, two streams": lambda: half(Experts(side=True), (16, 2048)),
    }
