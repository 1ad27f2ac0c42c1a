"""Masks of dropout as the device stores them: one bit an element, the first in a byte's lowest bit, rounded up to 128 bits."""

from __future__ import annotations

import torch

_ALIGNED = 128


def packed(kept: torch.Tensor) -> torch.Tensor:
    """The boolean elements of ``kept`` as bits of uint8; those that fill up the last 128 are 0."""
    bits = torch.nn.functional.pad(kept.reshape(-1).to(torch.uint8), (0, -kept.numel() % _ALIGNED))
    return (bits.reshape(-1, 8) << torch.arange(8, dtype=torch.uint8, device=kept.device)).sum(-1, dtype=torch.uint8)


def generator_at(seed: int, offset: int) -> torch.Generator:
    """The generator of a seed and an offset: masks that are made apart and those that attention makes are the same."""
    return torch.Generator().manual_seed((seed * 0x9E3779B1 + offset) % 2**63)


def drawn(size: tuple[int, ...] | list[int] | torch.Size, p: float, **options: object) -> torch.Tensor:
    """Which elements are kept, each with probability ``1 - p``; options go to ``torch.rand``."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be a probability, between 0 and 1; it is {p}.")
    return torch.rand(tuple(size), **options) >= p  # type: ignore[call-overload, no-any-return]


def dropped(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """``x / (1 - p)`` where the packed mask has a 1, 0 elsewhere."""
    if mask.numel() * 8 < x.numel():
        raise ValueError(
            f"the mask must have a bit for each of the {x.numel()} elements; it has {mask.numel()} bytes of eight bits."
        )
    bits = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
    kept = bits.reshape(-1)[: x.numel()].reshape(x.shape).bool()
    return torch.where(kept, x / (1 - p) if p < 1.0 else 0.0, 0.0)
