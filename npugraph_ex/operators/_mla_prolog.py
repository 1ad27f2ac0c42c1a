"""The projections before multi-head latent attention, in all versions of `npu_mla_prolog`.

Formula (operator documentation of ``torch_npu.npu_mla_prolog_v3``; CANN operator documentation, aclnnMlaPrologV3WeightNz, with the
reference of its published tests; op-plugin's tests), x [T, He]::

    c      = rms_norm(x W_dq, gamma_cq) * qc_qr_scale
    q, q_r = heads of c W_uq_qr                         D and Dr elements each
    query  = q W_uk                                     head by head, [T, N, Hckv]
    query_rope = interleave_rope(q_r)
    k, k_r = x W_dkv_kr                                 Hckv and Dr elements
    kv_cache <- rms_norm(k, gamma_ckv) * kc_scale       kr_cache <- interleave_rope(k_r)

Weights of int8, float8_e4m3fn and hifloat8, whose largest number is L: the product is multiplied by the scales of the token and of
the channel; the tokens of c are quantised first, each by its own scale ``max(|c * smooth|) / L``. With scales of float8_e8m0fnu,
each belongs to 32 elements of a sum (MX), and c is quantised by blocks of 32.

Caches of these dtypes: ``value * quant_scale``. A query beside such a cache: ``query / s`` with ``s = max(|query|) / L`` of each
token and head, and ``query_rope * quant_scale_ckv / s``. Both parts and the scales in one row of bytes: the latent part in tiles,
each cut at ``m = max(|tile|) * k_nope_clip_alpha`` and divided by ``m / L``; then k_r in bfloat16; then each m / L in float32.
Rounded at the end only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._hifloat8 import LARGEST, decode, encode
from npugraph_ex.operators._microscaling import E4M3, BlockQuantisation, times_scales
from npugraph_ex.operators._microscaling import quantised as in_blocks
from npugraph_ex.operators._paged_cache import as_split, write_slots
from npugraph_ex.operators._precision import compute_dtype, refused, round_to, unsupported
from npugraph_ex.operators.npu_interleave_rope import embedded
from npugraph_ex.operators.npu_rms_norm import normalise

__all__ = ["CODES", "Codes", "Norms", "Prolog", "Rows", "Scales", "Table", "Weights", "quantised"]

_MODES = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND")
_WHOLE_ROWS = ("PA_BSND", "BSND", "TND")
"""The modes of a cache with all that belongs to a token in one row."""


class Codes(NamedTuple):
    """Numbers of one byte: what stores them, the largest of them, and the least that the largest of a tile counts as."""

    dtype: torch.dtype
    largest: float
    least: float

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest codes."""
        return encode(values, saturate=True) if self.dtype == torch.uint8 else round_to(self.dtype, values)


CODES = {
    torch.int8: Codes(torch.int8, 127.0, 1e-8),
    torch.float8_e4m3fn: Codes(torch.float8_e4m3fn, 448.0, 1e-4),
    torch.uint8: Codes(torch.uint8, LARGEST, 1e-4),
}
"""By the dtype that stores them: that of hifloat8 is uint8."""


def _numbers(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a tensor stands for, in the precision of the computation."""
    return (decode(stored) if stored.dtype == torch.uint8 else stored).to(dtype)


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
    """What operands and caches of one byte need."""

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


class Rows(NamedTuple):
    """How a token's latent part, rotary part and scales lie in one row of the cache: its tiles, and what cuts them."""

    tile: int
    clip: torch.Tensor | None


class Prolog(NamedTuple):
    """One call."""

    operator: str
    weights: Weights
    norms: Norms
    table: Table
    scales: Scales = Scales()
    query_factor: float = 1.0
    key_factor: float = 1.0
    rows: Rows | None = None
    ends: torch.Tensor | None = None

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
        lengths = self._lengths(token_x)
        if self.rows is not None:
            self._write(self._joined(key, rope, kv_cache, kr_cache, cache_mode), kv_cache, index, cache_mode, lengths)
            return projected
        for name, value, cache, scale in (
            ("ckv", key, kv_cache, self.scales.ckv),
            ("ckr", rope, kr_cache, self.scales.ckr),
        ):
            if scale is not None and cache.dtype not in CODES:
                raise refused(self.operator, f"quant_scale_{name}", "a tensor", f"None for a cache of {cache.dtype}")
            stored = value.to(cache.dtype) if scale is None else CODES[cache.dtype].of(value * scale.to(dtype))
            self._write(stored, cache, index, cache_mode, lengths)
        return projected

    def _query(self, x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, dtype: torch.dtype) -> Projected:
        down = self._product(x, self.weights.dq, self.scales.x, self.scales.dq, dtype)
        norm = normalise(down, self.norms.gamma_cq, self.norms.epsilon_cq, dtype)[0] * self.query_factor
        codes, scale = CODES.get(self.weights.uq_qr.dtype), None
        if codes and _in_blocks(self.scales.uq_qr):
            norm, scale = in_blocks(norm, norm, -1, BlockQuantisation(E4M3), self.operator)
            scale = scale.flatten(-2).view(torch.float8_e8m0fnu)
        elif codes:
            norm = norm if self.scales.smooth is None else norm * self.scales.smooth.to(dtype)
            scale = norm.abs().amax(-1, keepdim=True) / codes.largest
            norm = codes.of(norm / scale)
        up = self._product(norm, self.weights.uq_qr, scale, self.scales.uq_qr, dtype)
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
        left, right = _numbers(x, dtype), _numbers(weight, dtype)
        if of_token is not None and of_channel is not None and _in_blocks(of_channel):
            pairs = (scale.unflatten(-1, (-1, 2)) for scale in (of_token, of_channel))
            left, right = (times_scales(rows, scale) for rows, scale in zip((left, right.mT), pairs, strict=True))
            return left @ right.mT
        result = left @ right
        if of_token is not None:
            result = result * of_token.to(dtype).reshape(-1, 1)
        return result if of_channel is None else result * of_channel.to(dtype).reshape(1, -1)

    def _joined(
        self, key: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, kr_cache: torch.Tensor, cache_mode: str
    ) -> torch.Tensor:
        """The rows of the tokens, uint8 [T, Hckv + 2 Dr + 4 Hckv / tile]."""
        assert self.rows is not None  # noqa: S101 - the caller asks
        codes, tile = CODES.get(kv_cache.dtype), self.rows.tile
        width = key.shape[-1] + 2 * rope.shape[-1] + 4 * (key.shape[-1] // tile)
        if codes is None or kv_cache.shape[-1] != width or kr_cache.numel() or cache_mode not in _WHOLE_ROWS:
            given = (kv_cache.dtype, tuple(kv_cache.shape), tuple(kr_cache.shape), cache_mode)
            wanted = (
                f"rows of {width} bytes, nothing, and one of {', '.join(_WHOLE_ROWS)} where kv_cache_quant_mode is 3"
            )
            raise refused(self.operator, "kv_cache, kr_cache and cache_mode", given, wanted)
        tiles = key.unflatten(-1, (-1, tile))
        bound = tiles.abs().amax(-1, keepdim=True).clamp(min=codes.least)
        bound = bound if self.rows.clip is None else bound * self.rows.clip.to(key.dtype)
        scale = bound / codes.largest
        latent = codes.of(tiles.clamp(-bound, bound) / scale).flatten(-2)
        parts = (latent, rope.bfloat16(), scale.squeeze(-1).float())
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)

    def _lengths(self, token_x: torch.Tensor) -> list[int]:
        """How many tokens each sequence has."""
        if token_x.dim() == 3:
            return [token_x.shape[1]] * token_x.shape[0]
        if self.ends is None:
            return [len(token_x)]
        ends: list[int] = self.ends.tolist()
        if self.ends.dtype != torch.int32 or ends[-1:] != [len(token_x)]:
            wanted = f"int32 ends of sequences, the last of them {len(token_x)}, the number of tokens"
            raise refused(self.operator, "actual_seq_len", (self.ends.dtype, ends), wanted)
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _write(
        self, tokens: torch.Tensor, cache: torch.Tensor, index: torch.Tensor | None, cache_mode: str, lengths: list[int]
    ) -> None:
        if cache_mode not in _MODES:
            raise unsupported(self.operator, "cache_mode", cache_mode, ", ".join(_MODES))
        if cache.dtype in CODES:
            tokens, cache = tokens.view(torch.uint8), cache.view(torch.uint8)
        if not cache_mode.startswith("PA"):
            cache.copy_(tokens.to(cache.dtype).reshape(cache.shape))
            return
        if index is None:
            raise ValueError(f"{self.operator}: cache_mode {cache_mode} needs cache_index, which is None.")
        slots = self._slots_of_blocks(index, lengths, cache.shape[1]) if "BLK" in cache_mode else index.reshape(-1)
        split = cache_mode.endswith("NZ")
        elements = 32 if cache.itemsize == 1 else 16
        view = as_split(cache, elements, whole=tokens.shape[-1]) if split else cache
        write_slots(view, slots, tokens, split=split)

    def _slots_of_blocks(self, index: torch.Tensor, lengths: list[int], size: int) -> torch.Tensor:
        """The slot of each token, where ``index`` has the blocks of each sequence, one for ``size`` tokens."""
        counts = [-(-length // size) for length in lengths]
        if index.numel() != sum(counts):
            raise refused(self.operator, "cache_index", tuple(index.shape), f"of {sum(counts)} blocks")
        blocks = zip(index.reshape(-1).split(counts), lengths, strict=True)
        return torch.cat([(of[:, None] * size + torch.arange(size)).flatten()[:length] for of, length in blocks])


def _in_blocks(scale: torch.Tensor | None) -> bool:
    """Whether a scale belongs to a block of elements: it is a power of two in one byte."""
    return scale is not None and scale.itemsize == 1


def quantised(
    result: Projected, scale_of_cache: torch.Tensor, codes: Codes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(query, query_rope, scale)``: codes; brought to the scale of the codes' product; [T, N, 1] of each token and head."""
    scale = result.query.abs().amax(-1, keepdim=True) / codes.largest
    factor = scale_of_cache.reshape(-1)[0].to(scale.dtype)
    return codes.of(result.query / scale), result.query_rope * factor / scale, scale
