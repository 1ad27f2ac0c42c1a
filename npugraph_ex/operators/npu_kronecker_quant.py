"""Two small matrix products, or one rotation, and dynamic quantisation of the result.

Formula (CANN operator documentation, aclnnFlatQuant and aclnnRotateQuant)::

    npu_kronecker_quant:  z = kronecker_p1 @ (x @ kronecker_p2)     for each matrix of x
                          quant_scale = max(abs(z)) of a matrix * clip_ratio / 7
                          out = round(z / quant_scale)              int4, eight in one int32

    npu_rotate_quant:     z = x in pieces of K columns @ rotation [K, K]
                          z cut off at +- alpha * its largest of 32 neighbours, where alpha is given
                          scale = row_max(abs(z)) / DTYPE_MAX       127 for int8, 7 for int4
                          y = round(z / scale)

Products are not rounded on the way. Not covered: outputs in MX formats.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._int4 import INT4, INT4_MAX, pack
from npugraph_ex.operators._precision import HALVES, INT8_MAX, compute_dtype, refused, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_dynamic_quant import quotient_and_scale

_KRONECKER, _ROTATE = "npu_kronecker_quant", "npu_rotate_quant"
_NEIGHBOURS = 32


@Operator(
    name="npu::npu_kronecker_quant",
    source="CANN operator documentation, aclnnFlatQuant",
    dtypes=HALVES,
    examples=(lambda: call(torch.randn(3, 4, 16).half(), torch.randn(4, 4).half(), torch.randn(16, 16).half(), 0.9),),
)
def npu_kronecker_quant(
    x: torch.Tensor,
    kronecker_p1: torch.Tensor,
    kronecker_p2: torch.Tensor,
    clip_ratio: float | None = None,
    dst_dtype: int | None = None,
    dst_type_max: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, quant_scale)``: int32 [K, M, N / 8] and float32 [K] from x [K, M, N], p1 [M, M] and p2 [N, N]."""
    if dst_dtype is not None and dst_dtype not in {3, torch.int32}:
        raise unsupported(_KRONECKER, "dst_dtype", dst_dtype, "None and torch.int32")
    if dst_type_max:
        raise unsupported(_KRONECKER, "dst_type_max", dst_type_max, "None and 0.0")
    if x.dim() != 3:
        raise refused(_KRONECKER, "x", tuple(x.shape), "of 3 dimensions")
    dtype = compute_dtype(x, kronecker_p1, kronecker_p2)
    z = kronecker_p1.to(dtype) @ (x.to(dtype) @ kronecker_p2.to(dtype))
    highest = INT4_MAX / (1.0 if clip_ratio is None else clip_ratio)  # above 7, so the largest numbers are cut off
    quotient, scale = quotient_and_scale(z.flatten(1), None, dtype, highest=highest)
    return pack(_KRONECKER, round_to_int8(quotient).reshape(z.shape)), scale.contiguous()


@Operator(
    name="npu::npu_rotate_quant",
    source="CANN operator documentation, aclnnRotateQuant",
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randn(3, 32).half(), torch.randn(16, 16).half()),
        lambda: call(torch.randn(3, 32).half(), torch.randn(32, 32).half(), alpha=torch.tensor([0.5]), dst_dtype=16),
    ),
)
def npu_rotate_quant(
    x: torch.Tensor,
    rotation: torch.Tensor,
    *,
    alpha: torch.Tensor | None = None,
    dst_dtype: int | None = None,
    axis: int | None = -1,
    round_mode: str | None = "rint",
    scale_alg: int | None = 0,
    dst_type_max: float | None = 0.0,
    transpose_y: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)`` from x [M, N]: int8 [M, N], or int32 [M, N / 8] for int4; float32 [M]. alpha [1], between 0 and 1."""
    int4 = dst_dtype in INT4
    if not int4 and dst_dtype is not None and dtype_of(dst_dtype, _ROTATE, "dst_dtype") != torch.int8:
        raise unsupported(_ROTATE, "dst_dtype", dst_dtype, "None, torch.int8 and torch.quint4x2")
    for name, value, only in (
        ("round_mode", round_mode, "rint"),
        ("scale_alg", scale_alg, 0),
        ("transpose_y", transpose_y, False),
    ):
        if value not in {None, only}:
            raise unsupported(_ROTATE, name, value, repr(only))
    if x.dim() != 2 or rotation.dim() != 2 or x.shape[-1] % rotation.shape[0] or axis not in {None, -1, 1}:
        raise refused(
            _ROTATE,
            "x, rotation and axis",
            (tuple(x.shape), tuple(rotation.shape), axis),
            "[M, N], [K, K] with N a multiple of K, -1",
        )
    dtype = compute_dtype(x, rotation)
    z = (x.to(dtype).unflatten(-1, (-1, rotation.shape[0])) @ rotation.to(dtype)).flatten(-2)
    if alpha is not None:
        neighbours = z.unflatten(-1, (-1, min(_NEIGHBOURS, z.shape[-1])))
        limit = neighbours.abs().amax(-1, keepdim=True) * alpha.to(dtype)
        z = torch.minimum(torch.maximum(neighbours, -limit), limit).flatten(-2)
    quotient, scale = quotient_and_scale(z, None, dtype, highest=INT4_MAX if int4 else INT8_MAX)
    whole = round_to_int8(quotient)
    return (pack(_ROTATE, whole) if int4 else whole.contiguous()), scale.contiguous()
