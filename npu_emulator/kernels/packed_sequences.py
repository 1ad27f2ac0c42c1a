"""Packed sequences of recurrent layers: values on the device, and on the host the number of sequences of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["packing_kernels"]


def packing_kernels() -> dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    """Return the kernel that packs, by operator name."""
    return {"aten::_pack_padded_sequence": _packed}


def _packed(
    padded: torch.Tensor,
    lengths: torch.Tensor,
    batch_first: bool,  # noqa: FBT001 - the operator's signature
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of `padded` [T, B, ...], or [B, T, ...], that lie inside their sequences, and the number of each step."""
    rows = torch.arange(padded.shape[0] * padded.shape[1]).view(padded.shape[:2])
    inside, of_each_step = torch.ops.aten._pack_padded_sequence.default(rows, lengths.cpu(), batch_first)  # noqa: SLF001 - an operator's name
    return padded.flatten(0, 1).index_select(0, inside.to(padded.device)), of_each_step
