"""Matrix product of each rank's part of the inner dimension; each rank gets the sum over the ranks of its part of the rows.

Formula (operator documentation of ``torch_npu.npu_mm_reduce_scatter_base``), with m rows and W ranks::

    floating:  part = input @ x2
    int8:      part = x1_scale * x2_scale * (input @ x2)
    out        = sum of the ranks' part[rank * m / W : (rank + 1) * m / W]

A part is rounded to the output's dtype. The sum goes by ranks, as in ``npu_mm_all_reduce_base``.

``bias``, which the document allows only as zeros, adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import refused
from npugraph_ex.operators._ranks import Exchange, Ranks, Steps, total
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import CODE_OF_DTYPE
from npugraph_ex.operators.npu_mm_all_reduce_base import check_plain, check_product, plain_product
from npugraph_ex.operators.npu_quant_matmul import npu_quant_matmul

_NAME = "npu_mm_reduce_scatter_base"
_SIZES = (2, 4, 8, 16, 32)
_INNER = range(256, 65535)


def check_ranks(operator: str, world_size: int, sizes: Sequence[int] = _SIZES) -> None:
    """Raise for a number of ranks that the device does not serve."""
    if world_size not in sizes:
        raise refused(operator, "world_size", world_size, f"one of {', '.join(map(str, sizes))}")


def check_bias(operator: str, bias: torch.Tensor | None) -> None:
    """Raise for a bias that is not zeros."""
    if bias is not None and not bias.is_meta and bool(bias.any()):
        raise refused(operator, "bias", "a tensor of other numbers", "None or zeros")


def check_inner(operator: str, k: int) -> None:
    """Raise for an inner dimension that the device does not serve."""
    if k not in _INNER:
        raise refused(operator, "the inner dimension", k, f"from {_INNER.start} to {_INNER.stop - 1}")


def check_mode(
    operator: str,
    x: torch.Tensor,
    x2: torch.Tensor,
    x1_scale: torch.Tensor | None,
    x2_scale: torch.Tensor | None,
    comm_mode: str | None,
) -> None:
    """Raise where dtypes, scales and ``comm_mode`` do not go together."""
    if comm_mode not in {None, "ai_cpu", "aiv", "ccu"}:
        raise refused(operator, "comm_mode", comm_mode, "'ai_cpu' or 'aiv'")
    if x2.dtype != x.dtype or not (x.is_floating_point() or x.dtype == torch.int8):
        raise refused(
            operator,
            "the dtypes of the factors",
            f"{x.dtype} and {x2.dtype}",
            "float16, bfloat16 or int8, the same for both",
        )
    if (x.dtype == torch.int8) != (x2_scale is not None):
        raise refused(
            operator,
            "x2_scale",
            None if x2_scale is None else "a tensor",
            "a tensor exactly where the factors are int8",
        )
    if x2_scale is not None and comm_mode in {None, "ai_cpu"}:
        raise refused(operator, "comm_mode", comm_mode, "'aiv' where the factors are int8")
    if x1_scale is not None and x2_scale is None:
        raise refused(operator, "x1_scale", "a tensor", "None without x2_scale")


def quantised_dtype(x2_scale: torch.Tensor, output_dtype: torch.dtype | None) -> torch.dtype:
    """The output's dtype where the factors are int8: float16 for an encoded scale, else ``output_dtype``, bfloat16 by default."""
    return torch.float16 if x2_scale.dtype == torch.int64 else output_dtype or torch.bfloat16


def scaled_product(
    x1: torch.Tensor,
    x2: torch.Tensor,
    x1_scale: torch.Tensor | None,
    x2_scale: torch.Tensor | None,
    output_dtype: torch.dtype | None,
) -> torch.Tensor:
    """``x1 @ x2``, of int8 factors times their scales [m, 1] and [1, n], rounded once."""
    if x2_scale is None:
        return plain_product(x1, x2)
    return npu_quant_matmul(
        x1, x2, x2_scale.flatten(), pertoken_scale=None if x1_scale is None else x1_scale.flatten(),
        output_dtype=CODE_OF_DTYPE[quantised_dtype(x2_scale, output_dtype)],
    )  # fmt: skip


def of_rows(operator: str, part: torch.Tensor, hcom: str, world_size: int) -> Exchange:
    """The exchange that gives each rank its rows of every part."""
    if part.shape[0] % world_size:
        raise refused(operator, "the number of rows", part.shape[0], f"a multiple of world_size, {world_size}")
    rows = [part.shape[0] // world_size] * world_size
    return Exchange(hcom, (part,), (rows, rows), ranks=world_size)


def _halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half() / 16


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_mm_reduce_scatter_base",
    source="operator documentation of torch_npu.npu_mm_reduce_scatter_base",
    dtypes=(torch.float16, torch.bfloat16),
    first_factor=0,
    examples=(
        lambda: call(_halves(4, 256), _halves(256, 8), "group", 2, bias=torch.zeros(8).half()),
        lambda: call(
            _small(4, 256), _small(256, 8), "group", 2, x1_scale=torch.rand(4, 1), x2_scale=torch.rand(1, 8), comm_mode="aiv",
        ),
    ),
)  # fmt: skip
def npu_mm_reduce_scatter_base(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """[m / world_size, n] in the dtype of ``input``. input: [m, k]; x2: [k, n]; int8 ones with scales [m, 1] and [1, n]."""
    check_ranks(_NAME, world_size)
    check_plain(_NAME, reduce_op, comm_turn)
    check_product(_NAME, input, x2)
    check_inner(_NAME, x2.shape[0])
    check_mode(_NAME, input, x2, x1_scale, x2_scale, comm_mode)
    check_bias(_NAME, bias)
    part = scaled_product(input, x2, x1_scale, x2_scale, output_dtype)
    everyone: Ranks = yield of_rows(_NAME, part, hcom, world_size)
    return total(everyone)
