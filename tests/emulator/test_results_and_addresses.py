"""What a kernel computes does not depend on where its operands lie: a replay has other addresses than eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

SIZES = ((1, 16, 8), (3, 16, 8), (5, 64, 4), (8, 100, 32))
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b: torch.mm(a, b.t()),
    "addmm": lambda a, b: torch.addmm(b[:, 0], a, b.t()),
    "bmm": lambda a, b: torch.bmm(a[None], b.t()[None]),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "linear": torch.nn.functional.linear,
    "softmax": lambda a, _b: a.softmax(-1),
    "sigmoid": lambda a, _b: a.sigmoid(),
    "norm": lambda a, _b: torch.nn.functional.layer_norm(a, a.shape[-1:]),
    "sum": lambda a, _b: a.sum(-1),
}


def placed(value: Tensor, offset: int) -> Tensor:
    """A copy that begins so many elements into its memory."""
    memory = torch.empty(value.numel() + offset, dtype=value.dtype, device="npu")
    return memory[offset:].view(value.shape).copy_(value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_equal_bits_at_every_address(name: str, dtype: torch.dtype) -> None:
    """Operands at sixteen places, aligned and not, give one result."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in SIZES:
        a = torch.randn(rows, inner, generator=generator).to(dtype)
        b = torch.randn(columns, inner, generator=generator).to(dtype)
        results = [OPERATORS[name](placed(a, offset), placed(b, offset % 5)).cpu() for offset in range(16)]
        assert all(torch.equal(result, results[0]) for result in results), (rows, inner, columns)
