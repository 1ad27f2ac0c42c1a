"""The projections before multi-head latent attention: four versions. The formula is in ``_mla_prolog``.

The documentation of the first two calls the caches updated in place, and op-plugin returns the very tensors it was given;
their schemas mark neither. Version 3 marks them.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._mla_prolog import Norms, Prolog, Scales, Table, Weights, quantised
from npugraph_ex.operators._record import Call, Operator, call

_SIZES = {"tokens": 3, "hidden": 24, "down": 16, "latent": 32, "heads": 2, "plain": 8, "rope": 16}


def _operands() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The first nine arguments of a call, and its caches."""
    t, he, cq, ckv, n, d, dr = _SIZES.values()
    shapes = ((t, he), (he, cq), (cq, n * (d + dr)), (n, d, ckv), (he, ckv + dr), (cq,), (ckv,), (t, dr), (t, dr))
    operands = [(torch.randn(shape) / shape[0] ** 0.5).bfloat16() for shape in shapes]
    return operands, [torch.zeros(4, 2, 1, size).bfloat16() for size in (ckv, dr)]


def _example(cache_mode: str = "PA_BSND") -> Call:
    operands, caches = _operands()
    return call(*operands, torch.tensor([7, 0, 2]), *caches, cache_mode=cache_mode)


def _int8_weight_example() -> Call:
    operands, caches = _operands()
    operands[2] = torch.randint(-9, 9, operands[2].shape, dtype=torch.int8)
    scales = {"dequant_scale_w_uq_qr": torch.rand(1, operands[2].shape[1]) / 9}
    return call(*operands, torch.tensor([7, 0, 2]), *caches, **scales, smooth_scales_cq=torch.rand(1, 16) + 0.5)


def _third(example: Call, **kwargs: object) -> Call:
    operands, index, caches = example.args[:9], example.args[9], example.args[10:]
    return call(*operands, *caches, cache_index=index, **{**example.kwargs, **kwargs})


@Operator(
    name="npu::npu_mla_prolog",
    source="operator documentation of torch_npu.npu_mla_prolog; op-plugin",
    dtypes=(torch.bfloat16,),
    writes=("kv_cache", "kr_cache"),
    returns_written=(2, 3),
    examples=(_example, lambda: _example("PA_NZ")),
)
def npu_mla_prolog(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    cache_index: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    quant_scale_ckv: torch.Tensor | None = None,
    quant_scale_ckr: torch.Tensor | None = None,
    smooth_scales_cq: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(query, query_rope, kv_cache, kr_cache)``: [T, N, Hckv] and [T, N, Dr], or [B, S, ...]; the caches themselves.

    token_x [T, He] or [B, S, He]; weights [He, Hcq], [Hcq, N * (D + Dr)], [N, D, Hckv] and [He, Hckv + Dr]; caches [blocks,
    size, 1, ...].
    """
    prolog = Prolog(
        "npu_mla_prolog",
        Weights(weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr),
        Norms(rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
        Table(rope_sin, rope_cos),
        Scales(
            dequant_scale_x,
            dequant_scale_w_dq,
            dequant_scale_w_uq_qr,
            dequant_scale_w_dkv_kr,
            quant_scale_ckv,
            quant_scale_ckr,
            smooth_scales_cq,
        ),
    )
    result = prolog.run(token_x, kv_cache, kr_cache, cache_index, cache_mode)
    query, rope = _shaped(result.query, token_x, rope_sin.dtype), _shaped(result.query_rope, token_x, rope_sin.dtype)
    return query, rope, kv_cache, kr_cache


def _shaped(result: torch.Tensor, token_x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return result.to(dtype).contiguous().reshape(*token_x.shape[:-1], *result.shape[1:])


@Operator(
    name="npu::npu_mla_prolog_v2",
    source="operator documentation of torch_npu.npu_mla_prolog_v2; op-plugin",
    dtypes=(torch.bfloat16,),
    writes=("kv_cache", "kr_cache"),
    returns_written=(2, 3),
    examples=(_example,),
)
def npu_mla_prolog_v2(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    cache_index: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    quant_scale_ckv: torch.Tensor | None = None,
    quant_scale_ckr: torch.Tensor | None = None,
    smooth_scales_cq: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu_mla_prolog``, and the query's scale [T, N, 1]; [1] where the query is not int8."""
    prolog = Prolog(
        "npu_mla_prolog_v2",
        Weights(weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr),
        Norms(rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
        Table(rope_sin, rope_cos),
        Scales(
            dequant_scale_x,
            dequant_scale_w_dq,
            dequant_scale_w_uq_qr,
            dequant_scale_w_dkv_kr,
            quant_scale_ckv,
            quant_scale_ckr,
            smooth_scales_cq,
        ),
    )
    result = prolog.run(token_x, kv_cache, kr_cache, cache_index, cache_mode)
    if token_x.dtype == torch.int8 and quant_scale_ckv is not None:
        codes, rope, scale = quantised(result, quant_scale_ckv)
        return _shaped(codes, token_x, codes.dtype), _shaped(rope, token_x, rope_sin.dtype), kv_cache, kr_cache, scale
    rope = _shaped(result.query_rope, token_x, rope_sin.dtype)
    return _shaped(result.query, token_x, rope_sin.dtype), rope, kv_cache, kr_cache, result.query.new_zeros(1)


_COVERED: dict[str, tuple[object, ...]] = {
    "actual_seq_len": (None,),
    "k_nope_clip_alpha": (None,),
    "weight_quant_mode": (0, 1, 2),
    "kv_cache_quant_mode": (0, 1, 2),
    "query_quant_mode": (0, 1),
    "ckvkr_repo_mode": (0,),
    "quant_scale_repo_mode": (0,),
    "tile_size": (128,),
    **dict.fromkeys(
        ("token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype", "kv_cache_dtype"), (None,)
    ),
}


@Operator(
    name="npu::npu_mla_prolog_v3",
    source="operator documentation of torch_npu.npu_mla_prolog_v3; op-plugin",
    covers=_COVERED,
    dtypes=(torch.bfloat16,),
    examples=(
        lambda: _third(_example(), query_norm_flag=True, qc_qr_scale=0.5, kc_scale=2.0),
        lambda: _third(_int8_weight_example(), weight_quant_mode=1),
    ),
)
def npu_mla_prolog_v3(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    cache_index: torch.Tensor | None = None,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    quant_scale_ckv: torch.Tensor | None = None,
    quant_scale_ckr: torch.Tensor | None = None,
    smooth_scales_cq: torch.Tensor | None = None,
    actual_seq_len: torch.Tensor | None = None,
    k_nope_clip_alpha: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    token_x_dtype: int | None = None,
    weight_dq_dtype: int | None = None,
    weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(query, query_rope, scale of query, normed query, its scale)``, one 0 where not wanted; the caches are changed."""
    prolog = Prolog(
        "npu_mla_prolog_v3",
        Weights(weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr),
        Norms(rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
        Table(rope_sin, rope_cos),
        Scales(
            dequant_scale_x,
            dequant_scale_w_dq,
            dequant_scale_w_uq_qr,
            dequant_scale_w_dkv_kr,
            quant_scale_ckv,
            quant_scale_ckr,
            smooth_scales_cq,
        ),
        qc_qr_scale,
        kc_scale,
    )
    result = prolog.run(token_x, kv_cache, kr_cache, cache_index, cache_mode)
    query, rope, scale = result.query.to(rope_sin.dtype), result.query_rope, result.query.new_zeros(1)
    if weight_quant_mode == 2 and kv_cache_quant_mode == 1 and quant_scale_ckv is not None:
        query, rope, scale = quantised(result, quant_scale_ckv)
    norm, norm_scale = weight_uq_qr.new_zeros(1), scale.new_zeros(1)
    if query_norm_flag:
        norm = _shaped(result.norm, token_x, weight_uq_qr.dtype)
        norm_scale = norm_scale if result.norm_scale is None else result.norm_scale
    return _shaped(query, token_x, query.dtype), _shaped(rope, token_x, rope_sin.dtype), scale, norm, norm_scale


@Operator(
    name="npu::npu_mla_prolog_v3_functional",
    source="operator documentation of torch_npu.npu_mla_prolog_v3; op-plugin",
    covers=_COVERED,
    dtypes=(torch.bfloat16,),
    examples=(lambda: _third(_example()),),
)
def npu_mla_prolog_v3_functional(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    cache_index: torch.Tensor | None = None,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    quant_scale_ckv: torch.Tensor | None = None,
    quant_scale_ckr: torch.Tensor | None = None,
    smooth_scales_cq: torch.Tensor | None = None,
    actual_seq_len: torch.Tensor | None = None,
    k_nope_clip_alpha: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    token_x_dtype: int | None = None,
    weight_dq_dtype: int | None = None,
    weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The results of ``npu_mla_prolog_v3``, and changed copies of the caches."""
    kv_copy, kr_copy = (torch.empty_like(cache).copy_(cache) for cache in (kv_cache, kr_cache))
    results = npu_mla_prolog_v3(
        token_x,
        weight_dq,
        weight_uq_qr,
        weight_uk,
        weight_dkv_kr,
        rmsnorm_gamma_cq,
        rmsnorm_gamma_ckv,
        rope_sin,
        rope_cos,
        kv_copy,
        kr_copy,
        cache_index=cache_index,
        dequant_scale_x=dequant_scale_x,
        dequant_scale_w_dq=dequant_scale_w_dq,
        dequant_scale_w_uq_qr=dequant_scale_w_uq_qr,
        dequant_scale_w_dkv_kr=dequant_scale_w_dkv_kr,
        quant_scale_ckv=quant_scale_ckv,
        quant_scale_ckr=quant_scale_ckr,
        smooth_scales_cq=smooth_scales_cq,
        actual_seq_len=actual_seq_len,
        k_nope_clip_alpha=k_nope_clip_alpha,
        rmsnorm_epsilon_cq=rmsnorm_epsilon_cq,
        rmsnorm_epsilon_ckv=rmsnorm_epsilon_ckv,
        cache_mode=cache_mode,
        query_norm_flag=query_norm_flag,
        weight_quant_mode=weight_quant_mode,
        kv_cache_quant_mode=kv_cache_quant_mode,
        query_quant_mode=query_quant_mode,
        ckvkr_repo_mode=ckvkr_repo_mode,
        quant_scale_repo_mode=quant_scale_repo_mode,
        tile_size=tile_size,
        qc_qr_scale=qc_qr_scale,
        kc_scale=kc_scale,
        token_x_dtype=token_x_dtype,
        weight_dq_dtype=weight_dq_dtype,
        weight_uq_qr_dtype=weight_uq_qr_dtype,
        weight_dkv_kr_dtype=weight_dkv_kr_dtype,
        kv_cache_dtype=kv_cache_dtype,
    )
    return *results, kv_copy, kr_copy
