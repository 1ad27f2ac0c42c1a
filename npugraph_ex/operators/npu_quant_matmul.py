"""Matrix product of quantised operands, scaled back to floating point or requantised to int8.

Formula (CANN operator documentation, aclnnQuantMatmulV5), with ``scale`` per tensor or per column and ``pertoken_scale`` per row::

    bias int32:      out = (x1 @ x2 + bias) * scale [* pertoken_scale] [+ offset]
    bias floating:   out = x1 @ x2 * scale [* pertoken_scale] + bias
    output int32:    out = x1 @ x2 + bias
    x2 int4 and x1 int8, scale of each group of rows of x2, offset a vector:
                     out = ((x1 - 8) @ (x2 * scale) + offset) * pertoken_scale
    both int4, scale and offset of each group of rows of x2:
                     out = x1 @ ((x2 - offset) * scale) * pertoken_scale

Int4 operands are packed in int32, see ``_int4``. In the fourth form the device takes x1 apart in two int4 halves, of which the
lower one is 8 too small; ``offset`` makes that good, as its document says. An int64 ``scale`` is one of ``npu_trans_quant_param``.
A float32 one loses its 13 lowest bits on the device where the output is float16 or int8 and there is no ``pertoken_scale``.
Here it does not.

8-bit and 4-bit floating operands (``x1_dtype`` and ``x2_dtype`` say what uint8 holds), and int8 ones with several scales a row:
``_floating_products``. ``y_scale``, encoded by ``npu_trans_quant_param``, multiplies the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._floating_products import FloatingOperand, floating_product
from npugraph_ex.operators._int4 import unpack
from npugraph_ex.operators._integers import in_groups, matrix_of, offset_of, product, scale_of
from npugraph_ex.operators._precision import compute_dtype, refused, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import CODES, dtype_of

_NAME = "npu_quant_matmul"
_OUTPUTS = (torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32)
_LOW_HALF = 8


def _refuse_uncovered(x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, **only_none: object) -> None:
    """Raise for the operand and argument values that the formula above does not cover."""
    pairs = ((torch.int8, torch.int8), (torch.int32, torch.int32), (torch.int8, torch.int32))
    if (x1.dtype, x2.dtype) not in pairs:
        name, operand = ("x2", x2) if x2.dtype not in {torch.int8, torch.int32} else ("x1", x1)
        raise unsupported(
            _NAME, name, operand.dtype, "int8 tensors, and int32 ones with packed int4; x1 int32 with x2 int32"
        )
    if not scale.is_floating_point() and scale.dtype not in {torch.int64, torch.uint64}:
        raise unsupported(
            _NAME, "scale", scale.dtype, "floating-point tensors, and int64 ones of npu_trans_quant_param"
        )
    for name, value in only_none.items():
        if value is not None:
            raise unsupported(_NAME, name, "a tensor" if isinstance(value, torch.Tensor) else value, "None")


def _output_dtype(output_dtype: int | None) -> torch.dtype:
    """The dtype of the result: int8 by default."""
    if output_dtype is None:
        return torch.int8
    dtype = dtype_of(output_dtype, _NAME, "output_dtype")
    if dtype not in _OUTPUTS:
        raise unsupported(_NAME, "output_dtype", dtype, "int8, int32, float16, bfloat16 and float32")
    return dtype


def _of_groups(
    left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, mixed: bool
) -> torch.Tensor:
    """The product where ``x2`` has a scale for each group of its rows, before ``pertoken_scale``."""
    values = scale_of(scale)
    wide = compute_dtype(values, offset)
    weight = in_groups(right, values, None if mixed else offset)
    out = torch.matmul(left.to(wide) - (_LOW_HALF if mixed else 0), weight.to(wide))
    return out + offset.to(wide) if mixed and offset is not None else out


def _of_columns(
    total: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    """``(total + int32 bias) * scale``."""
    if bias is not None and not bias.is_floating_point():
        total = total + bias.to(torch.float64)
    return total.to(dtype) * scale_of(scale).to(dtype)


def before_rounding(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result before it is rounded to an integer; a floating result is rounded to ``output_dtype`` as usual."""
    target = _output_dtype(output_dtype)
    dtype = compute_dtype(scale, pertoken_scale, bias, offset)
    first = FloatingOperand(x1, x1_dtype, pertoken_scale, "x1_dtype")
    second = FloatingOperand(x2, x2_dtype, scale, "x2_dtype")
    if first.floating or second.floating or (pertoken_scale is not None and pertoken_scale.shape[1:] > (1,)):
        if target not in {torch.float16, torch.bfloat16, torch.float32}:
            raise unsupported(_NAME, "output_dtype", target, "float16, bfloat16 and float32 for floating operands")
        out = floating_product(_NAME, first, second, dtype, bias=bias, groups=group_sizes)
        out = out if y_scale is None else out * scale_of(y_scale).to(dtype)
        return out if dtype == torch.float64 else out.to(target)
    _refuse_uncovered(x1, x2, scale, x1_dtype=x1_dtype, x2_dtype=x2_dtype, y_scale=y_scale)
    left = x1 if x1.dtype == torch.int8 else unpack(x1)
    right = matrix_of(x2, left.shape[-1])
    groups = scale.dim() == 2 and scale.shape[0] > 1
    if group_sizes and any(group_sizes) and not (groups and x2.dtype == torch.int32):
        raise unsupported(_NAME, "group_sizes", list(group_sizes), "those of an int4 x2, with a scale [groups, n]")
    if groups:
        out = _of_groups(left, right, scale, offset, x1.dtype != x2.dtype).to(dtype)
        offset = None
    elif target == torch.int32:
        total = product(left, right)
        return total if bias is None else total + bias.to(torch.float64)
    else:
        out = _of_columns(product(left, right), scale, dtype, bias)
    if pertoken_scale is not None:
        out = out * (pertoken_scale if pertoken_scale.shape[-1:] == (1,) and out.dim() > 1 and pertoken_scale.dim() > 1
                     else pertoken_scale.unsqueeze(-1)).to(dtype)  # fmt: skip
    if bias is not None and bias.is_floating_point():
        out = out + bias.to(dtype)
    shift = offset_of(scale) if offset is None and target == torch.int8 else offset
    if shift is not None:
        out = out + shift.to(dtype)
    keep_wide = target == torch.int8 or dtype == torch.float64
    return out if keep_wide else out.to(target)


_CODED = (torch.float32, torch.int64, torch.uint64)
_TAKEN = {  # (result, with scales of tokens): dtypes of scale and of bias
    (torch.int8, False): (_CODED, (torch.int32,)),
    (torch.int32, False): ((torch.float32, torch.bfloat16), (torch.int32,)),
    (torch.float16, False): (_CODED, (torch.int32,)),
    (torch.float16, True): ((torch.float32,), (torch.int32, torch.float16, torch.bfloat16, torch.float32)),
    **dict.fromkeys(
        ((torch.bfloat16, False), (torch.bfloat16, True)),
        ((*_CODED, torch.bfloat16), (torch.int32, torch.bfloat16, torch.float32)),
    ),
}
"""What the documents list for two int8 matrices, one or the other of them; a float32 scale without tokens' is packed on the way."""


def _refuse_mixed(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> None:
    target = _output_dtype(output_dtype)
    if {x1.dtype, x2.dtype} != {torch.int8} or target == torch.float32:
        return
    taken = _TAKEN.get((target, pertoken_scale is not None))
    if taken is None:
        raise refused(_NAME, "pertoken_scale", "a tensor", f"None for a result of {target}")
    for name, value, dtypes in zip(("scale", "bias"), (scale, bias), taken, strict=True):
        if value is not None and value.dtype not in dtypes:
            raise refused(_NAME, name, value.dtype, f"{' or '.join(map(str, dtypes))} for a result of {target}")


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_quant_matmul",
    source="CANN operator documentation, aclnnQuantMatmulV4 and V5; operator documentation of torch_npu.npu_quant_matmul",
    covers={"pertoken_scale_dtype": (None, *CODES), "scale_dtype": (None, *CODES)},
    dtypes=(torch.float32, torch.bfloat16),
    before_rounding=before_rounding,
    constraints=_refuse_mixed,
    synonyms={"output_dtype": {1: None}},
    first_factor=0,
    examples=(
        lambda: call(_small(3, 16), _small(16, 8), torch.rand(8) + 0.5, output_dtype=torch.bfloat16),
        lambda: call(
            torch.randint(-(2**31), 2**31, (3, 2)).int(), torch.randint(-(2**31), 2**31, (16, 1)).int(), torch.rand(8),
            pertoken_scale=torch.rand(3), output_dtype=torch.bfloat16,
        ),
        lambda: call(_small(3, 16), _small(16, 8), torch.rand(8) + 0.5, offset=torch.randn(8)),
        lambda: call(
            torch.randint(0, 256, (3, 32)).to(torch.uint8), torch.randint(0, 256, (64, 8)).to(torch.uint8),
            torch.randint(124, 130, (1, 16, 2)).to(torch.uint8), output_dtype=torch.bfloat16, x1_dtype=296, x2_dtype=296,
            pertoken_scale=torch.randint(124, 130, (3, 1, 2)).to(torch.uint8), pertoken_scale_dtype=293, scale_dtype=293,
            group_sizes=[1, 1, 32], bias=torch.randn(16),
        ),
    ),
)  # fmt: skip
def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x1`` (..., m, k) times ``x2`` (..., k, n), scaled: (..., m, n) of ``output_dtype``, int8 when None.

    x1, x2: int8, int32 with eight int4 values each in the last dimension, float8, or uint8 with two 4-bit floats.
    scale: (1,), (n,) or (groups, n), floating or int64;
    offset: like scale, or (n,); pertoken_scale: (m,) or (m, 1) float32; bias: (n,), (1, n) or (batch, 1, n).
    """
    out = before_rounding(
        x1, x2, scale, offset=offset, pertoken_scale=pertoken_scale, bias=bias, output_dtype=output_dtype,
        x1_dtype=x1_dtype, x2_dtype=x2_dtype, pertoken_scale_dtype=pertoken_scale_dtype, scale_dtype=scale_dtype,
        group_sizes=group_sizes, y_scale=y_scale,
    )  # fmt: skip
    target = _output_dtype(output_dtype)
    if target == torch.int32:
        return out.to(torch.int32)
    return round_to_int8(out) if target == torch.int8 else out
