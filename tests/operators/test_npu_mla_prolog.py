"""The projections before multi-head latent attention: against torch's own products and norms in float64, step by step."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError

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
    torch.testing.assert_close(scaled[3], rms_norm(given[0] @ given[1], (CQ,), given[5], 1e-5))
    with pytest.raises(UnsupportedArgumentError, match="kv_cache_quant_mode=3"):
        run("_v3", given, kv_cache_quant_mode=3)


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
