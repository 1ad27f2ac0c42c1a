"""The projections before multi-head latent attention, in all versions of `npu_mla_prolog`.

Formula (operator documentation of ``torch_npu.npu_mla_prolog_v3``; op-plugin's tests), x [T, He]::

    c      = rms_norm(x W_dq, gamma_cq)
    q, q_r = heads of c W_uq_qr * qc_qr_scale           D and Dr elements each
    query  = q W_uk                                     head by head, [T, N, Hckv]
    query_rope = interleave_rope(q_r)
    k, k_r = x W_dkv_kr                                 Hckv and Dr elements
    kv_cache <- rms_norm(k, gamma_ckv) * kc_scale       kr_cache <- interleave_rope(k_r)

int8 weights: the product is multiplied by the scales of the token and of the channel; the tokens of c are quantised first, each
by its own scale ``max(|c * smooth|) / 127``. int8 caches: ``round(value * quant_scale)``. An int8 query, of int8 tokens and caches:
``round(query / s)`` with ``s = max(|query|) / 127`` of each token and head, and ``query_rope * quant_scale_ckv / s``. Rounded at
the end only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._paged_cache import as_split, write_slots
from npugraph_ex.operators._precision import compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators.npu_interleave_rope import embedded
from npugraph_ex.operators.npu_rms_norm import normalise

__all__ = ["Norms", "Prolog", "Scales", "Table", "Weights", "quantised"]

_MODES = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND")


class Weights(NamedTuple):
    """The matrices of a call."""

    dq: torch.Tensor
    uq_qr: torch.Tensor
    uk: torch.Tensor
    dkv_kr: torch.Tensor


class Norms(NamedTuple):
    """Weights and epsilons of both norms."""

    gamma_cq: torch.Tensor
    gamma_ckv: torch.Tensor
    epsilon_cq: float
    epsilon_ckv: float


class Table(NamedTuple):
    """Sines and cosines, [T, Dr] or [B, S, Dr]."""

    sin: torch.Tensor
    cos: torch.Tensor


class Scales(NamedTuple):
    """What int8 operands and caches need."""

    x: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    uq_qr: torch.Tensor | None = None
    dkv_kr: torch.Tensor | None = None
    ckv: torch.Tensor | None = None
    ckr: torch.Tensor | None = None
    smooth: torch.Tensor | None = None


class Projected(NamedTuple):
    """The results, [T, ...], in the precision of the computation; ``norm`` as the second product takes it, and its scale."""

    query: torch.Tensor
    query_rope: torch.Tensor
    norm: torch.Tensor
    norm_scale: torch.Tensor | None


class Prolog(NamedTuple):
    """One call."""

    operator: str
    weights: Weights
    norms: Norms
    table: Table
    scales: Scales = Scales()
    query_factor: float = 1.0
    key_factor: float = 1.0

    def run(
        self,
        token_x: torch.Tensor,
        kv_cache: torch.Tensor,
        kr_cache: torch.Tensor,
        index: torch.Tensor | None,
        cache_mode: str,
    ) -> Projected:
        """Compute the query, and write the caches."""
        dtype = compute_dtype(self.table.sin, self.norms.gamma_cq, self.weights.uk)
        x = token_x.reshape(-1, token_x.shape[-1])
        sin, cos = (part.reshape(len(x), 1, -1).to(dtype) for part in self.table)
        projected = self._query(x, sin, cos, dtype)
        latent = self._product(x, self.weights.dkv_kr, self.scales.x, self.scales.dkv_kr, dtype)
        size = self.norms.gamma_ckv.shape[0]
        key = normalise(latent[:, :size], self.norms.gamma_ckv, self.norms.epsilon_ckv, dtype)[0] * self.key_factor
        rope = embedded(latent[:, size:], cos.squeeze(1), sin.squeeze(1))
        batch = token_x.shape[0] if token_x.dim() == 3 else 1
        for value, cache, scale in ((key, kv_cache, self.scales.ckv), (rope, kr_cache, self.scales.ckr)):
            stored = value if scale is None else round_to_int8(value * scale.to(dtype))
            self._write(stored, cache, index, cache_mode, batch)
        return projected

    def _query(self, x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, dtype: torch.dtype) -> Projected:
        down = self._product(x, self.weights.dq, self.scales.x, self.scales.dq, dtype)
        norm, _ = normalise(down, self.norms.gamma_cq, self.norms.epsilon_cq, dtype)
        scale = None
        if self.weights.uq_qr.dtype == torch.int8:
            norm = norm if self.scales.smooth is None else norm * self.scales.smooth.to(dtype)
            scale = norm.abs().amax(-1, keepdim=True) / 127
            norm = round_to_int8(norm / scale)
        up = self._product(norm, self.weights.uq_qr, scale, self.scales.uq_qr, dtype) * self.query_factor
        heads, size, _ = self.weights.uk.shape
        parts = up.unflatten(-1, (heads, -1))
        query = torch.einsum("tnd,ndh->tnh", parts[..., :size], self.weights.uk.to(dtype))
        return Projected(query, embedded(parts[..., size:], cos, sin), norm, scale)

    def _product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        of_token: torch.Tensor | None,
        of_channel: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        result = x.to(dtype) @ weight.to(dtype)
        if of_token is not None:
            result = result * of_token.to(dtype).reshape(-1, 1)
        return result if of_channel is None else result * of_channel.to(dtype).reshape(1, -1)

    def _write(
        self, tokens: torch.Tensor, cache: torch.Tensor, index: torch.Tensor | None, cache_mode: str, batch: int
    ) -> None:
        if cache_mode not in _MODES:
            raise unsupported(self.operator, "cache_mode", cache_mode, ", ".join(_MODES))
        if not cache_mode.startswith("PA"):
            cache.copy_(tokens.to(cache.dtype).reshape(cache.shape))
            return
        if index is None:
            raise ValueError(f"{self.operator}: cache_mode {cache_mode} needs cache_index, which is None.")
        slots, size = index.reshape(-1), cache.shape[1]
        if "BLK" in cache_mode:
            positions = torch.arange(len(tokens) // batch)
            first = index.reshape(batch, -1)[:, positions // size]
            slots = torch.where(first >= 0, first // size * size + positions % size, -1).reshape(-1)
        split = cache_mode.endswith("NZ")
        elements = 32 if cache.dtype == torch.int8 else 16
        view = as_split(cache, elements, whole=tokens.shape[-1]) if split else cache
        write_slots(view, slots, tokens, split=split)


def quantised(result: Projected, scale_of_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(query, query_rope, scale)``: int8; brought to the scale of the codes' product; [T, N, 1] of each token and head."""
    scale = result.query.abs().amax(-1, keepdim=True) / 127
    factor = scale_of_cache.reshape(-1)[0].to(scale.dtype)
    return round_to_int8(result.query / scale), result.query_rope * factor / scale, scale
