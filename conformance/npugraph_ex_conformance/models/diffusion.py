"""Denoisers of images in plain PyTorch, small and random: a UNet and a DiT, built of the parts that such models have.

Both take a noisy image [batch, channels, height, width] and the time step [batch], and give the noise as a tuple of one tensor.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

CHANNELS, SIZE = 4, 16
_FREQUENCIES, _SLOWEST = 32, 10000.0


def _of_time(step: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of the time step, [batch, 2 * frequencies], as attention's inventors spell positions."""
    speeds = torch.exp(
        -math.log(_SLOWEST) / _FREQUENCIES * torch.arange(_FREQUENCIES, device=step.device, dtype=torch.float32)
    )
    angles = step[:, None].float() * speeds
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(step.dtype)


class _Time(nn.Sequential):
    """What the time step says to each block."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2 * _FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))


class _Residual(nn.Module):
    """Two convolutions behind norms, with the time between them."""

    def __init__(self, old: int, new: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, old), nn.GroupNorm(8, new)
        self.into, self.out = nn.Conv2d(old, new, 3, padding=1), nn.Conv2d(new, new, 3, padding=1)
        self.time = nn.Linear(time, new)
        self.skip = nn.Conv2d(old, new, 1) if old != new else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """``x`` [batch, old, h, w] and ``time`` [batch, width] -> [batch, new, h, w]."""
        hidden = self.into(functional.silu(self.first(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        result: torch.Tensor = self.skip(x) + self.out(functional.silu(self.second(hidden)))
        return result


class _DiffusionAttention(nn.Module):
    """Attention among all places, with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [batch, places, width] -> the same shape."""
        batch, places, width = x.shape
        q, k, v = self.qkv(x).view(batch, places, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        result: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, places, width))
        return result


class UNet(nn.Module):
    """Down to half the size, attention there, and up again beside what was before."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.time = _Time(2 * width)
        self.into = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.before, self.after = _Residual(width, width, 2 * width), _Residual(2 * width, width, 2 * width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle, self.norm = _Residual(2 * width, 2 * width, 2 * width), nn.GroupNorm(8, 2 * width)
        self.attention = _DiffusionAttention(2 * width, heads)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last, self.out = nn.GroupNorm(8, width), nn.Conv2d(width, CHANNELS, 3, padding=1)

    def forward(self, image: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor]:
        """The noise."""
        time = self.time(_of_time(step))
        beside = self.before(self.into(image), time)
        small = self.middle(self.down(beside), time)
        places = self.norm(small).flatten(2).transpose(1, 2)
        small = small + self.attention(places).transpose(1, 2).view(small.shape)
        large = self.up(functional.interpolate(small, scale_factor=2.0, mode="nearest"))
        large = self.after(torch.cat((large, beside), dim=1), time)
        return (self.out(functional.silu(self.last(large))),)


class _DitBlock(nn.Module):
    """A block of a transformer whose norms are shifted, scaled and gated by the time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attention = _DiffusionAttention(width, heads)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """``x`` [batch, places, width] and ``time`` [batch, width] -> like x."""
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(functional.silu(time))[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(self.first(x) * (1 + scale) + shift)
        hidden = functional.gelu(self.wide(self.second(x) * (1 + scale_2) + shift_2), approximate="tanh")
        result: torch.Tensor = x + gate_2 * self.narrow(hidden)
        return result


class DiT(nn.Module):
    """Patches of the image as places of a transformer."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.time, self.into = _Time(width), nn.Conv2d(CHANNELS, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (SIZE // patch) ** 2, width))
        self.blocks = nn.ModuleList(_DitBlock(width, heads) for _ in range(layers))
        self.norm, self.out = (
            nn.LayerNorm(width, elementwise_affine=False, eps=1e-6),
            nn.Linear(width, patch**2 * CHANNELS),
        )

    def forward(self, image: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor]:
        """The noise."""
        time = self.time(_of_time(step))
        x = self.into(image).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, time)
        side = SIZE // self.patch
        patches = self.out(self.norm(x)).view(-1, side, side, self.patch, self.patch, CHANNELS)
        return (patches.permute(0, 5, 1, 3, 2, 4).reshape(image.shape),)
