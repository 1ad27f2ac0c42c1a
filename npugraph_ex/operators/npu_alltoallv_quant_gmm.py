"""Quantised tokens to the ranks of their experts and the experts' matrix products; and the way back, products first.

Formula (operator documentation of ``torch_npu.npu_alltoallv_quant_gmm`` and ``npu_quant_gmm_alltoallv``): that of
``npu_alltoallv_gmm`` and ``npu_gmm_alltoallv``, with the products of quantised factors::

    modes 1 and 1:  product = (rows @ weight[expert]) * x_scale * weight_scale          hifloat8; scales [1] in float32
    modes 6 and 6:  product = (rows * x_scale) @ (weight[expert] * weight_scale[expert])    8-bit and 4-bit floats (MX)

The shared expert's product, of ``mm_x`` and ``mm_weight``, is of the same kind. In mode 6 scales are powers of two:
[rows, k / 64, 2] for the rows, with which they move, and [experts, k / 64, n, 2]. The scale of mode 1 is this rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from npugraph_ex.operators._floating_products import FloatingOperand, small_product
from npugraph_ex.operators._hifloat8 import HIFLOAT8
from npugraph_ex.operators._precision import refused
from npugraph_ex.operators._quantised_ranks import (
    MX_GROUPS,
    blocks,
    check_groups,
    check_reserved,
    check_scale,
    check_shape,
    check_way,
    depth,
    in_dtype,
    operands,
    result_dtype,
    width,
)
from npugraph_ex.operators._ranks import Exchange, Ranks, Steps
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_alltoallv_gmm import check_counts, order_by_expert, rows_by_rank

_FIRST, _LAST = "npu_alltoallv_quant_gmm", "npu_quant_gmm_alltoallv"
_TENSOR, _MX = 1, 6


class _ExpertFactors(NamedTuple):
    """Rows and their matrices, with scales and what the arguments say of them; ``prefix`` begins the arguments' names."""

    operator: str
    prefix: str
    x: torch.Tensor
    weight: torch.Tensor
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    modes: tuple[int | None, int | None]
    codes: tuple[int | None, int | None]
    scale_codes: tuple[int | None, int | None]
    y_dtype: int | None

    @property
    def in_blocks(self) -> bool:
        """Whether powers of two belong to 32 elements each."""
        return self.modes == (_MX, _MX)

    def check(self) -> torch.dtype:
        """The dtype of the product; raises for factors that do not go together."""
        names = [f"{self.prefix}_x", f"{self.prefix}_weight"]
        if self.modes not in {(_TENSOR, _TENSOR), (_MX, _MX)}:
            which = f"{names[0]}_quant_mode and {names[1]}_quant_mode"
            raise refused(self.operator, which, self.modes, f"{_TENSOR} and {_TENSOR}, or {_MX} and {_MX}")
        left, right = operands(self.operator, (self.x, self.weight), self.codes, names)
        if left.hifloat == self.in_blocks:
            expected = "not hifloat8 in mode 6" if self.in_blocks else f"hifloat8 ({HIFLOAT8}) in mode 1"
            raise refused(self.operator, f"{names[0]}_dtype", self.codes[0], expected)
        lead = tuple(self.weight.shape[:-2])
        if self.x.dim() != 2 or self.weight.dim() != (3 if self.prefix == "gmm" else 2):
            given = (tuple(self.x.shape), tuple(self.weight.shape))
            raise refused(self.operator, " and ".join(names), given, "[rows, k] and [experts, k, n], or [k, n] for mm")
        k = depth(left)
        if not self._is_as_deep(right, k):
            raise refused(
                self.operator, f"{names[1]}'s rows", self.weight.shape[-2], f"{k}, the last dimension of {names[0]}"
            )
        of_x, of_weight = ((self.x.shape[0], blocks(k), 2), (*lead, blocks(k), width(right, k), 2))
        for name, scale, code, shape in zip(names, self.scales, self.scale_codes, (of_x, of_weight), strict=True):
            check_shape(self.operator, f"{name}_scale", scale, shape if self.in_blocks else (1,))
            check_scale(self.operator, f"{name}_scale", scale, code, (torch.float32,), in_blocks=self.in_blocks)
        return result_dtype(self.operator, self.y_dtype, f"{self.prefix}_y_dtype")

    def _is_as_deep(self, right: FloatingOperand, k: int) -> bool:
        rows = right.tensor.shape[-2]
        return rows == k or (right.packed and 2 * rows == k)

    def product(self, rows: torch.Tensor, scale: torch.Tensor | None, expert: int | None = None) -> torch.Tensor:
        """Rows times their matrix, in float32; ``scale`` is that of the rows."""
        weight = self.weight if expert is None else self.weight[expert]
        of_weight = self.scales[1]
        if self.in_blocks and expert is not None and of_weight is not None:
            of_weight = of_weight[expert]
        return small_product(self.operator, (rows, weight), self.codes, (scale, of_weight))

    def alone(self) -> torch.Tensor:
        """The product of the shared expert, once its factors are checked."""
        target = self.check()
        return in_dtype(self.product(self.x, self.scales[0]), target)

    def products(self, rows: torch.Tensor, scale: torch.Tensor | None, counts: Sequence[int]) -> torch.Tensor:
        """Rows that lie by expert, times their expert's matrix; ``counts`` are by rank, then by expert."""
        experts = self.weight.shape[0]
        sizes = [sum(counts[expert::experts]) for expert in range(experts)]
        parts = rows.split(sizes)
        scales = scale.split(sizes) if self.in_blocks and scale is not None else [scale] * experts
        return torch.cat([self.product(parts[expert], scales[expert], expert) for expert in range(experts)])


def _shared(
    operator: str, x: torch.Tensor | None, weight: torch.Tensor | None, like: _ExpertFactors, **given: Any
) -> _ExpertFactors | None:
    """The shared expert's factors; raises for arguments that come without it, and for another kind than the other experts'."""
    if (x is None) != (weight is None):
        raise refused(operator, "mm_x and mm_weight", "one tensor", "both None or both tensors")
    if x is None or weight is None:
        beside = [name for name, value in given.items() if value is not None]
        if beside:
            raise refused(operator, beside[0], given[beside[0]], "None without mm_x")
        return None
    factors = _ExpertFactors(
        operator, "mm", x, weight, (given["mm_x_scale"], given["mm_weight_scale"]),
        (given["mm_x_quant_mode"], given["mm_weight_quant_mode"]), (given["mm_x_dtype"], given["mm_weight_dtype"]),
        (given["mm_x_scale_dtype"], given["mm_weight_scale_dtype"]), given["mm_y_dtype"],
    )  # fmt: skip
    if factors.modes != like.modes:
        which = "mm_x_quant_mode and mm_weight_quant_mode"
        raise refused(operator, which, factors.modes, f"{like.modes}, those of gmm_x and gmm_weight")
    return factors


def _check_rows(
    factors: _ExpertFactors, send: Sequence[int], taken: Sequence[int], ranks: int, groups: Sequence[int] | None
) -> None:
    """Raise for counts that do not fit the rows, and for sizes of blocks."""
    check_counts(factors.operator, ranks, factors.weight.shape[0], send, taken)
    if sum(send) != factors.x.shape[0]:
        raise refused(factors.operator, "the sum of send_counts", sum(send), f"{factors.x.shape[0]}, the rows of gmm_x")
    check_groups(factors.operator, "group_size", groups, MX_GROUPS if factors.in_blocks else [0, 0, 0])


def _hifloats(*size: int) -> torch.Tensor:
    return torch.randint(8, 64, size).to(torch.uint8)


_OF_TENSORS = {"gmm_x_quant_mode": 1, "gmm_weight_quant_mode": 1, "gmm_x_dtype": HIFLOAT8, "gmm_weight_dtype": HIFLOAT8}
_SHARED = {
    "mm_x_quant_mode": 1,
    "mm_weight_quant_mode": 1,
    "mm_x_dtype": HIFLOAT8,
    "mm_weight_dtype": HIFLOAT8,
    "mm_y_dtype": 5,
}


@Operator(
    name="npu::npu_alltoallv_quant_gmm",
    source="operator documentation of torch_npu.npu_alltoallv_quant_gmm, and op-plugin's test of it",
    dtypes=(torch.float32,),
    examples=(
        lambda: call(
            _hifloats(6, 8), _hifloats(2, 8, 4), torch.rand(1), torch.rand(1), "group", 2, [1, 2, 1, 2], [1, 2, 1, 2], 5,
            permute_out_flag=True, mm_x=_hifloats(3, 8), mm_weight=_hifloats(6, 8).t(), mm_x_scale=torch.rand(1),
            mm_weight_scale=torch.rand(1), **_OF_TENSORS, **_SHARED,
        ),
        lambda: call(
            _hifloats(6, 8), _hifloats(2, 4, 8).mT, torch.rand(1), torch.rand(1), "group", 2, [1, 2, 1, 2], [0, 3, 2, 1],
            torch.bfloat16, **_OF_TENSORS,
        ),
    ),
)  # fmt: skip
def npu_alltoallv_quant_gmm(
    gmm_x: torch.Tensor,
    gmm_weight: torch.Tensor,
    gmm_x_scale: torch.Tensor,
    gmm_weight_scale: torch.Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    gmm_y_dtype: int,
    *,
    send_counts_tensor: torch.Tensor | None = None,
    recv_counts_tensor: torch.Tensor | None = None,
    mm_x: torch.Tensor | None = None,
    mm_weight: torch.Tensor | None = None,
    mm_x_scale: torch.Tensor | None = None,
    mm_weight_scale: torch.Tensor | None = None,
    gmm_x_quant_mode: int | None = None,
    gmm_weight_quant_mode: int | None = None,
    mm_x_quant_mode: int | None = None,
    mm_weight_quant_mode: int | None = None,
    permute_out_flag: bool = False,
    group_size: Sequence[int] | None = None,
    gmm_x_dtype: int | None = None,
    gmm_weight_dtype: int | None = None,
    gmm_x_scale_dtype: int | None = None,
    gmm_weight_scale_dtype: int | None = None,
    mm_x_dtype: int | None = None,
    mm_weight_dtype: int | None = None,
    mm_x_scale_dtype: int | None = None,
    mm_weight_scale_dtype: int | None = None,
    mm_y_dtype: int | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """``(gmm_y [received, n], mm_y [rows, n2] or None, permute_out [received, k] or None)``; gmm_x: [sent, k], by expert."""
    check_reserved(_FIRST, send_counts_tensor=send_counts_tensor, recv_counts_tensor=recv_counts_tensor)
    check_way(_FIRST, comm_mode)
    factors = _ExpertFactors(
        _FIRST, "gmm", gmm_x, gmm_weight, (gmm_x_scale, gmm_weight_scale), (gmm_x_quant_mode, gmm_weight_quant_mode),
        (gmm_x_dtype, gmm_weight_dtype), (gmm_x_scale_dtype, gmm_weight_scale_dtype), gmm_y_dtype,
    )  # fmt: skip
    beside = _shared(
        _FIRST, mm_x, mm_weight, factors, mm_x_scale=mm_x_scale, mm_weight_scale=mm_weight_scale, mm_x_quant_mode=mm_x_quant_mode,
        mm_weight_quant_mode=mm_weight_quant_mode, mm_x_dtype=mm_x_dtype, mm_weight_dtype=mm_weight_dtype,
        mm_x_scale_dtype=mm_x_scale_dtype, mm_weight_scale_dtype=mm_weight_scale_dtype, mm_y_dtype=mm_y_dtype,
    )  # fmt: skip
    target = factors.check()
    _check_rows(factors, send_counts, recv_counts, ep_world_size, group_size)
    mm_y = None if beside is None else beside.alone()
    experts = gmm_weight.shape[0]
    rows = (rows_by_rank(send_counts, experts), rows_by_rank(recv_counts, experts))
    moved = (gmm_x, gmm_x_scale) if factors.in_blocks else (gmm_x,)
    everyone: Ranks = yield Exchange(hcom, moved, rows, ranks=ep_world_size)
    order = order_by_expert(recv_counts, experts)
    permuted, *scales = (torch.cat(parts)[order] for parts in zip(*everyone.parts, strict=True))
    product = factors.products(permuted, scales[0] if scales else gmm_x_scale, recv_counts)
    return in_dtype(product, target), mm_y, permuted if permute_out_flag else None


@Operator(
    name="npu::npu_quant_gmm_alltoallv",
    source="operator documentation of torch_npu.npu_quant_gmm_alltoallv, and op-plugin's test of it",
    dtypes=(torch.float32,),
    first_factor=0,
    examples=(
        lambda: call(
            _hifloats(6, 8), _hifloats(2, 8, 4), torch.rand(1), torch.rand(1), "group", 2, [1, 2, 1, 2], [1, 2, 1, 2], 5,
            mm_x=_hifloats(3, 8), mm_weight=_hifloats(8, 6), mm_x_scale=torch.rand(1), mm_weight_scale=torch.rand(1), **_OF_TENSORS,
            **_SHARED,
        ),
        lambda: call(
            _hifloats(6, 8), _hifloats(2, 4, 8).mT, torch.rand(1), torch.rand(1), "group", 2, [1, 2, 1, 2], [0, 3, 2, 1],
            torch.bfloat16, **_OF_TENSORS,
        ),
    ),
)  # fmt: skip
def npu_quant_gmm_alltoallv(
    gmm_x: torch.Tensor,
    gmm_weight: torch.Tensor,
    gmm_x_scale: torch.Tensor,
    gmm_weight_scale: torch.Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    gmm_y_dtype: int,
    *,
    send_counts_tensor: torch.Tensor | None = None,
    recv_counts_tensor: torch.Tensor | None = None,
    mm_x: torch.Tensor | None = None,
    mm_weight: torch.Tensor | None = None,
    mm_x_scale: torch.Tensor | None = None,
    mm_weight_scale: torch.Tensor | None = None,
    comm_quant_scale: torch.Tensor | None = None,
    gmm_x_quant_mode: int | None = None,
    gmm_weight_quant_mode: int | None = None,
    mm_x_quant_mode: int | None = None,
    mm_weight_quant_mode: int | None = None,
    comm_quant_mode: int | None = None,
    group_size: Sequence[int] | None = None,
    gmm_x_dtype: int | None = None,
    gmm_weight_dtype: int | None = None,
    gmm_x_scale_dtype: int | None = None,
    gmm_weight_scale_dtype: int | None = None,
    mm_x_dtype: int | None = None,
    mm_weight_dtype: int | None = None,
    mm_x_scale_dtype: int | None = None,
    mm_weight_scale_dtype: int | None = None,
    comm_quant_dtype: int | None = None,
    mm_y_dtype: int | None = None,
    comm_mode: str | None = None,
) -> Steps:
    """``(y [received, n], mm_y [rows, n2] or None)``. gmm_x: [sent, k], by expert and then by the rank that it goes to."""
    check_reserved(
        _LAST, send_counts_tensor=send_counts_tensor, recv_counts_tensor=recv_counts_tensor, comm_quant_scale=comm_quant_scale,
        comm_quant_mode=comm_quant_mode, comm_quant_dtype=comm_quant_dtype,
    )  # fmt: skip
    check_way(_LAST, comm_mode)
    factors = _ExpertFactors(
        _LAST, "gmm", gmm_x, gmm_weight, (gmm_x_scale, gmm_weight_scale), (gmm_x_quant_mode, gmm_weight_quant_mode),
        (gmm_x_dtype, gmm_weight_dtype), (gmm_x_scale_dtype, gmm_weight_scale_dtype), gmm_y_dtype,
    )  # fmt: skip
    beside = _shared(
        _LAST, mm_x, mm_weight, factors, mm_x_scale=mm_x_scale, mm_weight_scale=mm_weight_scale, mm_x_quant_mode=mm_x_quant_mode,
        mm_weight_quant_mode=mm_weight_quant_mode, mm_x_dtype=mm_x_dtype, mm_weight_dtype=mm_weight_dtype,
        mm_x_scale_dtype=mm_x_scale_dtype, mm_weight_scale_dtype=mm_weight_scale_dtype, mm_y_dtype=mm_y_dtype,
    )  # fmt: skip
    target = factors.check()
    _check_rows(factors, send_counts, recv_counts, ep_world_size, group_size)
    mm_y = None if beside is None else beside.alone()
    experts = gmm_weight.shape[0]
    product = in_dtype(factors.products(gmm_x, gmm_x_scale, send_counts), target)
    by_rank = torch.empty_like(product)
    by_rank[order_by_expert(send_counts, experts).to(product.device)] = product
    rows = (rows_by_rank(send_counts, experts), rows_by_rank(recv_counts, experts))
    everyone: Ranks = yield Exchange(hcom, (by_rank,), rows, ranks=ep_world_size)
    return torch.cat([given[0] for given in everyone.parts]), mm_y
