"""The models that the benches compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]


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
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x + self.down(nn.functional.silu(self.up(normed)))


class Stack(nn.Module):
    """A stack of layers with as many inputs and outputs as asked for: small, so that host cost is what one sees.

    Args:
        layers: how many.
        outputs: how many results; the first is the stack's, the others are sums over it.
        width: size of the last dimension.
    """

    def __init__(self, layers: int, *, outputs: int = 2, width: int = 16) -> None:
        super().__init__()
        self.outputs = outputs
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, *inputs: torch.Tensor) -> Inputs:
        """Add the inputs, (tokens, width) each, run the layers, and return the result and sums of shape (tokens,)."""
        x = inputs[0]
        for other in inputs[1:]:
            x = x + other
        for layer in self.layers:
            x = layer(x)
        return (x, *((x + number).sum(-1) for number in range(1, self.outputs)))


def stack(layers: int, *, inputs: int = 2, outputs: int = 2) -> tuple[Stack, Inputs]:
    """A stack on the device, and inputs for it."""
    model = Stack(layers, outputs=outputs).eval().to("npu")
    return model, tuple(torch.randn(4, 16).to("npu") for _ in range(inputs))


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
    }
