"""Two small matrix products, or one rotation, and dynamic quantisation of the result.

Formula (CANN operator documentation, aclnnFlatQuant and aclnnRotateQuant)::

    npu_kronecker_quant:  z = kronecker_p1 @ (x @ kronecker_p2)     for each matrix of x
                          quant_scale = max(abs(z)) of a matrix * clip_ratio / 7
                          out = round(z / quant_scale)              int4, eight in one int32

    npu_rotate_quant:     z = x in pieces of K columns @ rotation [K, K], or each piece by its own of [N / K, K, K]
                          z cut off at +- alpha * its largest of 32 neighbours, where alpha lies between 0 and 1
                          scale = row_max(abs(z)) / DTYPE_MAX       127 for int8, 7 for int4
                          y = round(z / scale)
                          MX formats: y, scale = npu_dynamic_mx_quant(z), where z and the limits are rounded to bfloat16

Products are not rounded on the way to integers.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._int4 import INT4, INT4_MAX, pack
from npugraph_ex.operators._microscaling import block_quantisation, quantised
from npugraph_ex.operators._precision import HALVES, INT8_MAX, compute_dtype, refused, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_dynamic_quant import quotient_and_scale

_KRONECKER, _ROTATE = "npu_kronecker_quant", "npu_rotate_quant"
_NEIGHBOURS = 32
_MX = frozenset({23, 24, 45, 291, 292, 296, torch.float8_e5m2, torch.float8_e4m3fn, torch.float4_e2m1fn_x2})
_TARGETS = "None, torch.int8, torch.quint4x2, torch.float8_e5m2, torch.float8_e4m3fn and torch_npu.float4_e2m1fn_x2"


@Operator(
    name="npu::npu_kronecker_quant",
    source="CANN operator documentation, aclnnFlatQuant; ops-nn, quant/flat_quant",
    dtypes=HALVES,
    alike=Alike(dtype=("x", "kronecker_p1", "kronecker_p2")),
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
    alike=Alike(dtype=("x", "rotation")),
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
    """``(y, scale)`` from x [M, N]: int8 [M, N], or int32 [M, N / 8] for int4; float32 [M]. alpha [1].

    In MX formats x is [..., N], y float8 or uint8 [..., N / 2], and scale float8_e8m0fnu [..., N / 64, 2].
    """
    int4, mx = dst_dtype in INT4, dst_dtype in _MX
    if not int4 and not mx and dst_dtype is not None and dtype_of(dst_dtype, _ROTATE, "dst_dtype") != torch.int8:
        raise unsupported(_ROTATE, "dst_dtype", dst_dtype, _TARGETS)
    if transpose_y:
        raise refused(_ROTATE, "transpose_y", transpose_y, "False")
    if not mx and (round_mode not in {None, "rint"} or scale_alg or dst_type_max):
        raise refused(
            _ROTATE,
            "round_mode, scale_alg and dst_type_max",
            (round_mode, scale_alg, dst_type_max),
            "'rint', 0 and 0.0 for int8 and int4",
        )
    k, last = rotation.shape[-1], x.dim() - 1
    pieces = () if rotation.dim() == 2 else (x.shape[-1] // k,)
    if (
        (x.dim() != 2 and not mx)
        or tuple(rotation.shape) != (*pieces, k, k)
        or x.shape[-1] % k
        or axis not in {None, -1, last}
    ):
        given = (tuple(x.shape), tuple(rotation.shape), axis)
        raise refused(_ROTATE, "x, rotation and axis", given, "[M, N], [K, K] with N a multiple of K, -1")
    dtype = compute_dtype(x, rotation)
    z = (x.to(dtype).unflatten(-1, (-1, 1, k)) @ rotation.to(dtype)).flatten(-3)

    def stored(values: torch.Tensor) -> torch.Tensor:
        return values.bfloat16().to(dtype) if mx and dtype != torch.float64 else values

    z = stored(z)
    if alpha is not None:
        neighbours = z.unflatten(-1, (-1, min(_NEIGHBOURS, z.shape[-1])))
        limit = stored(neighbours.abs().amax(-1, keepdim=True) * alpha.to(dtype))
        limit = torch.where((alpha > 0) & (alpha < 1), limit, torch.inf)
        z = torch.minimum(torch.maximum(neighbours, -limit), limit).flatten(-2)
    if dst_dtype is not None and mx:
        how = block_quantisation(
            _ROTATE, dst_dtype, round_mode=round_mode or "rint", scale_alg=scale_alg, dst_type_max=dst_type_max
        )
        y, scale = quantised(z, z, -1, how, _ROTATE)
        return y, scale.view(torch.float8_e8m0fnu)
    quotient, scale = quotient_and_scale(z, None, dtype, highest=INT4_MAX if int4 else INT8_MAX)
    whole = round_to_int8(quotient)
    return (pack(_ROTATE, whole) if int4 else whole.contiguous()), scale.contiguous()
