"""Tokens to the ranks of their experts and the experts' matrix products; and the way back, products first.

Formula (operator documentation of ``torch_npu.npu_alltoallv_gmm`` and ``npu_gmm_alltoallv``), with W ranks and e experts on each.
``send_counts`` and ``recv_counts`` have the number of tokens for each rank and, within, for each expert [W * e]::

    npu_alltoallv_gmm:  received    = gmm_x, sent by send_counts            by rank, then by expert
                        permute_out = received by expert, then by rank
                        gmm_y       = permute_out @ gmm_weight[expert]

    npu_gmm_alltoallv:  product     = gmm_x @ gmm_weight[expert]            by expert, then by rank
                        y           = product by rank, then by expert, sent by send_counts

    mm_y = mm_x @ mm_weight                                                 the shared expert, with no exchange

``trans_gmm_weight`` and ``trans_mm_weight``: the matrices are stored transposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import refused, unsupported
from npugraph_ex.operators._ranks import Exchange, Ranks, Steps
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_mm_all_reduce_base import plain_product

_FIRST, _LAST = "npu_alltoallv_gmm", "npu_gmm_alltoallv"
_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
_MOST_COUNTS = 256


def check_counts(operator: str, ranks: int, experts: int, send: Sequence[int], taken: Sequence[int]) -> None:
    """Raise for a number of ranks, or lists of counts, that the device does not serve."""
    if ranks not in _SIZES:
        raise refused(operator, "ep_world_size", ranks, f"one of {', '.join(map(str, _SIZES))}")
    wanted = ranks * experts
    for name, counts in (("send_counts", send), ("recv_counts", taken)):
        if len(counts) != wanted or wanted > _MOST_COUNTS or min(counts) < 0:
            raise refused(
                operator, name, list(counts), f"{wanted} numbers, at most {_MOST_COUNTS}: one for each rank and expert"
            )


def _check(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    transposed: bool,
    ranks: int,
    send: Sequence[int],
    taken: Sequence[int],
) -> None:
    """Raise for counts, sizes and dtypes that do not fit."""
    if (
        x.dim() != 2
        or weight.dim() != 3
        or weight.dtype != x.dtype
        or x.shape[1] != weight.shape[2 if transposed else 1]
    ):
        raise refused(operator, "gmm_x and gmm_weight", f"{tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} {weight.dtype}",
                      "[rows, k] and [experts, k, n] of one dtype")  # fmt: skip
    check_counts(operator, ranks, weight.shape[0], send, taken)


def rows_by_rank(counts: Sequence[int], experts: int) -> list[int]:
    """How many rows each rank sends or takes."""
    return [sum(counts[at : at + experts]) for at in range(0, len(counts), experts)]


def order_by_expert(counts: Sequence[int], experts: int) -> torch.Tensor:
    """Where the rows that lie by expert, then by rank, are if they lie by rank, then by expert."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    pieces = [torch.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
    return torch.cat([piece for expert in range(experts) for piece in pieces[expert::experts]])


def _products(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], transposed: bool) -> torch.Tensor:
    """The rows of ``x``, which lie by expert, times their expert's matrix; ``counts`` are by rank, then by expert."""
    experts = weight.shape[0]
    parts = x.split([sum(counts[expert::experts]) for expert in range(experts)])
    matrices = weight.mT if transposed else weight
    return torch.cat([plain_product(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])


def _shared(
    operator: str, x: torch.Tensor | None, weight: torch.Tensor | None, transposed: bool
) -> torch.Tensor | None:
    if (x is None) != (weight is None):
        raise refused(operator, "mm_x and mm_weight", "one tensor", "both None or both tensors")
    return None if x is None or weight is None else plain_product(x, weight.t() if transposed else weight)


def _halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


@Operator(
    name="npu::npu_alltoallv_gmm",
    source="operator documentation of torch_npu.npu_alltoallv_gmm, and op-plugin's test of it",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(_halves(6, 8), _halves(2, 8, 4), "group", 2, [1, 2, 1, 2], [1, 2, 1, 2], permute_out_flag=True),
        lambda: call(
            _halves(6, 8), _halves(2, 4, 8), "group", 2, [1, 2, 1, 2], [0, 3, 2, 1], mm_x=_halves(3, 8), mm_weight=_halves(5, 8),
            trans_gmm_weight=True, trans_mm_weight=True,
        ),
    ),
)  # fmt: skip
def npu_alltoallv_gmm(
    gmm_x: torch.Tensor,
    gmm_weight: torch.Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_counts_tensor: torch.Tensor | None = None,
    recv_counts_tensor: torch.Tensor | None = None,
    mm_x: torch.Tensor | None = None,
    mm_weight: torch.Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    permute_out_flag: bool = False,
    comm_mode: str | None = None,
) -> Steps:
    """``(gmm_y [received, n], mm_y [rows, n2] or None, permute_out [received, k] or None)``; gmm_x: [sent, k], by expert."""
    _check(_FIRST, gmm_x, gmm_weight, trans_gmm_weight, ep_world_size, send_counts, recv_counts)
    if send_counts_tensor is not None or recv_counts_tensor is not None:
        raise unsupported(_FIRST, "send_counts_tensor and recv_counts_tensor", "tensors", "None")
    experts = gmm_weight.shape[0]
    rows = (rows_by_rank(send_counts, experts), rows_by_rank(recv_counts, experts))
    if sum(rows[0]) != gmm_x.shape[0]:
        raise refused(_FIRST, "the sum of send_counts", sum(rows[0]), f"{gmm_x.shape[0]}, the rows of gmm_x")
    everyone: Ranks = yield Exchange(hcom, (gmm_x,), rows, ranks=ep_world_size)
    permuted = torch.cat([given[0] for given in everyone.parts])[order_by_expert(recv_counts, experts)]
    product = _products(permuted, gmm_weight, recv_counts, trans_gmm_weight)
    return product, _shared(_FIRST, mm_x, mm_weight, trans_mm_weight), permuted if permute_out_flag else None


@Operator(
    name="npu::npu_gmm_alltoallv",
    source="operator documentation of torch_npu.npu_gmm_alltoallv, and op-plugin's test of it",
    dtypes=(torch.float16, torch.bfloat16),
    first_factor=0,
    examples=(
        lambda: call(_halves(6, 8), _halves(2, 8, 4), "group", 2, [1, 2, 1, 2], [1, 2, 1, 2]),
        lambda: call(
            _halves(6, 8), _halves(2, 4, 8), "group", 2, [1, 2, 1, 2], [0, 3, 2, 1], mm_x=_halves(3, 8), mm_weight=_halves(8, 5),
            trans_gmm_weight=True,
        ),
    ),
)  # fmt: skip
def npu_gmm_alltoallv(
    gmm_x: torch.Tensor,
    gmm_weight: torch.Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    send_counts_tensor: torch.Tensor | None = None,
    recv_counts_tensor: torch.Tensor | None = None,
    mm_x: torch.Tensor | None = None,
    mm_weight: torch.Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    comm_mode: str | None = None,
) -> Steps:
    """``(y [received, n], mm_y [rows, n2] or None)``. gmm_x: [sent, k], by expert and then by the rank that it goes to."""
    _check(_LAST, gmm_x, gmm_weight, trans_gmm_weight, ep_world_size, send_counts, recv_counts)
    if send_counts_tensor is not None or recv_counts_tensor is not None:
        raise unsupported(_LAST, "send_counts_tensor and recv_counts_tensor", "tensors", "None")
    experts = gmm_weight.shape[0]
    if sum(send_counts) != gmm_x.shape[0]:
        raise refused(_LAST, "the sum of send_counts", sum(send_counts), f"{gmm_x.shape[0]}, the rows of gmm_x")
    product = _products(gmm_x, gmm_weight, send_counts, trans_gmm_weight)
    by_rank = torch.empty_like(product)
    by_rank[order_by_expert(send_counts, experts).to(product.device)] = product
    rows = (rows_by_rank(send_counts, experts), rows_by_rank(recv_counts, experts))
    everyone: Ranks = yield Exchange(hcom, (by_rank,), rows, ranks=ep_world_size)
    return torch.cat([given[0] for given in everyone.parts]), _shared(_LAST, mm_x, mm_weight, trans_mm_weight)
