"""`torch.linalg.matrix_rank` with `out`, which torch's trace leaves unwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, check

_RANKS = (0, 2, 4)
PROGRAMS: dict[str, Callable[..., Any]] = {
    "plain": lambda x, out: torch.linalg.matrix_rank(x, out=out),
    "a tolerance": lambda x, out: torch.linalg.matrix_rank(x, 0.5, out=out),
    "tolerances": lambda x, out: torch.linalg.matrix_rank(x, atol=x[:, 0, 0] + 0.5, rtol=x[:, 0, 0] * 0, out=out),
    "hermitian": lambda x, out: torch.linalg.matrix_rank(x @ x.mT, hermitian=True, out=out),
    "the overload": lambda x, out: torch.ops.aten.linalg_matrix_rank.out(x, 0.5, out=out),
    "the packet": lambda x, out: torch.ops.aten.linalg_matrix_rank(x, 0.5, out=out),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_out_has_the_ranks(program: Callable[..., Any], dtype: torch.dtype) -> None:
    """The result and the argument, a part of its memory, are those of eager mode."""

    def called(x: torch.Tensor, memory: torch.Tensor) -> Any:
        return program(x, memory[1:4]) + 1, memory[1:4] * 2

    def inputs() -> tuple[torch.Tensor, ...]:
        x = torch.stack([torch.diag(torch.tensor([1.0] * rank + [0.0] * (4 - rank))) for rank in _RANKS])
        return x.to(NPU), torch.full((6,), 7, dtype=dtype, device=NPU)

    check(called, [inputs() for _ in range(2)])
