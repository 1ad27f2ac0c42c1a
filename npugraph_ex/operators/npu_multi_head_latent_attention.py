"""Multi-head latent attention of the ATB library over a paged cache, one query row a sequence or several; with row statistics.

Formula (operator documentation of ``torch_npu.atb.npu_multi_head_latent_attention``), the sequences packed one behind the other::

    output = softmax(qk_scale * (q_nope ctkv^T + q_rope k_rope^T)) ctkv        lse = log(sum(exp(scores)))

Not covered, and refused by name: int8 caches, masks, and the modes that need them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._attention import attended, log_sum_exp
from npugraph_ex.operators._paged_cache import read_sequence
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Call, Operator, call


def _example(*more: bool) -> Call:
    plain, rope = torch.randn(3, 4, 16).half(), torch.randn(3, 4, 8).half()
    caches = torch.randn(6, 4, 1, 16).half(), torch.randn(6, 4, 1, 8).half()
    tables = torch.tensor([[3, 0], [1, 5], [2, 4]], dtype=torch.int32)
    return call(plain, rope, *caches, tables, [5, 8, 1], 4, 0.25, 1, *more)


def _attend(
    query: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    lengths: Sequence[int],
    rows: Sequence[int] | None,
    scale: float,
    heads: tuple[int, int],
    **modes: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, lse)`` [T, N, D] and [T, N, 1] in the precision of the computation."""
    for name, given, found in zip(
        ("q_headnum", "kv_headnum"), heads, (query[0].shape[1], cache[0].shape[2]), strict=True
    ):
        if given != found:
            raise refused("npu_multi_head_latent_attention", name, given, f"{found}, the heads that the tensors have")
    for name, value in modes.items():
        if value not in {None, "undefined", "calc_type_undefined", "calc_type_ring", "krope_ctkv"}:
            raise unsupported("npu_multi_head_latent_attention", name, value, "None and its default")
    if cache[0].dtype == torch.int8:
        raise unsupported("npu_multi_head_latent_attention", "ctkv", cache[0].dtype, "float16 and bfloat16")
    dtype = compute_dtype(*query)
    joined = torch.cat(query, -1).to(dtype)
    output, lse = query[0].new_zeros(query[0].shape, dtype=dtype), joined.new_full((*joined.shape[:2], 1), torch.inf)
    first = 0
    for b, (length, count) in enumerate(zip(lengths, rows or [1] * len(lengths), strict=True)):
        mine = slice(first, first + count)
        first += count
        if length:
            latent, rope = (
                read_sequence(part, block_tables[b], int(length)).to(dtype).transpose(0, 1) for part in cache
            )
            result = attended(joined[mine].transpose(0, 1), torch.cat((latent, rope), -1), latent, scale)
            output[mine] = result.output.transpose(0, 1)
            lse[mine] = log_sum_exp(result, unseen=torch.inf).transpose(0, 1)
    return output, lse


@Operator(
    name="atb::npu_multi_head_latent_attention",
    source="operator documentation of torch_npu.atb.npu_multi_head_latent_attention",
    dtypes=HALVES,
    host_arguments=("context_lens",),
    examples=(_example,),
)
def npu_multi_head_latent_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    *,
    mask: torch.Tensor | None = None,
    qseqlen: Sequence[int] | None = None,
    qk_descale: torch.Tensor | None = None,
    pv_descale: torch.Tensor | None = None,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
) -> torch.Tensor:
    """Like ``q_nope`` [T, N, 512]; q_rope [T, N, 64], caches [blocks, size, 1, 512] and [blocks, size, 1, 64]."""
    if mask is not None or qk_descale is not None or pv_descale is not None:
        raise unsupported("npu_multi_head_latent_attention", "mask, qk_descale or pv_descale", "a value", "None")
    modes = {"mask_type": mask_type, "calc_type": calc_type, "cache_mode": cache_mode}
    heads = q_headnum, kv_headnum
    output, _ = _attend((q_nope, q_rope), (ctkv, k_rope), block_tables, context_lens, qseqlen, qk_scale, heads, **modes)
    return output.to(q_rope.dtype)


@Operator(
    name="atb::npu_multi_head_latent_attention.lse",
    source="operator documentation of torch_npu.atb.npu_multi_head_latent_attention",
    dtypes=HALVES,
    host_arguments=("context_lens",),
    examples=(lambda: _example(True),),
)
def npu_multi_head_latent_attention_lse(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    return_lse: bool,
    *,
    mask: torch.Tensor | None = None,
    qseqlen: Sequence[int] | None = None,
    qk_descale: torch.Tensor | None = None,
    pv_descale: torch.Tensor | None = None,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, lse)``: as the default overload, and [T, N, 1] in the query's dtype."""
    if mask is not None or qk_descale is not None or pv_descale is not None:
        raise unsupported("npu_multi_head_latent_attention", "mask, qk_descale or pv_descale", "a value", "None")
    modes = {"mask_type": mask_type, "calc_type": calc_type, "cache_mode": cache_mode}
    heads = q_headnum, kv_headnum
    output, lse = _attend(
        (q_nope, q_rope), (ctkv, k_rope), block_tables, context_lens, qseqlen, qk_scale, heads, **modes
    )
    return output.to(q_rope.dtype), lse.to(q_nope.dtype)
