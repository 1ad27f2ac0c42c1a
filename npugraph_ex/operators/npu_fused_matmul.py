"""Matrix product and what follows it: a sum, a product, an activation, or a result in float32.

Formula (CANN operator documentation, aclnnFusedMatmul), with ``y = x1 @ x2 + bias``::

    "" y    "add" y + x3    "mul" y * x3    "relu" max(y, 0)    "gelu_erf", "gelu_tanh" GELU(y)    "16cast32" y in float32

y is rounded to the dtype of x1 before what follows it, as op-plugin's test shows; with "16cast32" it is not. CANN's operator
sources (ops-nn, matmul/fused_mat_mul/op_host/op_api/aclnn_fused_matmul.cpp) refuse a batch that is broadcast, GELU with a bias or
of more than one matrix, and float32 factors of GELU and of "16cast32"; the last two are computed here.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, gelu, refused, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_fused_matmul"
_FORMS = ("", "add", "mul", "relu", "gelu_erf", "gelu_tanh", "16cast32")
_WITH_X3 = ("add", "mul")
_GELU = ("gelu_erf", "gelu_tanh")
_MATRIX = 2


@Operator(
    name="npu::npu_fused_matmul",
    source="CANN operator documentation, aclnnFusedMatmul",
    absent_on=("A2", "A3"),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    first_factor=0,
    alike=Alike(dtype=("x1", "x2", "x3")),
    examples=(
        lambda: call(
            torch.randn(3, 8).half(), torch.randn(8, 4).half(), x3=torch.randn(3, 4).half(), fused_op_type="add"
        ),
        lambda: call(torch.randn(2, 3, 8), torch.randn(2, 8, 4), bias=torch.randn(4), fused_op_type="relu"),
        lambda: call(torch.randn(3, 8).half(), torch.randn(8, 4).half(), fused_op_type="gelu_tanh"),
    ),
)
def npu_fused_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    x3: torch.Tensor | None = None,
    fused_op_type: str = "",
) -> torch.Tensor:
    """[..., m, n] like x1, float32 with "16cast32". x1: [..., m, k]; x2: [..., k, n]; x3: like the result; bias: [n].

    With GELU there is no bias, and x1 is [m, k].
    """
    _check(x1, x2, bias, x3, fused_op_type)
    wide = compute_dtype(x1, x2)
    out = torch.matmul(x1.to(wide), x2.to(wide))
    out = out if bias is None else out + bias.to(wide)
    if fused_op_type != "16cast32":
        out = out.to(x1.dtype).to(wide)
    if x3 is not None:
        out = out + x3.to(wide) if fused_op_type == "add" else out * x3.to(wide)
    elif fused_op_type == "relu":
        out = out.relu()
    elif fused_op_type in _GELU:
        out = gelu(out, "tanh" if fused_op_type == "gelu_tanh" else "none")
    return out.to(wide if fused_op_type == "16cast32" else x1.dtype)


def _check(
    x1: torch.Tensor, x2: torch.Tensor, bias: torch.Tensor | None, x3: torch.Tensor | None, fused_op_type: str
) -> None:
    """Raise for what the operator does not take."""
    if fused_op_type not in _FORMS:
        raise unsupported(_NAME, "fused_op_type", fused_op_type, ", ".join(map(repr, _FORMS)))
    if (x3 is not None) != (fused_op_type in _WITH_X3):
        raise ValueError(
            f"{_NAME}: x3 goes with fused_op_type 'add' and 'mul', and with no other; it is {fused_op_type!r}."
        )
    if x1.shape[:-_MATRIX] != x2.shape[:-_MATRIX]:
        raise refused(_NAME, "x2", x2.shape, f"of the batch {list(x1.shape[:-_MATRIX])} of x1")
    if fused_op_type in _GELU and x1.dim() > _MATRIX:
        raise refused(_NAME, "x1", x1.shape, f"one matrix with fused_op_type {fused_op_type!r}")
    if fused_op_type in _GELU and bias is not None:
        raise refused(_NAME, "bias", bias.shape, f"left out with fused_op_type {fused_op_type!r}")
