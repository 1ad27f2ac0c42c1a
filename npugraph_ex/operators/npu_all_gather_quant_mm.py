"""Quantised factors in one operator with a collective: rows gathered before their product, or its sums scattered.

Formula (operator documentation of ``torch_npu.npu_all_gather_quant_mm`` and ``npu_quant_mm_reduce_scatter``; CANN operator
documentation, aclnnAllGatherMatmulV2 and aclnnMatmulReduceScatterV2), with m rows and W ranks::

    float16, bfloat16:         product(x1) = x1 @ x2 + bias
    int8:                      product(x1) = (x1_scale * x2_scale) * (x1 @ x2)             [m, 1] and [1, n], or one of them
    8-bit and 4-bit floats:    product(x1) = (x1 * x1_scale) @ (x2 * x2_scale)             of the tensor, [1]; of blocks of
                                                                                           128 * 128; of 32 along k (MX)

    npu_all_gather_quant_mm:      gathered = the ranks' x1, one below the other;  out = product(gathered)
    npu_quant_mm_reduce_scatter:  out      = sum of the ranks' product(x1)[rank * m / W : (rank + 1) * m / W]

Scales of rows and of blocks are gathered with ``x1``; the one scale of a tensor is this rank's own. Products are rounded to the
output's dtype before they are added up, by ranks. The second and third result are empty unless ``gather_output`` is True.

Not covered: int4 factors; ``bias`` of quantised factors, of which the two documents disagree whether the scales multiply it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import HALVES, refused, unsupported
from npugraph_ex.operators._quantised_ranks import (
    MX_GROUPS,
    blocks,
    check_groups,
    check_no_int4,
    check_reserved,
    check_scale,
    check_shape,
    check_way,
    depth,
    operands,
    result_dtype,
    width,
)
from npugraph_ex.operators._ranks import Exchange, Ranks, Steps, total
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import CODE_OF_DTYPE
from npugraph_ex.operators.npu_mm_all_reduce_base import check_plain, check_product, plain_product
from npugraph_ex.operators.npu_mm_reduce_scatter_base import check_inner, check_ranks, of_rows
from npugraph_ex.operators.npu_quant_matmul import npu_quant_matmul

_GATHER, _SCATTER = "npu_all_gather_quant_mm", "npu_quant_mm_reduce_scatter"
_SIZES = (2, 4, 8, 16, 32, 64)
_BLOCK = 128


def _ceil(length: int) -> int:
    return -(-length // _BLOCK)


class _RankProduct:
    """This rank's product, and what the device refuses of it."""

    def __init__(
        self,
        operator: str,
        factors: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
        codes: tuple[int | None, int | None],
        y_dtype: int | None,
        bias: torch.Tensor | None,
    ) -> None:
        self.operator, self.codes, self.bias = operator, codes, bias
        self.x1, self.x2 = factors
        self.x1_scale, self.x2_scale = scales
        check_no_int4(operator, x1_dtype=codes[0], x2_dtype=codes[1], x1=self.x1.dtype, x2=self.x2.dtype)
        check_product(operator, self.x1, self.x2)
        self.is_plain = self.x1.dtype in HALVES or self.x1.dtype == torch.float64
        self.is_whole = self.x1.dtype == torch.int8 and codes[0] in {None, 1}
        if self.is_plain:
            self.target = (
                self.x1.dtype if y_dtype is None else result_dtype(operator, y_dtype, allowed=(self.x1.dtype,))
            )
        else:
            allowed = HALVES if self.is_whole else (*HALVES, torch.float32)
            self.target = result_dtype(operator, y_dtype, allowed=allowed)

    def check(self, group_sizes: Sequence[int] | None, scale_codes: tuple[int | None, int | None]) -> None:
        """Raise for dtypes, scales and sizes of blocks that do not go together."""
        if self.is_plain or self.is_whole:
            if self.x2.dtype != self.x1.dtype or self.codes[1] not in {None, CODE_OF_DTYPE[self.x1.dtype]}:
                given = (self.x1.dtype, self.x2.dtype, *self.codes)
                raise refused(self.operator, "the dtypes of the factors", given, "the same for both")
            check_groups(self.operator, "group_sizes", group_sizes, [0, 0, 0])
            check_inner(self.operator, self.x1.shape[1])
        if self.is_plain:
            if self.x1_scale is not None or self.x2_scale is not None:
                raise refused(self.operator, "x1_scale and x2_scale", "tensors", f"None for {self.x1.dtype}")
            if self.bias is not None:
                check_shape(self.operator, "bias", self.bias, (self.x2.shape[1],))
            return
        if self.bias is not None:
            raise unsupported(self.operator, "bias", "a tensor", "None for quantised factors")
        if self.is_whole:
            self._check_whole()
        else:
            self._check_floats(group_sizes, scale_codes)

    def _check_whole(self) -> None:
        if self.x1_scale is None and self.x2_scale is None:
            raise refused(
                self.operator, "x1_scale and x2_scale", None, "one tensor at least where the factors are int8"
            )
        if self.x1_scale is not None:
            check_shape(self.operator, "x1_scale", self.x1_scale, (self.x1.shape[0], 1))
        if self.x2_scale is None:
            self.x2_scale = torch.ones(1, device=self.x2.device)
            return
        check_shape(self.operator, "x2_scale", self.x2_scale, (1, self.x2.shape[1]))
        if not self.x2_scale.is_floating_point() and self.target != torch.float16:
            raise refused(self.operator, "x2_scale", self.x2_scale.dtype, "float32, unless the result is float16")

    def _check_floats(self, group_sizes: Sequence[int] | None, scale_codes: tuple[int | None, int | None]) -> None:
        left, right = operands(self.operator, (self.x1, self.x2), self.codes, ("x1", "x2"))
        m, k = self.x1.shape[0], depth(left)
        n = width(right, k)
        check_inner(self.operator, k)
        of_blocks = ((_ceil(m), _ceil(k)), (_ceil(k), _ceil(n)))
        of_mx = ((m, blocks(k), 2), (blocks(k), n, 2))
        kinds = [of_mx] if left.packed else [((1,), (1,)), of_blocks, *([] if left.hifloat else [of_mx])]
        check_shape(self.operator, "x1_scale", self.x1_scale, *(kind[0] for kind in kinds))
        kind = next(kind for kind in kinds if self.x1_scale is not None and kind[0] == tuple(self.x1_scale.shape))
        check_shape(self.operator, "x2_scale", self.x2_scale, kind[1])
        for name, scale, code in zip(
            ("x1_scale", "x2_scale"), (self.x1_scale, self.x2_scale), scale_codes, strict=True
        ):
            check_scale(self.operator, name, scale, code, (*HALVES, torch.float32), in_blocks=kind is of_mx)
        sizes = [0, 0, 0] if kind[0] == (1,) else MX_GROUPS if kind is of_mx else [_BLOCK] * 3
        check_groups(self.operator, "group_sizes", group_sizes, sizes)

    @property
    def scale_travels(self) -> bool:
        """Whether ``x1_scale`` has a number for rows, which go to other ranks."""
        return self.x1_scale is not None and self.x1_scale.dim() > 1

    def of(self, x1: torch.Tensor, x1_scale: torch.Tensor | None) -> torch.Tensor:
        """The product of some rank's rows, in the dtype of the result."""
        if self.is_plain:
            return plain_product(x1, self.x2, self.bias)
        assert self.x2_scale is not None  # noqa: S101 - `check` sees to it
        whole = self.is_whole
        return npu_quant_matmul(
            x1, self.x2, self.x2_scale.flatten() if whole else self.x2_scale,
            pertoken_scale=x1_scale.flatten() if whole and x1_scale is not None else x1_scale,
            output_dtype=CODE_OF_DTYPE[self.target],
            x1_dtype=None if whole else self.codes[0], x2_dtype=None if whole else self.codes[1],
        )  # fmt: skip


def _halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half() / 16


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


def _hifloats(*size: int) -> torch.Tensor:
    return torch.randint(8, 64, size).to(torch.uint8)


@Operator(
    name="npu::npu_all_gather_quant_mm",
    source="operator documentation of torch_npu.npu_all_gather_quant_mm; CANN operator documentation, aclnnAllGatherMatmulV2",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(_halves(3, 256), _halves(8, 256).t(), "group", 2, bias=_halves(8), gather_output=False),
        lambda: call(
            _small(3, 256), _small(256, 8), "group", 2, x1_scale=torch.rand(3, 1), x2_scale=torch.rand(1, 8), comm_mode="aiv",
            y_dtype=torch.bfloat16,
        ),
        lambda: call(
            _hifloats(3, 320), _hifloats(320, 8), "group", 2, x1_scale=torch.rand(1, 3), x2_scale=torch.rand(3, 1), x1_dtype=290,
            x2_dtype=290, y_dtype=torch.float16, group_sizes=[128, 128, 128],
        ),
    ),
)  # fmt: skip
def npu_all_gather_quant_mm(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    block_size: int = 0,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    group_sizes: Sequence[int] | None = None,
    amax_output: bool = False,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """``(out [m * world_size, n], gathered [m * world_size, k], amax [0])``. input: [m, k]; x2: [k, n]; scales as above."""
    check_ranks(_GATHER, world_size, _SIZES)
    check_reserved(_GATHER, quant_scale=quant_scale, block_size=block_size, gather_index=gather_index, comm_turn=comm_turn,
                   amax_output=amax_output)  # fmt: skip
    product = _RankProduct(_GATHER, (input, x2), (x1_scale, x2_scale), (x1_dtype, x2_dtype), y_dtype, bias)
    product.check(group_sizes, (x1_scale_dtype, x2_scale_dtype))
    ways = (
        (None, "ai_cpu", "ccu", "aiv")
        if product.is_plain
        else ("aiv",)
        if product.is_whole
        else (None, "ai_cpu", "ccu")
    )
    check_way(_GATHER, comm_mode, ways)
    travels = x1_scale is not None and product.scale_travels
    everyone: Ranks = yield Exchange(
        hcom, (input, x1_scale) if x1_scale is not None and travels else (input,), ranks=world_size
    )
    out = torch.cat([product.of(given[0], given[1] if travels else x1_scale) for given in everyone.parts])
    gathered = torch.cat([given[0] for given in everyone.parts]) if gather_output else input.new_empty(0)
    return out, gathered, input.new_empty(0, dtype=torch.float32)


@Operator(
    name="npu::npu_quant_mm_reduce_scatter",
    source="operator documentation of torch_npu.npu_quant_mm_reduce_scatter; "
    "CANN operator documentation, aclnnMatmulReduceScatterV2",
    dtypes=(torch.float16, torch.bfloat16),
    first_factor=0,
    examples=(
        lambda: call(_halves(4, 256), _halves(256, 8), "group", 2, bias=_halves(8)),
        lambda: call(_small(4, 256), _small(256, 8), "group", 2, x1_scale=torch.rand(4, 1), y_dtype=torch.float16),
        lambda: call(
            _hifloats(4, 256), _hifloats(8, 256).t(), "group", 2, x1_scale=torch.rand(1), x2_scale=torch.rand(1), x1_dtype=290,
            x2_dtype=290, y_dtype=torch.bfloat16,
        ),
    ),
)  # fmt: skip
def npu_quant_mm_reduce_scatter(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    block_size: int = 0,
    comm_turn: int = 0,
    group_sizes: Sequence[int] | None = None,
    amax_output: bool = False,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    x1_scale_dtype: int | None = None,
    x2_scale_dtype: int | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """``(out [m / world_size, n], amax [0])``. input: [m, k]; x2: [k, n]; scales as above."""
    check_ranks(_SCATTER, world_size, _SIZES)
    check_plain(_SCATTER, reduce_op)
    check_reserved(
        _SCATTER, quant_scale=quant_scale, block_size=block_size, comm_turn=comm_turn, amax_output=amax_output
    )
    product = _RankProduct(_SCATTER, (input, x2), (x1_scale, x2_scale), (x1_dtype, x2_dtype), y_dtype, bias)
    product.check(group_sizes, (x1_scale_dtype, x2_scale_dtype))
    ways = (
        (None, "ai_cpu", "ccu", "aiv")
        if product.is_plain
        else (None, *(("aiv",) if product.is_whole else ("ai_cpu", "ccu")))
    )
    check_way(_SCATTER, comm_mode, ways)
    everyone: Ranks = yield of_rows(_SCATTER, product.of(input, x1_scale), hcom, world_size)
    return total(everyone), input.new_empty(0, dtype=torch.float32)
