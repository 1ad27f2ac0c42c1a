"""Batched matrix product of three dimensions, then ``transpose(0, 1)`` => ``npu_transpose_batchmatmul``.

``matmul`` or ``bmm``; the transposition by ``transpose`` (either order, also negative) or ``permute``; the first operand
plain or transposed in the same way. Not in mode "max-autotune" (specification 003).

The fused operator writes (M, B, N) densely, where the graph had a transposed view of (B, M, N). So the rule applies only if
no program can see the strides, for example before a ``reshape`` or ``contiguous``, and not if the view is a result of the
graph.

Constraints: K and N are multiples of 128 and K * B < 65536 (CANN graph fusion reference,
BatchMatMul2TransposeBatchMatMulFusionPass); B and N are below 65536, both operands of one dtype, float16, bfloat16 or
float32 (CANN operator documentation, aclnnTransposeBatchMatMul). The operator does not broadcast batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._inductor.pattern_matcher import Match

from npugraph_ex.fusion.conditions import holds, value_of
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules._built_in_rule import FLOATING, BuiltInRule, Operands

NAME = "transpose_batchmatmul"
DTYPES = FLOATING
ALIGNMENT = 128
LIMIT = 65536

Product = Callable[[Tensor, Tensor], Tensor]
Swap = Callable[[Tensor], Tensor]


def _transpose(y: Tensor) -> Tensor:
    return y.transpose(0, 1)


def _permute(y: Tensor) -> Tensor:
    return y.permute(1, 0, 2)


def _unsupported(match: Match, *, batch_dim: int) -> str | None:
    """The first constraint that the match violates; the batches of x1 are its dimension ``batch_dim``."""
    x1, x2 = value_of(match, "x1"), value_of(match, "x2")
    if x1 is None or x2 is None or x1.dim() != 3 or x2.dim() != 3:
        return "the operands must have 3 dimensions each"
    if x1.dtype not in DTYPES or x2.dtype != x1.dtype:
        return f"the operands are {x1.dtype} and {x2.dtype}; the fused operator takes {', '.join(map(str, DTYPES))}"
    batches, k, n = x1.shape[batch_dim], x1.shape[2], x2.shape[2]
    if not holds(batches == x2.shape[0]):
        return f"x1 has {batches} batches and x2 {x2.shape[0]}; the fused operator does not broadcast"
    if not holds(x1.numel() > 0) or not holds(x2.numel() > 0):
        return "an operand may be empty, which the fused operator does not take"
    for name, size in (("K", k), ("N", n)):
        if not holds(size % ALIGNMENT == 0):
            return f"{name} is {size}, not a multiple of {ALIGNMENT}"
    for name, size in (("K * B", k * batches), ("B", batches), ("N", n)):
        if not holds(size < LIMIT):
            return f"{name} is {size}; it must be below {LIMIT}"
    return None


def _plain(product: Product, swap: Swap) -> FusionRule:
    def search(x1: Tensor, x2: Tensor) -> Tensor:
        return swap(product(x1, x2))

    def replace(x1: Tensor, x2: Tensor) -> Tensor:
        result: Tensor = torch.ops.npu.npu_transpose_batchmatmul(
            x1, x2, perm_x1=[0, 1, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        )
        return result

    return _rule(search, replace, 0)


def _from_transposed(product: Product, swap: Swap) -> FusionRule:
    def search(x1: Tensor, x2: Tensor) -> Tensor:
        return swap(product(swap(x1), x2))

    def replace(x1: Tensor, x2: Tensor) -> Tensor:
        result: Tensor = torch.ops.npu.npu_transpose_batchmatmul(
            x1, x2, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        )
        return result

    return _rule(search, replace, 1)


def _rule(search: Callable[..., Tensor], replace: Callable[..., Tensor], batch_dim: int) -> FusionRule:
    def examples() -> list[Tensor]:
        x1 = [3, 128]
        x1.insert(batch_dim, 2)
        return [torch.empty(shape, dtype=torch.float16, device="npu") for shape in (x1, (2, 128, 256))]

    def condition(match: Match) -> str | None:
        return _unsupported(match, batch_dim=batch_dim)

    return FusionRule(NAME, search, replace, examples, condition, free_strides=True, not_in_modes=("max-autotune",))


RULE = BuiltInRule(
    variants=tuple(
        rule(product, swap)
        for rule in (_from_transposed, _plain)
        for product in (torch.matmul, torch.bmm)
        for swap in (_transpose, _permute)
    ),
    default=True,
    order=40,
    anchors=("aten::transpose", "aten::permute"),
    operands=Operands(
        dtypes=DTYPES,
        refused_sizes=({128: ALIGNMENT // 2}, {256: ALIGNMENT * 3 // 2}, {2: LIMIT // 128}, {256: LIMIT}),
        contains_another=True,
    ),
)
