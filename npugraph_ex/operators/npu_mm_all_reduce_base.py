"""Matrix product of each rank's part of the inner dimension, and the sum of the products over the ranks.

Formula (operator documentation of ``torch_npu.npu_mm_all_reduce_base``; CANN operator documentation, aclnnQuantMatmulAllReduceV3)::

    floating:                 part = x1 @ x2 + bias + x3
    int8 x2:                  part = x1 @ ((x2 + antiquant_offset) * antiquant_scale) + bias + x3
    int8 both:                part = dequant_scale * pertoken_scale * (x1 @ x2 + bias) + x3
    out = sum of the ranks' parts

    with comm_quant_scale_1 and comm_quant_scale_2 (int8 both):
    sent = round(part / comm_quant_scale_1)                                                  int8
    out  = round(sum of the ranks' sent * (comm_quant_scale_1 / comm_quant_scale_2)) * comm_quant_scale_2

Every rank adds its ``bias`` and its ``x3``. A part is rounded to the output's dtype before ``x3`` is added and again behind it.
The sum goes by ranks, 0 first, and is rounded at each step, as an all-reduce of the emulated HCCL; a device may take another order.

Not covered: 8-bit and 4-bit floating operands (``x1_dtype``, ``x2_dtype``, ``y_dtype``, ``group_sizes``, ``comm_quant_mode``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import compute_dtype, refused, round_to_int8, unsupported
from npugraph_ex.operators._ranks import Exchange, Steps, total
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import CODE_OF_DTYPE
from npugraph_ex.operators.npu_quant_matmul import npu_quant_matmul
from npugraph_ex.operators.npu_weight_quant_batchmatmul import npu_weight_quant_batchmatmul

_NAME = "npu_mm_all_reduce_base"


def output_dtype(x1: torch.Tensor, dequant_scale: torch.Tensor | None) -> torch.dtype:
    """That of ``x1``; for an int8 ``x1`` bfloat16 where ``dequant_scale`` is, else float16."""
    if x1.dtype != torch.int8:
        return x1.dtype
    return torch.bfloat16 if dequant_scale is not None and dequant_scale.dtype == torch.bfloat16 else torch.float16


def check_product(operator: str, x1: torch.Tensor, x2: torch.Tensor, *, dims: tuple[int, ...] = (2,)) -> None:
    """Raise where the factors do not fit."""
    if x1.dim() not in dims:
        raise refused(
            operator, "the first factor's shape", x1.shape, f"one of {' or '.join(map(str, dims))} dimensions"
        )
    if x2.dim() != 2:
        raise refused(operator, "x2's shape", x2.shape, "[k, n]")
    if x1.shape[-1] != x2.shape[0]:
        raise refused(
            operator, "x2's first dimension", x2.shape[0], f"{x1.shape[-1]}, the last one of the first factor"
        )
    if min(*x1.shape, *x2.shape) == 0:
        raise refused(operator, "a factor", f"{tuple(x1.shape)} @ {tuple(x2.shape)}", "not empty")


def check_plain(operator: str, reduce_op: str = "sum", comm_turn: int = 0) -> None:
    """Raise for the values of arguments that are there for later releases."""
    if reduce_op != "sum":
        raise refused(operator, "reduce_op", reduce_op, "'sum'")
    if comm_turn != 0:
        raise refused(operator, "comm_turn", comm_turn, "0")


def _check_scales(
    x1: torch.Tensor,
    x2: torch.Tensor,
    antiquant_scale: torch.Tensor | None,
    antiquant_offset: torch.Tensor | None,
    dequant_scale: torch.Tensor | None,
    pertoken_scale: torch.Tensor | None,
) -> None:
    """Raise for scales that do not go with the dtypes of the factors."""
    integers = (x1.dtype == torch.int8, x2.dtype == torch.int8)
    if integers == (True, False):
        raise refused(_NAME, "x2", x2.dtype, "int8, as x1 is")
    if not x1.is_floating_point() and not integers[0]:
        raise refused(_NAME, "x1", x1.dtype, "float16, bfloat16 or int8")
    if integers == (False, False) and x2.dtype != x1.dtype:
        raise refused(_NAME, "x2", x2.dtype, f"int8 or {x1.dtype}, as x1 is")
    if (integers != (False, True)) and (antiquant_scale is not None or antiquant_offset is not None):
        raise refused(_NAME, "antiquant_scale and antiquant_offset", "tensors", "None, unless x2 alone is int8")
    if integers == (False, True) and antiquant_scale is None:
        raise refused(_NAME, "antiquant_scale", None, "a tensor, where x2 alone is int8")
    if (integers == (True, True)) != (dequant_scale is not None):
        raise refused(
            _NAME,
            "dequant_scale",
            "a tensor" if dequant_scale is not None else None,
            "a tensor exactly where both factors are int8",
        )
    if pertoken_scale is None:
        return
    if dequant_scale is None:
        raise refused(_NAME, "pertoken_scale", "a tensor", "None without dequant_scale")
    if pertoken_scale.shape != (x1.shape[:-1].numel(),):
        raise refused(
            _NAME,
            "pertoken_scale's shape",
            pertoken_scale.shape,
            f"[{x1.shape[:-1].numel()}], a number for each row of x1",
        )


def _halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_mm_all_reduce_base",
    source="operator documentation of torch_npu.npu_mm_all_reduce_base; CANN operator documentation, aclnnQuantMatmulAllReduceV3",
    dtypes=(torch.float16, torch.bfloat16),
    first_factor=0,
    examples=(
        lambda: call(_halves(3, 16), _halves(16, 8), "group", bias=_halves(8), x3=_halves(3, 8)),
        lambda: call(_halves(2, 3, 16), _halves(8, 16).t(), "group"),
        lambda: call(_halves(3, 16), _small(16, 8), "group", antiquant_scale=_halves(8), antiquant_offset=_halves(8)),
        lambda: call(
            _small(3, 16), _small(16, 8), "group", dequant_scale=torch.rand(8).bfloat16() + 1, pertoken_scale=torch.rand(3)
        ),
        lambda: call(
            _small(3, 2), _small(2, 8), "group", bias=torch.randint(-50, 50, (8,)).int(), dequant_scale=torch.ones(8).bfloat16(),
            comm_quant_scale_1=torch.full((8,), 2.0).bfloat16(), comm_quant_scale_2=torch.full((8,), 4.0).bfloat16(),
        ),
    ),
)  # fmt: skip
def npu_mm_all_reduce_base(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    x3: torch.Tensor | None = None,
    dequant_scale: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    comm_quant_scale_1: torch.Tensor | None = None,
    comm_quant_scale_2: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    group_sizes: Sequence[int] | None = None,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    dequant_scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    comm_quant_mode: int = 0,
    comm_mode: str | None = None,
) -> Steps:
    """The sum [..., m, n] of the ranks' ``x1`` [..., m, k] @ ``x2`` [k, n], in the dtype of ``x1``; float16 or bfloat16 for int8.

    bias: [n]; x3: like the result; antiquant_scale and antiquant_offset: [1], [n], [1, n] or [groups, n]; dequant_scale: [1],
    [n] or [1, n], floating or int64; pertoken_scale: float32, one for each row; comm_quant_scale_...: [n] or [1, n].
    """
    for name, value in (
        ("group_sizes", group_sizes), ("y_dtype", y_dtype), ("x1_dtype", x1_dtype), ("x2_dtype", x2_dtype),
        ("dequant_scale_dtype", dequant_scale_dtype), ("pertoken_scale_dtype", pertoken_scale_dtype),
    ):  # fmt: skip
        if value is not None:
            raise unsupported(_NAME, name, value, "None")
    if comm_quant_mode != 0:
        raise unsupported(_NAME, "comm_quant_mode", comm_quant_mode, "0")
    check_plain(_NAME, reduce_op, comm_turn)
    check_product(_NAME, x1, x2, dims=(2, 3))
    _check_scales(x1, x2, antiquant_scale, antiquant_offset, dequant_scale, pertoken_scale)
    if (comm_quant_scale_1 is None) != (comm_quant_scale_2 is None):
        raise refused(_NAME, "comm_quant_scale_1 and comm_quant_scale_2", "one tensor", "both None or both tensors")
    target = output_dtype(x1, dequant_scale)
    if x3 is not None and (x3.shape != (*x1.shape[:-1], x2.shape[1]) or x3.dtype not in {target, torch.float64}):
        raise refused(_NAME, "x3", (tuple(x3.shape), x3.dtype), f"like the result, {target}")
    part = _part(x1, x2, bias, antiquant_scale, antiquant_offset, dequant_scale, pertoken_scale, antiquant_group_size)
    part = part if x3 is None else part + x3
    if comm_quant_scale_1 is None or comm_quant_scale_2 is None:
        everyone = yield Exchange(hcom, (part,))
        return total(everyone)
    wide = compute_dtype(part)
    first, second = comm_quant_scale_1.to(wide), comm_quant_scale_2.to(wide)
    everyone = yield Exchange(hcom, (round_to_int8(part.to(wide) / first),))
    whole = sum(given[0].to(wide) for given in everyone.parts)
    return (round_to_int8(whole * (first / second)).to(wide) * second).to(part.dtype)


def _part(
    x1: torch.Tensor,
    x2: torch.Tensor,
    bias: torch.Tensor | None,
    antiquant_scale: torch.Tensor | None,
    antiquant_offset: torch.Tensor | None,
    dequant_scale: torch.Tensor | None,
    pertoken_scale: torch.Tensor | None,
    antiquant_group_size: int,
) -> torch.Tensor:
    """This rank's product, rounded to the dtype of the output."""
    if dequant_scale is not None:
        rows = npu_quant_matmul(
            x1.flatten(0, -2), x2, dequant_scale, bias=bias, pertoken_scale=pertoken_scale,
            output_dtype=CODE_OF_DTYPE[output_dtype(x1, dequant_scale)],
        )  # fmt: skip
        return rows.view(*x1.shape[:-1], x2.shape[1])
    if antiquant_scale is not None:
        return npu_weight_quant_batchmatmul(
            x1, x2, antiquant_scale, antiquant_offset, bias=bias, antiquant_group_size=antiquant_group_size
        )
    return plain_product(x1, x2, bias)


def plain_product(x1: torch.Tensor, x2: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x1 @ x2 + bias``, rounded once."""
    wide = compute_dtype(x1, x2)
    out = torch.matmul(x1.to(wide), x2.to(wide))
    return (out if bias is None else out + bias.to(wide)).to(x1.dtype)
