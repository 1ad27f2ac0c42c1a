"""Residual sum, RMS normalisation and up to two quantisations in one operator.

Formula (CANN operator documentation, aclnnAddRmsNormDynamicQuantV2)::

    x       = x1 + x2
    y       = x / sqrt(mean(x_i^2) + epsilon) * gamma + beta
    input_k = y * smooth_scale_k                    (y when there is none), k = 1, 2
    scale_k = row_max(abs(input_k)) / 127           7 for int4, which is packed, eight in one int32
    y_k     = round(input_k / scale_k)              half to even, saturated

Only the outputs are rounded: the published AscendC kernels (ops-nn, norm/add_rms_norm_dynamic_quant) keep x and y
in float32 from the sum to the quotient. So this operator is *more* accurate than ``npu_add_rms_norm`` followed by
``npu_dynamic_quant``, which round x and y to float16 or bfloat16 in between, and the two may differ by one step
near a tie.

Which quantisations exist: ``output_mask`` when given; otherwise the first always, and the second when both
smoothing vectors are given. One that does not exist is handed out as an empty tensor of shape (0,).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._int4 import INT4, INT4_MAX, pack
from npugraph_ex.operators._precision import HALVES, INT8_MAX, compute_dtype, round_to_int8, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_dynamic_quant import quotient_and_scale
from npugraph_ex.operators.npu_rms_norm import normalise

_NAME = "npu_add_rms_norm_dynamic_quant"
_FiveTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _wanted(
    smooth_scale1: torch.Tensor | None, smooth_scale2: torch.Tensor | None, output_mask: Sequence[bool] | None
) -> tuple[bool, bool]:
    """Which of the two quantisations are computed; the documented constraints are checked here."""
    if not output_mask:
        if smooth_scale2 is not None and smooth_scale1 is None:
            raise ValueError(f"{_NAME}: smooth_scale2 without output_mask needs smooth_scale1 too; pass both.")
        return True, smooth_scale2 is not None
    if len(output_mask) != 2 or not any(output_mask):
        raise ValueError(f"{_NAME}: output_mask must be two bools, not both False; it is {list(output_mask)}.")
    for number, (wanted, smooth) in enumerate(zip(output_mask, (smooth_scale1, smooth_scale2), strict=True), 1):
        if smooth is not None and not wanted:
            raise ValueError(
                f"{_NAME}: smooth_scale{number} is given, so output_mask[{number - 1}] must be True; it is False."
            )
    return bool(output_mask[0]), bool(output_mask[1])


def before_rounding(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    smooth_scale1: torch.Tensor | None = None,
    smooth_scale2: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: Sequence[bool] | None = None,
    y_dtype: int | None = None,
) -> _FiveTensors:
    """As the operator, with float32 (float64 for float64 inputs) quotients in place of y1 and y2; int8 outputs only."""
    if y_dtype in INT4:
        raise unsupported(_NAME, "y_dtype", y_dtype, "int8 where the quotient before rounding is wanted")
    return _quotients(x1, x2, gamma, (smooth_scale1, smooth_scale2), beta, epsilon, output_mask, y_dtype)


def _quotients(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    smooth: tuple[torch.Tensor | None, torch.Tensor | None],
    beta: torch.Tensor | None,
    epsilon: float,
    output_mask: Sequence[bool] | None,
    y_dtype: int | None,
) -> _FiveTensors:
    """As ``before_rounding``, for int4 too."""
    if y_dtype is not None and y_dtype not in INT4 and dtype_of(y_dtype, _NAME, "y_dtype") != torch.int8:
        raise unsupported(_NAME, "y_dtype", y_dtype, "None, torch.int8 and torch.quint4x2")
    highest = INT4_MAX if y_dtype in INT4 else INT8_MAX
    wanted = _wanted(*smooth, output_mask)
    dtype = compute_dtype(x1, x2, gamma, *smooth, beta)
    x = x1.to(dtype) + x2.to(dtype)
    y, _ = normalise(x, gamma, epsilon, dtype)
    if beta is not None:
        y = y + beta.to(dtype)
    nothing = (y.new_empty(0), y.new_empty(0))
    (first, scale1), (second, scale2) = (
        quotient_and_scale(y, factor, dtype, highest=highest) if exists else nothing
        for exists, factor in zip(wanted, smooth, strict=True)
    )
    # This operator's meta function allocates every output contiguous, whatever the layout of x1.
    x_out = stored_like(torch.empty(x1.shape, device=x1.device), x, x1.dtype)
    return first.contiguous(), second.contiguous(), x_out, scale1.contiguous(), scale2.contiguous()


@Operator(
    name="npu::npu_add_rms_norm_dynamic_quant",
    source="CANN operator documentation, aclnnAddRmsNormDynamicQuantV2",
    dtypes=HALVES,
    floats_only=True,
    before_rounding=before_rounding,
    synonyms={"y_dtype": {1: None}},
    alike=Alike(shape=("x1", "x2"), dtype=("x1", "x2", "gamma", "smooth_scale1", "smooth_scale2", "beta")),
    examples=(
        lambda: call(
            torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.randn(16).half(), output_mask=[True, False]
        ),
        lambda: call(torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.randn(16).half(), y_dtype=16),
    ),
)
def npu_add_rms_norm_dynamic_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    smooth_scale1: torch.Tensor | None = None,
    smooth_scale2: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: Sequence[bool] | None = None,
    y_dtype: int | None = None,
) -> _FiveTensors:
    """``(y1, y2, x_out, scale1, scale2)``.

    y1 and y2: int8 of the shape of ``x1``, or int32 with an eighth of its last dimension for int4. x_out: of its shape and dtype.
    scale1 and scale2: float32, without its last dimension.
    """
    first, second, *rest = _quotients(
        x1, x2, gamma, (smooth_scale1, smooth_scale2), beta, epsilon, output_mask, y_dtype
    )
    y1, y2 = map(round_to_int8, (first, second))
    if y_dtype in INT4:
        y1, y2 = pack(_NAME, y1), pack(_NAME, y2)
    x_out, scale1, scale2 = rest
    return y1, y2, x_out, scale1, scale2
