"""The projections before multi-head latent attention: four versions. The formula is in ``_mla_prolog``.

The documentation of the first two calls the caches updated in place, and op-plugin returns the very tensors it was given;
their schemas mark neither. Version 3 marks them.
"""

from __future__ import annotations

from typing import Any

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._hifloat8 import HIFLOAT8
from npugraph_ex.operators._mla_prolog import CODES, Norms, Prolog, Rows, Scales, Table, Weights, quantised
from npugraph_ex.operators._precision import refused
from npugraph_ex.operators._record import Call, Operator, call

_SIZES = {"tokens": 3, "hidden": 24, "down": 16, "latent": 32, "heads": 2, "plain": 8, "rope": 16}


_FLOATING = ("weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos")
_STORED = ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr", "kv_cache", "kr_cache")
"""What may be quantised."""


def _alike(*codes: torch.dtype) -> Alike:
    return Alike(shape=_FLOATING[-2:], dtype=(*_FLOATING, *_STORED), besides=dict.fromkeys(_STORED, codes))


_ALIKE, _ALIKE_OF_THE_THIRD = _alike(torch.int8), _alike(torch.int8, torch.uint8, torch.float8_e4m3fn)


def _operands(**sizes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The first nine arguments of a call, and its caches."""
    t, he, cq, ckv, n, d, dr = (_SIZES | sizes).values()
    shapes = ((t, he), (he, cq), (cq, n * (d + dr)), (n, d, ckv), (he, ckv + dr), (cq,), (ckv,), (t, dr), (t, dr))
    operands = [(torch.randn(shape) / shape[0] ** 0.5).bfloat16() for shape in shapes]
    return operands, [torch.zeros(4, 2, 1, size).bfloat16() for size in (ckv, dr)]


def _example(cache_mode: str = "PA_BSND") -> Call:
    operands, caches = _operands()
    return call(*operands, torch.tensor([7, 0, 2]), *caches, cache_mode=cache_mode)


def _int8_weight_example(**sizes: int) -> Call:
    operands, caches = _operands(**sizes)
    operands[2] = torch.randint(-9, 9, operands[2].shape, dtype=torch.int8)
    scales = {"dequant_scale_w_uq_qr": torch.rand(1, operands[2].shape[1]) / 9}
    return call(*operands, torch.tensor([7, 0, 2]), *caches, **scales, smooth_scales_cq=torch.rand(1, 16) + 0.5)


def _int8_cache_example() -> Call:
    made = _int8_weight_example()
    *operands, latent, rotary = made.args
    sizes = {"quant_scale_ckv": latent.shape[-1], "quant_scale_ckr": rotary.shape[-1]}
    scales = {name: torch.rand(1, size) * 9 for name, size in sizes.items()}
    return call(*operands, latent.to(torch.int8), rotary.to(torch.int8), **made.kwargs, **scales)


def _int8_example() -> Call:
    """The third version's call wholly in int8, as the second takes it."""
    made = _coded_example(2)
    scales = {name: value for name, value in made.kwargs.items() if name.startswith("dequant_scale")}
    return call(*made.args[:9], made.kwargs["cache_index"], *made.args[9:], **scales)


def _third(example: Call, **kwargs: object) -> Call:
    operands, index, caches = example.args[:9], example.args[9], example.args[10:]
    return call(*operands, *caches, cache_index=index, **{**example.kwargs, **kwargs})


def _blocks_example(cache_mode: str) -> Call:
    """Two sequences, of two tokens and of one, each of which begins a block."""
    operands, caches = _operands()
    lengths = {"actual_seq_len": torch.tensor([2, 3], dtype=torch.int32), "cache_mode": cache_mode}
    return _third(call(*operands, torch.tensor([3, 0]), *caches), **lengths)


def _rows_example() -> Call:
    """Rows of 128 codes, 16 rotary numbers and one scale. These bytes have no form in float64: no token is kept."""
    made = _int8_weight_example(latent=128)
    caches = torch.zeros(4, 2, 1, 164, dtype=torch.int8), torch.zeros(0, 2, 1, 16).bfloat16()
    modes = dict.fromkeys(("weight_quant_mode", "ckvkr_repo_mode", "quant_scale_repo_mode"), 1)
    rest = {"kv_cache_quant_mode": 3, "k_nope_clip_alpha": torch.tensor([0.5])}
    return _third(call(*made.args[:9], torch.full((3,), -1), *caches, **made.kwargs), **modes, **rest)


def _packed_example() -> Call:
    operands, caches = _operands()
    return _third(call(*operands, None, *(cache.flatten(0, 1)[:3] for cache in caches)), cache_mode="TND")


_NAMED = ("token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype", "kv_cache_dtype")
_FORMATS = {1: torch.int8, 2: torch.int8, 3: torch.float8_e4m3fn, 4: torch.float8_e4m3fn, 5: torch.uint8}
"""The dtype of ``weight_uq_qr`` in each ``weight_quant_mode``; from 2 on, the tokens and the other two weights have it, too."""


def _coded_example(mode: int, **kwargs: object) -> Call:
    """A call wholly in numbers of one byte; the latent cache is of them, too, where its scale is given."""
    operands, caches = _operands()
    codes, scales = CODES[_FORMATS[mode]], {}
    for place, name in ((0, "x"), (1, "w_dq"), (2, "w_uq_qr"), (4, "w_dkv_kr")):
        operands[place] = codes.of(operands[place].float() * 9)
        count = operands[place].shape[min(place, 1)]
        scales[f"dequant_scale_{name}"] = torch.rand((len(operands[0]), 1) if place == 0 else (1, count)) / 9
    caches[0] = caches[0].to(codes.dtype if kwargs else torch.bfloat16)
    named = dict.fromkeys(_NAMED, HIFLOAT8) if mode == 5 else {}
    rest = {"weight_quant_mode": mode, "query_norm_flag": True, **scales, **named, **kwargs}
    return _third(call(*operands, torch.tensor([7, 0, 2]), *caches), **rest)


@Operator(
    name="npu::npu_mla_prolog",
    source="operator documentation of torch_npu.npu_mla_prolog; op-plugin",
    dtypes=(torch.bfloat16,),
    writes=("kv_cache", "kr_cache"),
    returns_written=(2, 3),
    alike=_ALIKE,
    examples=(_example, lambda: _example("PA_NZ"), _int8_cache_example),
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
    alike=_ALIKE,
    examples=(_example, _int8_cache_example, _int8_example),
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
        codes, rope, scale = quantised(result, quant_scale_ckv, CODES[torch.int8])
        return _shaped(codes, token_x, codes.dtype), _shaped(rope, token_x, rope_sin.dtype), kv_cache, kr_cache, scale
    rope = _shaped(result.query_rope, token_x, rope_sin.dtype)
    return _shaped(result.query, token_x, rope_sin.dtype), rope, kv_cache, kr_cache, result.query.new_zeros(1)


_REPOSITORIES = ("ckvkr_repo_mode", "quant_scale_repo_mode")
_COVERED: dict[str, tuple[object, ...]] = {
    "weight_quant_mode": tuple(range(6)),
    "kv_cache_quant_mode": tuple(range(4)),
    "query_quant_mode": (0, 1),
    **dict.fromkeys(_REPOSITORIES, (0, 1)),
    "tile_size": (128,),
    **dict.fromkeys(_NAMED, (None, HIFLOAT8)),
}


def _refuse_unlike(given: dict[str, Any]) -> None:
    """Raise for arguments of version 3 that do not go together, as its document's table of scenes has them."""
    mode, cache = given["weight_quant_mode"], given["kv_cache_quant_mode"]
    joined, coded = int(cache == 3), int(cache == 1)
    wanted: dict[str, object] = {
        **dict.fromkeys(_REPOSITORIES, joined),
        "query_quant_mode": coded,
        **({} if joined and mode != 3 else {"k_nope_clip_alpha": None}),
        **({} if "BLK" in given["cache_mode"] and given["token_x"].dim() == 2 else {"actual_seq_len": None}),
    }
    if mode == 5:
        wanted |= dict.fromkeys(_NAMED if cache else _NAMED[:-1], HIFLOAT8)
    else:
        wanted |= dict.fromkeys(_NAMED)
    modes = f"where weight_quant_mode is {mode} and kv_cache_quant_mode {cache}"
    for name, value in wanted.items():
        if (given[name] is None) != (value is None) or (value is not None and given[name] != value):
            shown = "a tensor" if isinstance(given[name], torch.Tensor) else given[name]
            raise refused("npu_mla_prolog_v3", name, shown, f"{value} {modes}")
    if cache not in {0: (0,), 1: (0, 2, 3)}.get(mode, (0, 1, 3)):
        raise refused("npu_mla_prolog_v3", "kv_cache_quant_mode", cache, f"another one {modes}")
    places = ("weight_uq_qr", *(("token_x", "weight_dq", "weight_dkv_kr") if mode > 1 else ()))
    for name in places:
        if mode and given[name].dtype != _FORMATS[mode]:
            raise refused("npu_mla_prolog_v3", f"{name}'s dtype", given[name].dtype, f"{_FORMATS[mode]} {modes}")


@Operator(
    name="npu::npu_mla_prolog_v3",
    source="operator documentation of torch_npu.npu_mla_prolog_v3; op-plugin; ops-transformer, attention/mla_prolog_v3",
    covers=_COVERED,
    dtypes=(torch.bfloat16,),
    alike=_ALIKE_OF_THE_THIRD,
    examples=(
        lambda: _third(_example(), query_norm_flag=True, qc_qr_scale=0.5, kc_scale=2.0),
        lambda: _third(_int8_weight_example(), weight_quant_mode=1),
        lambda: _third(_int8_cache_example(), weight_quant_mode=1, kv_cache_quant_mode=2),
        lambda: _blocks_example("PA_BLK_BSND"),
        lambda: _blocks_example("PA_BLK_NZ"),
        _rows_example,
        _packed_example,
        lambda: _coded_example(2),
        lambda: _coded_example(5, quant_scale_ckv=torch.tensor([9.0]), kv_cache_quant_mode=1, query_quant_mode=1),
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
    _refuse_unlike(locals())
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
        Rows(tile_size, k_nope_clip_alpha) if kv_cache_quant_mode == 3 else None,
        actual_seq_len,
    )
    result = prolog.run(token_x, kv_cache, kr_cache, cache_index, cache_mode)
    query, rope, scale = result.query.to(rope_sin.dtype), result.query_rope, result.query.new_zeros(1)
    if kv_cache_quant_mode == 1 and quant_scale_ckv is not None:
        query, rope, scale = quantised(result, quant_scale_ckv, CODES[weight_uq_qr.dtype])
    norm, norm_scale = weight_uq_qr.new_zeros(1), scale.new_zeros(1)
    if query_norm_flag:
        norm = _shaped(result.norm, token_x, weight_uq_qr.dtype)
        norm_scale = norm_scale if result.norm_scale is None else result.norm_scale
    return _shaped(query, token_x, query.dtype), _shaped(rope, token_x, rope_sin.dtype), scale, norm, norm_scale


@Operator(
    name="npu::npu_mla_prolog_v3_functional",
    source="operator documentation of torch_npu.npu_mla_prolog_v3; op-plugin; ops-transformer, attention/mla_prolog_v3",
    covers=_COVERED,
    dtypes=(torch.bfloat16,),
    alike=_ALIKE_OF_THE_THIRD,
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
    given: dict[str, Any] = dict(locals())
    copies = {
        name: torch.empty_like(cache).copy_(cache) for name, cache in (("kv_cache", kv_cache), ("kr_cache", kr_cache))
    }
    return *npu_mla_prolog_v3(**{**given, **copies}), *copies.values()
