"""Masks of dropout as the device stores them: one bit an element, the first in a byte's lowest bit, rounded up to 128 bits."""

from __future__ import annotations

import torch

_ALIGNED = 128
_SPREAD = 0x9E3779B97F4A7C15
"""The golden ratio in 64 bits. An emulated device gives a draw at an offset of its generator the seed of `generator_at`."""
_WORD = 2**64


def packed(kept: torch.Tensor) -> torch.Tensor:
    """The boolean elements of ``kept`` as bits of uint8; those that fill up the last 128 are 0."""
    bits = torch.nn.functional.pad(kept.reshape(-1).to(torch.uint8), (0, -kept.numel() % _ALIGNED))
    return (bits.reshape(-1, 8) << torch.arange(8, dtype=torch.uint8, device=kept.device)).sum(-1, dtype=torch.uint8)


def generator_at(seed: int, offset: int) -> torch.Generator:
    """The generator of a seed and an offset: masks that are made apart and those that attention makes are the same."""
    return torch.Generator().manual_seed((seed + (offset + 1) * _SPREAD) % _WORD)


def drawn_seed() -> int:
    """The seed, at offset 0, of a mask from torch's generator, which moves on.

    It is the one that `generator_at` makes that generator of, if nothing was drawn from it yet: on a device a mask that is
    made with the generator's seed and offset is the same as the one that an operator draws there.
    """
    now = torch.default_generator.get_state()
    fresh = torch.Generator().manual_seed(torch.initial_seed() % _WORD)
    number = int(torch.randint(2**62, (1,)))
    if torch.equal(fresh.get_state(), now):
        number = (torch.initial_seed() - _SPREAD) % _WORD
    return number if number < _WORD // 2 else number - _WORD


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
