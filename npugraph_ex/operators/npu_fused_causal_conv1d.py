"""Causal convolution of each channel along sequences whose last inputs a cache keeps, as linear attention's decoding needs it.

Formula (operator documentation of ``torch_npu.npu_fused_causal_conv1d``), for each sequence, with K taps and C cached inputs::

    padded = cat(cache line from its begin to offset + K - 1, x)
    y[i]   = sum over k of weight[k] * padded[offset + i + k]      (+ x[i] with residual_connection)
    cache line = the last C rows of padded, at its end

``offset`` is C - (K - 1); ``num_accepted_tokens`` - 1 where that is given; and 0, with zeros for the cache line, where
``num_computed_tokens`` is 0. ``conv_mode="pangu"`` sets the first K - 1 - num_computed_tokens results to 0 before the residual.
With blocks (``block_idx_last_scheduled_token``), ``cache_indices`` has a row for each sequence: its ``initial_state_idx`` is read,
its last block written, and every full block in between gets the K - 1 inputs at its end.

``bias``, ``activation``, ``initial_state_mode`` and ``run_mode`` have no effect; the document says so. A sequence whose cache line
is ``pad_slot_id`` is left out: what the device writes there is not said; here it is 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, stored_like, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_SOURCE = "operator documentation of torch_npu.npu_fused_causal_conv1d"


class _SequenceLengths(NamedTuple):
    """What is known of each sequence; None where the argument was left out."""

    accepted: list[int] | None
    computed: list[int] | None


class _CacheBlocks(NamedTuple):
    """The blocks of each sequence: first and last one scheduled, and the one to read."""

    first: list[int]
    last: list[int]
    initial: list[int]
    size: int

    def filled(self, sequence: int, length: int, computed: int) -> list[tuple[int, int]]:
        """(block, first row of its K - 1 inputs) for each block that becomes full, but the last one."""
        count = self.last[sequence] - self.first[sequence]
        beyond = (length - (self.size - computed % self.size)) % self.size
        boundary = length - (beyond or self.size)
        return [(self.first[sequence] + chunk, boundary - (count - chunk - 1) * self.size) for chunk in range(count)]


def _listed(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.tolist()


def _blocks(given: dict[str, torch.Tensor | None], size: int | None) -> _CacheBlocks | None:
    """The blocks, from the three arguments that tell them; None without blocks."""
    if given["block_idx_last_scheduled_token"] is None:
        return None
    for name in ("block_idx_first_scheduled_token", "initial_state_idx", "num_computed_tokens", "cache_indices"):
        if given[name] is None:
            raise unsupported("npu_fused_causal_conv1d", name, None, "a tensor beside block_idx_last_scheduled_token")
    return _CacheBlocks(
        _listed(given["block_idx_first_scheduled_token"]),
        _listed(given["block_idx_last_scheduled_token"]),
        _listed(given["initial_state_idx"]),
        size or 128,
    )


def _one(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    sequence: int,
    lines: Any,
    lengths: _SequenceLengths,
    blocks: _CacheBlocks | None,
    pad_slot_id: int,
) -> torch.Tensor | None:
    """The convolved sequence x [L, D]; None where it is left out. Writes its cache lines."""
    own: Any = sequence if lines is None else lines[sequence]
    read = own if blocks is None else own[blocks.initial[sequence]]
    if read == pad_slot_id:
        return None
    taps, kept = weight.shape[0], states.shape[1]
    computed = None if lengths.computed is None else lengths.computed[sequence]
    offset = kept - (taps - 1) if lengths.accepted is None else lengths.accepted[sequence] - 1
    cached = states[read, : offset + taps - 1]
    if computed == 0:
        offset, cached = 0, states.new_zeros(taps - 1, states.shape[2])
    padded = torch.cat((cached, x.to(states.dtype)))
    size = min(kept, len(padded))
    states[own if blocks is None else own[blocks.last[sequence]], kept - size :] = padded[len(padded) - size :]
    padded = padded[offset:]
    for block, row in blocks.filled(sequence, len(x), computed or 0) if blocks else ():
        states[own[block], kept - (taps - 1) :] = padded[row : row + taps - 1]
    wide = padded.to(compute_dtype(x, weight))
    out = torch.zeros_like(wide[: len(x)])
    for tap in range(taps):
        out += weight[tap].to(wide.dtype) * wide[tap : tap + len(x)]
    return out


def _example() -> Call:
    return call(
        torch.randn(6, 4).bfloat16(),
        torch.randn(3, 4).bfloat16(),
        torch.randn(3, 3, 4).bfloat16(),
        query_start_loc=torch.tensor([0, 4, 6], dtype=torch.int32),
        cache_indices=torch.tensor([2, 0], dtype=torch.int32),
        num_accepted_tokens=torch.tensor([2, 1], dtype=torch.int32),
        initial_state_mode=torch.ones(2, dtype=torch.int32),
        num_computed_tokens=torch.tensor([3, 0], dtype=torch.int32),
        residual_connection=1,
    )


def _blocks_example() -> Call:
    first, last, read, computed = (torch.tensor(given, dtype=torch.int32) for given in ([0, 1], [2, 1], [0, 0], [2, 3]))
    return call(
        torch.randn(6, 4).bfloat16(),
        torch.randn(3, 4).bfloat16(),
        torch.randn(6, 3, 4).bfloat16(),
        query_start_loc=torch.tensor([0, 5, 6], dtype=torch.int32),
        cache_indices=torch.tensor([[2, 0, 5], [1, 3, 4]], dtype=torch.int32),
        num_computed_tokens=computed,
        block_idx_first_scheduled_token=first,
        block_idx_last_scheduled_token=last,
        initial_state_idx=read,
        block_size=3,
    )


@Operator(
    name="npu::npu_fused_causal_conv1d",
    source=_SOURCE,
    covers={"residual_connection": (None, 0, 1)},
    dtypes=(torch.float16, torch.bfloat16),
    writes_by_index=True,
    alike=Alike(dtype=("x", "weight", "conv_states", "bias")),
    examples=(_example, _blocks_example),
)
def npu_fused_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    initial_state_mode: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    activation: str | None = "None",
    pad_slot_id: int | None = -1,
    run_mode: int | None = 0,
    residual_connection: int | None = 0,
    max_query_len: int | None = -1,
    num_computed_tokens: torch.Tensor | None = None,
    block_idx_first_scheduled_token: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    block_size: int | None = 128,
    conv_mode: str | None = "default",
) -> torch.Tensor:
    """Y like ``x``, [tokens, D] with ``query_start_loc`` [B + 1] or [B, L, D]; ``conv_states`` [lines, C, D] is written."""
    if conv_mode not in {None, "default", "pangu"}:
        raise unsupported("npu_fused_causal_conv1d", "conv_mode", conv_mode, "'default' and 'pangu'")
    if conv_mode == "pangu" and num_computed_tokens is None:
        raise unsupported("npu_fused_causal_conv1d", "num_computed_tokens", None, "a tensor in conv_mode 'pangu'")
    if query_start_loc is None and x.dim() == 2:
        raise unsupported("npu_fused_causal_conv1d", "query_start_loc", None, "a tensor, where x has two dimensions")
    rows = x.reshape(-1, x.shape[-1])
    starts = range(0, len(rows) + 1, x.shape[1]) if query_start_loc is None else query_start_loc.tolist()
    blocks = _blocks(
        {
            "block_idx_first_scheduled_token": block_idx_first_scheduled_token,
            "block_idx_last_scheduled_token": block_idx_last_scheduled_token,
            "initial_state_idx": initial_state_idx,
            "num_computed_tokens": num_computed_tokens,
            "cache_indices": cache_indices,
        },
        block_size,
    )
    lengths, lines = (
        _SequenceLengths(_listed(num_accepted_tokens), _listed(num_computed_tokens)),
        _listed(cache_indices),
    )
    pad = -1 if pad_slot_id is None else pad_slot_id
    result = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        part = rows[begin:end]
        out = _one(part, weight, conv_states, sequence, lines, lengths, blocks, pad)
        if out is None:
            continue
        if conv_mode == "pangu" and lengths.computed is not None:
            out[: max(weight.shape[0] - 1 - lengths.computed[sequence], 0)] = 0
        result[begin:end] = out + part.to(out.dtype) if residual_connection else out
    return stored_like(x, result.reshape(x.shape), x.dtype)


@Operator(
    name="npu::npu_fused_causal_conv1d_v2",
    source=_SOURCE,
    covers={"residual_connection": (None, 0, 1)},
    dtypes=(torch.float16, torch.bfloat16),
    writes_by_index=True,
    alike=Alike(dtype=("x", "weight", "conv_states", "bias")),
    examples=(_example, _blocks_example),
)
def npu_fused_causal_conv1d_v2(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    *,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    initial_state_mode: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    activation: str | None = "None",
    pad_slot_id: int | None = -1,
    run_mode: int | None = 0,
    residual_connection: int | None = 0,
    max_query_len: int | None = -1,
    num_computed_tokens: torch.Tensor | None = None,
    block_idx_first_scheduled_token: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    block_size: int | None = 128,
    conv_mode: str | None = "default",
) -> None:
    """As ``npu_fused_causal_conv1d``, with y written over ``x``."""
    given = {name: value for name, value in locals().items() if name not in {"x", "weight", "conv_states"}}
    x.copy_(npu_fused_causal_conv1d(x, weight, conv_states, **given))
