"""Signs as bits: packed, eight to a byte, and unpacked, for optimisers that exchange signs of gradients.

Formula (operator documentation of ``torch_npu.npu_sign_bits_pack`` and ``npu_sign_bits_unpack``): a bit is 1 where the element is
not negative; the first element is the lowest bit; what is missing of the last byte counts as -1. Unpacked, 1 is 1.0 and 0 is -1.0.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call

_BITS = 8


def _weights(device: torch.device) -> torch.Tensor:
    return 1 << torch.arange(_BITS, device=device)


@Operator(
    name="npu::npu_sign_bits_pack",
    source="operator documentation of torch_npu.npu_sign_bits_pack",
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.randn(27).half(), 2),),
)
def npu_sign_bits_pack(input: torch.Tensor, size: int) -> torch.Tensor:  # noqa: A002 - the schema's name
    """[size, bytes / size] of uint8; ``input`` has one dimension, float16 or float32."""
    if input.dim() != 1 or size <= 0 or (input.numel() + _BITS - 1) // _BITS % size:
        raise ValueError(
            f"input must have one dimension, and size divide its bytes, {(input.numel() + _BITS - 1) // _BITS}; input has "
            f"shape {tuple(input.shape)}, size is {size}."
        )
    bits = torch.nn.functional.pad((input >= 0).long(), (0, -input.numel() % _BITS)).view(-1, _BITS)
    return (bits * _weights(input.device)).sum(-1).to(torch.uint8).view(size, -1)


@Operator(
    name="npu::npu_sign_bits_unpack",
    source="operator documentation of torch_npu.npu_sign_bits_unpack",
    dtypes=(torch.uint8,),
    examples=(lambda: call(torch.randint(256, (6,)).to(torch.uint8), 3, torch.float16),),
)
def npu_sign_bits_unpack(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[size, 8 * bytes / size] of ``dtype``, float16 or float32; ``input`` has one dimension, uint8."""
    if input.dim() != 1 or size <= 0 or input.numel() * _BITS % size:
        raise ValueError(
            f"input must have one dimension, and size divide its bits, {input.numel() * _BITS}; input has shape "
            f"{tuple(input.shape)}, size is {size}."
        )
    bits = input.unsqueeze(-1).long() & _weights(input.device)
    return torch.where(bits != 0, 1.0, -1.0).to(dtype).view(size, -1)
