"""Int4 values as torch_npu stores them: eight in one int32, or two in a byte, the first in its lowest four bits."""

from __future__ import annotations

import torch

INT4_MAX = 7.0
PACKED = 8
INT4 = (16, torch.quint4x2)
"""What a dtype argument says that asks for int4: the code of ``torch.quint4x2`` or that dtype."""


def pack(operator: str, values: torch.Tensor) -> torch.Tensor:
    """Whole numbers [..., 8 N], cut off at -8 and 7, as int32 [..., N], contiguous."""
    if values.dim() == 0 or values.shape[-1] % PACKED:
        raise ValueError(
            f"{operator}: for int4 the last dimension must be a multiple of 8; the shape is {tuple(values.shape)}."
        )
    nibbles = values.clamp(-8, 7).to(torch.int64).bitwise_and(15).unflatten(-1, (-1, PACKED))
    words = (nibbles << torch.arange(0, 4 * PACKED, 4, device=values.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_bytes(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers [..., 2 N], cut off at -8 and 7, as uint8 [..., N], the first of two in the low half."""
    nibbles = values.clamp(-8, 7).bitwise_and(15).to(torch.uint8)
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Int32 [..., N] as the int8 values [..., 8 N] that it holds, from -8 to 7."""
    shifts = torch.arange(0, 4 * PACKED, 4, device=packed.device)
    nibbles = (packed.to(torch.int64).unsqueeze(-1) >> shifts).bitwise_and(15).flatten(-2)
    return torch.where(nibbles > 7, nibbles - 16, nibbles).to(torch.int8)
