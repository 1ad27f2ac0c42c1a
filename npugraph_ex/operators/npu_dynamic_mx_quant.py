"""Quantisation to 8-bit or 4-bit floats with a power of two as scale of each block, the MX formats, and the way back.

``_microscaling`` has the formulas (CANN operator documentation, aclnnDynamicMxQuantV3 and its neighbours)::

    npu_dynamic_mx_quant                 blocks along one axis
    npu_dynamic_mx_quant_with_dual_axis  blocks along the last axis, and apart from that along the last but one
    npu_dynamic_block_mx_quant           blocks of 32 times 32 elements
    npu_grouped_dynamic_mx_quant         blocks along the first axis, which begin anew with each group of rows
    npu_dynamic_dual_level_mx_quant      x / s0 rounded to the dtype of x, quantised; s0 = max(abs) / 6 of each 512 elements
    npu_anti_mx_quant                    y = x * 2^(scale - 127)
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._microscaling import (
    BIAS,
    BLOCK,
    E2M1,
    block_quantisation,
    element_of,
    pairs,
    quantised,
    quantised_groups,
    rounded,
    scale_values,
    shared_exponent,
    stored,
    unpack,
)
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_dynamic_mx_quant"
_LEVEL_0 = 512
_E2M1 = 296


@Operator(
    name="npu::npu_dynamic_mx_quant",
    source="CANN operator documentation, aclnnDynamicMxQuantV3",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randn(3, 80).half(), dst_type=24),
        lambda: call(torch.randn(2, 70, 3).bfloat16(), axis=1, dst_type=291),
        lambda: call(torch.randn(3, 80).half(), round_mode="round"),
    ),
)
def npu_dynamic_mx_quant(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)``: y like ``input``, or uint8 with half its last dimension; scale uint8, the pairs of blocks along ``axis``."""
    if block_size <= 0 or block_size % 32 or block_size > 1024:
        raise refused(_NAME, "block_size", block_size, "a multiple of 32 up to 1024")
    how = block_quantisation(
        _NAME, dst_type, block=block_size, round_mode=round_mode, scale_alg=scale_alg, dst_type_max=dst_type_max,
        low_bound=max_low_bound,
    )  # fmt: skip
    return quantised(input, input.to(compute_dtype(input)), axis, how, _NAME)


@Operator(
    name="npu::npu_dynamic_mx_quant_with_dual_axis",
    source="CANN operator documentation, aclnnDynamicMxQuantWithDualAxisV2",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randn(3, 80).half(), dst_type=24),
        lambda: call(torch.randn(2, 70, 4).bfloat16(), round_mode="floor"),
    ),
)
def npu_dynamic_mx_quant_with_dual_axis(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    round_mode: str = "rint",
    dst_type: int = 296,
    scale_alg: int = 0,
    dst_type_max: float | None = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y1, scale1, y2, scale2)``, as ``npu_dynamic_mx_quant`` gives them for the axes -1 and -2."""
    name = f"{_NAME}_with_dual_axis"
    how = block_quantisation(name, dst_type, round_mode=round_mode, scale_alg=scale_alg, dst_type_max=dst_type_max)
    wide = input.to(compute_dtype(input))
    return (*quantised(input, wide, -1, how, name), *quantised(input, wide, -2, how, name))


@Operator(
    name="npu::npu_dynamic_block_mx_quant",
    source="CANN operator documentation, aclnnDynamicBlockMxQuant",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    examples=(lambda: call(torch.randn(70, 40).half()), lambda: call(torch.randn(2, 33, 66).bfloat16(), dst_type=23)),
)
def npu_dynamic_block_mx_quant(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    round_mode: str = "rint",
    dst_type: int = 296,
    scale_alg: int = 0,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, scale1, scale2)``: y [..., M, N], scale1 [..., M, N / 64, 2] of each row, scale2 [..., M / 64, N, 2] of each column."""
    name = "npu_dynamic_block_mx_quant"
    how = block_quantisation(name, dst_type, round_mode=round_mode, scale_alg=scale_alg, dst_type_max=dst_type_max)
    if how.element.packed and input.shape[-1] % 2:
        raise refused(
            name, "the last dimension of input", input.shape[-1], "even, for 4-bit elements lie two in a byte"
        )
    rows, columns = input.shape[-2:]
    padded = torch.nn.functional.pad(
        input.to(compute_dtype(input)), (0, -columns % (2 * BLOCK), 0, -rows % (2 * BLOCK))
    )
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    shared = shared_exponent(blocks.abs().amax((-3, -1), keepdim=True), how)
    y = rounded(blocks * torch.exp2(-shared.to(padded.dtype)), how).flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    scale = (shared + BIAS).to(torch.uint8)[..., 0, :, 0]  # [..., blocks of rows, blocks of columns]
    of_rows = scale.repeat_interleave(BLOCK, -2)[..., :rows, :]
    of_columns = scale.mT.repeat_interleave(BLOCK, -2)[..., :columns, :]
    return stored(input, y, how.element), pairs(of_rows, -1), pairs(of_columns, -2)


@Operator(
    name="npu::npu_grouped_dynamic_mx_quant",
    source="CANN operator documentation, aclnnGroupedDynamicMxQuantV2",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randn(70, 4).half(), torch.tensor([3, 70], dtype=torch.int32), dst_type=24),
        lambda: call(torch.randn(7, 4).half(), torch.tensor([0, 7], dtype=torch.int32)),
    ),
)
def npu_grouped_dynamic_mx_quant(
    x: torch.Tensor,
    group_index: torch.Tensor,
    *,
    round_mode: str = "rint",
    dst_type: int = 23,
    blocksize: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float | None = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale [M / 64 + G, N, 2])`` of x [M, N]; ``group_index`` [G], int32, has the groups' ends."""
    name = "npu_grouped_dynamic_mx_quant"
    if blocksize != BLOCK:
        raise refused(name, "blocksize", blocksize, f"{BLOCK}")
    how = block_quantisation(name, dst_type, round_mode=round_mode, scale_alg=scale_alg, dst_type_max=dst_type_max)
    return quantised_groups(x, x.to(compute_dtype(x)), group_index, how, name)


@Operator(
    name="npu::npu_dynamic_dual_level_mx_quant",
    source="CANN operator documentation, aclnnDynamicDualLevelMxQuant",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    examples=(
        lambda: call(torch.randint(-6, 7, (3, 600)).half()),
        lambda: call(
            torch.randint(-6, 7, (2, 512)).half(), smooth_scale=torch.full((512,), 0.5).half(), round_mode="round"
        ),
    ),
)
def npu_dynamic_dual_level_mx_quant(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    smooth_scale: torch.Tensor | None = None,
    round_mode: str = "rint",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, scale0, scale1)``: uint8 [..., N / 2] float4_e2m1, float32 [..., N / 512], uint8 [..., N / 64, 2]."""
    name = "npu_dynamic_dual_level_mx_quant"
    how = block_quantisation(name, _E2M1, round_mode=round_mode)
    wide = input.to(compute_dtype(input))
    if smooth_scale is not None:
        wide = wide * smooth_scale.to(wide.dtype)
    size = wide.shape[-1]
    blocks = torch.nn.functional.pad(wide, (0, -size % _LEVEL_0)).unflatten(-1, (-1, _LEVEL_0))
    level_0 = blocks.abs().amax(-1, keepdim=True) / E2M1.largest
    temporary = torch.where(level_0 == 0, 0.0, blocks / level_0).flatten(-2)[..., :size]
    y, level_1 = quantised(input, temporary.to(input.dtype).to(wide.dtype), -1, how, name)
    return y, level_0.squeeze(-1).contiguous(), level_1


@Operator(
    name="npu::npu_anti_mx_quant",
    source="CANN operator documentation, aclnnAntiMxQuant",
    absent_on=("A2", "A3"),
    examples=(
        lambda: call(torch.randn(2, 70).to(torch.float8_e4m3fn), torch.randint(120, 130, (2, 2, 2)).to(torch.uint8)),
        lambda: call(
            torch.randint(0, 256, (64, 3)).to(torch.uint8), torch.randint(120, 130, (1, 6, 2)).to(torch.uint8), axis=0,
            dst_type=6, src_type=296,
        ),
    ),
)  # fmt: skip
def npu_anti_mx_quant(
    x: torch.Tensor,
    mxscale: torch.Tensor,
    *,
    axis: int | None = -1,
    dst_type: int | None = 15,
    src_type: int | None = 292,
) -> torch.Tensor:
    """Like x, of ``dst_type`` float16, bfloat16 or float32; twice as long where x has two 4-bit elements in a byte."""
    name, axis = "npu_anti_mx_quant", -1 if axis is None else axis
    element = element_of(292 if src_type is None else src_type, name, "src_type")
    target = dtype_of(15 if dst_type is None else dst_type, name, "dst_type")
    if x.dtype != element.dtype:
        raise refused(name, "x", x.dtype, f"{element.dtype}, as src_type says")
    if target not in {torch.float16, torch.bfloat16, torch.float32}:
        raise refused(name, "dst_type", target, "float16, bfloat16 or float32")
    values = unpack(x, element, torch.float32) if element.packed else x.float()
    wide = values.movedim(axis, -1)
    scale = scale_values(mxscale, torch.float32).movedim(axis - 1 if axis < 0 else axis, -2).flatten(-2)
    spread = scale.repeat_interleave(BLOCK, -1)[..., : wide.shape[-1]]
    return (wide * spread).movedim(-1, axis).contiguous().to(target)
