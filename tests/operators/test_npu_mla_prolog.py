"""The projections before multi-head latent attention: against torch's own products and norms in float64, step by step."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from npugraph_ex.operators import OPERATORS, RefusedArgumentError, call
from npugraph_ex.operators._hifloat8 import decode, encode
from npugraph_ex_conformance.operator_checks import metadata_faults

T, HE, CQ, CKV, N, D, DR = 3, 12, 8, 16, 2, 4, 8


def operands() -> list[torch.Tensor]:
    """The first nine arguments of a call, in float64."""
    shapes = ((T, HE), (HE, CQ), (CQ, N * (D + DR)), (N, D, CKV), (HE, CKV + DR), (CQ,), (CKV,), (T, DR), (T, DR))
    return [torch.randn(shape).double() for shape in shapes]


def embedded(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Neighbours turned as pairs; the first members of all pairs stand first."""
    even, odd, half = x[..., ::2], x[..., 1::2], DR // 2
    first, second = (even * cos[..., :half] - odd * sin[..., :half], odd * cos[..., half:] + even * sin[..., half:])
    return torch.cat((first, second), -1)


def run(
    version: str, given: list[torch.Tensor], dtype: torch.dtype = torch.float64, **kwargs: object
) -> tuple[tuple, list]:
    """The results of a version and the caches after it, [slots, ...]."""
    caches, index = [torch.zeros(2, 2, 1, size).to(dtype) for size in (CKV, DR)], torch.tensor([3, 0, -1])
    formula = OPERATORS[f"npu::npu_mla_prolog{version}"].formula
    placed = (*given, *caches) if version.startswith("_v3") else (*given, index, *caches)
    kwargs = {"cache_index": index, **kwargs} if version.startswith("_v3") else kwargs
    results = formula(*placed, **kwargs)
    written = results[-2:] if version.endswith("functional") else caches
    return results, [cache.reshape(4, -1) for cache in written]


@pytest.mark.parametrize("version", ["", "_v2", "_v3", "_v3_functional"])
def test_queries_are_projected_and_keys_cached(version: str) -> None:
    """Two products and a norm for the query, one more for each head; the norm and the embedding of the key in its slots."""
    given = operands()
    x, dq, uq, uk, dkv, gamma_cq, gamma_ckv, sin, cos = given
    results, (latent, rope) = run(version, given)
    up = (rms_norm(x @ dq, (CQ,), gamma_cq, 1e-5) @ uq).view(T, N, D + DR)
    torch.testing.assert_close(results[0], torch.einsum("tnd,ndh->tnh", up[..., :D], uk))
    torch.testing.assert_close(results[1], embedded(up[..., D:], sin.unsqueeze(1), cos.unsqueeze(1)))
    down = x @ dkv
    torch.testing.assert_close(latent[[3, 0]], rms_norm(down[:2, :CKV], (CKV,), gamma_ckv, 1e-5))
    torch.testing.assert_close(rope[[3, 0]], embedded(down[:2, CKV:], sin[:2], cos[:2]))
    assert not latent[[1, 2]].any()


def test_factors_scale_queries_and_keys() -> None:
    """Version 3 alone has them; the normed query is a result where it is asked for."""
    given = operands()
    plain, caches = run("_v3", given)
    scaled, others = run("_v3", given, qc_qr_scale=0.5, kc_scale=3.0, query_norm_flag=True)
    torch.testing.assert_close((scaled[0], scaled[1]), (plain[0] * 0.5, plain[1] * 0.5))
    torch.testing.assert_close((others[0], others[1]), (caches[0] * 3, caches[1]))
    torch.testing.assert_close(scaled[3], rms_norm(given[0] @ given[1], (CQ,), given[5], 1e-5) * 0.5)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"kv_cache_quant_mode": 3}, "ckvkr_repo_mode"),
        ({"query_quant_mode": 1}, "query_quant_mode"),
        ({"weight_quant_mode": 4}, "weight_uq_qr's dtype"),
        ({"weight_quant_mode": 5}, "token_x_dtype"),
        ({"weight_quant_mode": 1, "kv_cache_quant_mode": 1, "query_quant_mode": 1}, "kv_cache_quant_mode"),
        ({"quant_scale_ckv": torch.ones(1)}, "quant_scale_ckv"),
        ({"k_nope_clip_alpha": torch.ones(1)}, "k_nope_clip_alpha"),
        ({"actual_seq_len": torch.tensor([T]).int()}, "actual_seq_len"),
        ({"cache_mode": "PA_BLK_BSND", "actual_seq_len": torch.tensor([T + 1]).int()}, "actual_seq_len"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_by_name(wrong: dict, name: str) -> None:
    """The document's table of scenes says which modes, dtypes and scales belong to each other."""
    with pytest.raises(RefusedArgumentError, match=f"{name} should be"):
        run("_v3", operands(), **wrong)


def test_codes_stand_for_what_their_scales_say() -> None:
    """int8 tokens, weights, caches and query: each result, brought back, is near that of the exact numbers."""
    given = operands()
    codes, scales = list(given), {}
    for place, name, dim in ((0, "x", 1), (1, "w_dq", 0), (2, "w_uq_qr", 0), (4, "w_dkv_kr", 0)):
        scale = given[place].abs().amax(dim, keepdim=True) / 127
        codes[place] = (given[place] / scale).round().to(torch.int8)
        scales[f"dequant_scale_{name}"] = scale
    exact, (latent, rope) = run("_v2", given)
    factors = {
        "quant_scale_ckv": torch.full((1, CKV), 20.0).double(),
        "quant_scale_ckr": torch.full((1, DR), 20.0).double(),
    }
    found, cached = run("_v2", codes, torch.int8, **scales, **factors)
    assert found[0].dtype == torch.int8
    largest = exact[0].abs().amax().item()
    torch.testing.assert_close(found[0] * found[4], exact[0], rtol=0, atol=0.05 * largest)
    torch.testing.assert_close(found[1] * found[4] / 20, exact[1], rtol=0, atol=0.05 * exact[1].abs().amax().item())
    for code, value in zip(cached, (latent, rope), strict=True):
        expected = (value * 20).clamp(-128, 127)
        torch.testing.assert_close(code.double(), expected, rtol=0, atol=8.0)


WIDE = {"HE": 64, "CQ": 64, "CKV": 128}
"""Sizes in which blocks of 32 and tiles of 128 are whole."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.uint8: 32768.0}
NAMES = {
    0: ("x", "token_x"),
    1: ("w_dq", "weight_dq"),
    2: ("w_uq_qr", "weight_uq_qr"),
    4: ("w_dkv_kr", "weight_dkv_kr"),
}


def coded(number: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest number of one byte; those in uint8 are hifloat8."""
    if dtype == torch.uint8:
        return encode(number, saturate=True)
    return (number.round() if dtype == torch.int8 else number).to(dtype)


def number(stored: torch.Tensor) -> torch.Tensor:
    """What codes stand for."""
    return (decode(stored) if stored.dtype == torch.uint8 else stored).double()


@pytest.mark.parametrize("cache_mode", [0, 1, 3])
@pytest.mark.parametrize(
    ("mode", "dtype"), [(2, torch.int8), (3, torch.float8_e4m3fn), (4, torch.float8_e4m3fn), (5, torch.uint8)]
)
def test_each_format_of_version_3_stands_for_the_exact_numbers(
    mode: int, dtype: torch.dtype, cache_mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and weights as codes with scales of channels, or of blocks (3): what the results stand for is near the exact ones.

    The cache is plain, has one scale (1), or rows of 128 codes, 8 rotary numbers and one scale (3).
    """
    torch.manual_seed(0)  # of numbers drawn otherwise some do not fit into the cache
    for name, size in WIDE.items():
        monkeypatch.setattr(f"{__name__}.{name}", size)
    given = operands()
    named: dict = {"weight_quant_mode": mode, "kv_cache_quant_mode": cache_mode, "query_norm_flag": True}
    codes = list(given)
    for place, (name, argument) in NAMES.items():
        along = 1 if place == 0 else 0
        rows = given[place].movedim(along, -1)
        if mode == 3:
            scale = torch.randint(122, 126, (len(rows), rows.shape[1] // 32), dtype=torch.uint8).view(
                torch.float8_e8m0fnu
            )
            factor = scale.double()
        else:
            scale = factor = given[place].abs().amax(along, keepdim=True) / LARGEST[dtype]
        wide = factor.repeat_interleave(32, -1).movedim(-1, along) if mode == 3 else factor
        codes[place] = coded(given[place] / wide, dtype)
        given[place] = number(codes[place]) * wide
        named |= {f"dequant_scale_{name}": scale, **({f"{argument}_dtype": 290} if mode == 5 else {})}
    if mode == 5 and cache_mode:
        named["kv_cache_dtype"] = 290
    row, slots = (148, 0) if cache_mode == 3 else (128, 2)
    kv = torch.zeros(2, 2, 1, row).to(dtype if cache_mode else torch.float64)
    kr = torch.zeros(slots, 2, 1, DR).double()
    if cache_mode == 1:
        named |= {"quant_scale_ckv": torch.tensor([20.0]).double(), "query_quant_mode": 1}
    if cache_mode == 3:
        named |= {"ckvkr_repo_mode": 1, "quant_scale_repo_mode": 1}
    exact, (latent, rope) = run("_v3", given, query_norm_flag=True)
    record = OPERATORS["npu::npu_mla_prolog_v3"]
    if mode != 3:  # torch_npu's meta function refuses blocks on this chip
        narrow = [tensor.bfloat16() if tensor.dtype == torch.float64 else tensor for tensor in (*codes, kv, kr)]
        assert list(metadata_faults(record, call(*narrow, cache_index=torch.tensor([3, 0, -1]), **named))) == []
    found = record.formula(*codes, kv, kr, cache_index=torch.tensor([3, 0, -1]), **named)

    def near(one: torch.Tensor, other: torch.Tensor) -> None:
        assert (one.double() - other).norm() < {torch.int8: 0.02, torch.float8_e4m3fn: 0.06, torch.uint8: 0.25}[
            dtype
        ] * other.norm()

    of_query = found[2] if cache_mode == 1 else 1
    near(number(found[0]) * of_query if cache_mode == 1 else found[0], exact[0])
    near(found[1] * of_query / (20 if cache_mode == 1 else 1), exact[1])
    blocks = found[4].double().repeat_interleave(32, -1) if mode == 3 else found[4]
    near(number(found[3]) * blocks, exact[3])
    lines = kv.reshape(4, -1)
    assert not lines.view(torch.uint8)[[1, 2]].any()
    if cache_mode == 3:
        whole = lines.view(torch.uint8)
        scale = whole[:, 144:].contiguous().view(torch.float32)
        near(number(whole[:, :128].contiguous().view(dtype)) * scale, latent)
        near(whole[:, 128:144].contiguous().view(torch.bfloat16), rope)
    else:
        near(number(lines) / 20 if cache_mode == 1 else lines, latent)
        near(kr.reshape(4, -1), rope)


def test_a_tile_is_cut_at_the_given_part_of_its_largest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """k_nope_clip_alpha 0.5: half the largest magnitude is code 127, and so are all above it."""
    for name, size in WIDE.items():
        monkeypatch.setattr(f"{__name__}.{name}", size)
    given = operands()
    _, (latent, _) = run("_v3", given)
    given[2] = given[2].round().to(torch.int8)
    kv, alpha = torch.zeros(2, 2, 1, 148, dtype=torch.int8), torch.tensor([0.5])
    modes = dict.fromkeys(("ckvkr_repo_mode", "quant_scale_repo_mode", "weight_quant_mode"), 1)
    also = {"cache_index": torch.tensor([3, 0, -1]), "dequant_scale_w_uq_qr": torch.ones(1, N * (D + DR))}
    kr = torch.zeros(0, 2, 1, DR).double()
    formula = OPERATORS["npu::npu_mla_prolog_v3"].formula
    formula(*given, kv, kr, kv_cache_quant_mode=3, k_nope_clip_alpha=alpha, **modes, **also)
    scale = latent[3].abs().max() * 0.5 / 127
    expected = (latent[3] / scale).clamp(-127, 127).round()
    assert kv.reshape(4, -1)[3, :128].tolist() == expected.tolist()
    torch.testing.assert_close(kv.reshape(4, -1)[3, 144:].view(torch.float32).item(), scale.item())


@pytest.mark.parametrize("batched", [False, True])
def test_blocks_of_sequences_hold_their_tokens_in_order(batched: bool) -> None:
    """PA_BLK: cache_index has one block for each two tokens of a sequence; a sequence begins a block of its own."""
    given = operands()
    _, (latent, _) = run("_v3", given)
    order = [latent[3], latent[0]]
    if batched:
        places = [0, 7, 8]
        for place in places:
            given[place] = given[place][:2].unsqueeze(1)
        index, also = torch.tensor([[1], [0]]), {}
    else:
        index, also = torch.tensor([1, 0]), {"actual_seq_len": torch.tensor([1, 3]).int()}
    _, (cached, _) = run("_v3", given, cache_index=index, cache_mode="PA_BLK_BSND", **also)
    torch.testing.assert_close((cached[2], cached[0]), tuple(order))
    assert not cached[3].any()
    assert cached[1].any() == (not batched)
