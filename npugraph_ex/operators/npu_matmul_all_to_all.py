"""A matrix product and an all-to-all exchange: columns to the ranks behind the product, or rows to columns before it.

Formula (operator documentation of ``torch_npu.npu_matmul_all_to_all`` and ``npu_all_to_all_matmul``), with W ranks::

    npu_matmul_all_to_all:  y   = x1 @ x2 + bias                                 this rank's columns of every rank's y, one
                            out = the ranks' y[:, rank * n / W : ...]            below the other

    npu_all_to_all_matmul:  permuted = the ranks' x1[rank * m / W : ...], side by side
                            out      = permuted @ x2 + bias

``npu_all_to_all_matmul`` returns ``permuted`` too, unless ``all2all_out_flag`` is False.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import refused
from npugraph_ex.operators._ranks import Exchange, Ranks, Steps
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_mm_all_reduce_base import plain_product
from npugraph_ex.operators.npu_mm_reduce_scatter_base import check_ranks

_AFTER, _BEFORE = "npu_matmul_all_to_all", "npu_all_to_all_matmul"
_SIZES = (2, 4, 8, 16)


def _check(
    operator: str, x1: torch.Tensor, x2: torch.Tensor, inner: int, axes: Sequence[int] | None, allowed: list[int]
) -> None:
    """Raise where the factors do not fit; ``inner`` is the inner dimension of the product."""
    if x1.dim() != 2 or x2.dim() != 2 or x2.shape[0] != inner or 0 in (x1.shape[1], *x2.shape):
        raise refused(
            operator, "the factors", f"{tuple(x1.shape)} and {tuple(x2.shape)}", f"two matrices, x2 with {inner} rows"
        )
    if axes and list(axes) != allowed:
        raise refused(operator, "all2all_axes", list(axes), f"None or {allowed}")


def _halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


@Operator(
    name="npu::npu_matmul_all_to_all",
    source="operator documentation of torch_npu.npu_matmul_all_to_all",
    dtypes=(torch.float16, torch.bfloat16),
    first_factor=0,
    examples=(lambda: call(_halves(3, 16), _halves(16, 8), "group", 2, _halves(8)),),
)
def npu_matmul_all_to_all(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    bias: torch.Tensor | None = None,
    all2all_axes: Sequence[int] | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """[m * world_size, n / world_size]. x1: [m, k]; x2: [k, n]; bias: [n]."""
    check_ranks(_AFTER, world_size, _SIZES)
    _check(_AFTER, x1, x2, x1.shape[-1], all2all_axes, [-1, -2])
    if x2.shape[1] % world_size:
        raise refused(_AFTER, "the number of columns", x2.shape[1], f"a multiple of world_size, {world_size}")
    columns = plain_product(x1, x2, bias).chunk(world_size, 1)
    rows = [x1.shape[0]] * world_size
    everyone: Ranks = yield Exchange(hcom, (torch.cat(columns),), (rows, rows), ranks=world_size)
    return torch.cat([given[0] for given in everyone.parts])


@Operator(
    name="npu::npu_all_to_all_matmul",
    source="operator documentation of torch_npu.npu_all_to_all_matmul",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(_halves(4, 8), _halves(16, 6), "group", 2, _halves(6)),
        lambda: call(_halves(4, 8), _halves(16, 6), "group", 2, all2all_out_flag=False),
    ),
)
def npu_all_to_all_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    bias: torch.Tensor | None = None,
    all2all_axes: Sequence[int] | None = None,
    all2all_out_flag: bool = True,
    comm_mode: str | None = None,
) -> Steps:
    """``(out [m / world_size, n], permuted [m / world_size, k * world_size])``. x1: [m, k]; x2: [k * world_size, n]; bias: [n]."""
    check_ranks(_BEFORE, world_size, _SIZES)
    _check(_BEFORE, x1, x2, x1.shape[-1] * world_size, all2all_axes, [-2, -1])
    if x1.shape[0] % world_size:
        raise refused(_BEFORE, "the number of rows", x1.shape[0], f"a multiple of world_size, {world_size}")
    rows = [x1.shape[0] // world_size] * world_size
    everyone: Ranks = yield Exchange(hcom, (x1,), (rows, rows), ranks=world_size)
    permuted = torch.cat([given[0] for given in everyone.parts], 1)
    return plain_product(permuted, x2, bias), permuted if all2all_out_flag else None
