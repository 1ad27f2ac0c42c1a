"""Copies each token once for each expert that it goes to, in the order of the experts; may quantise them, or give each a capacity.

Formula (operator documentation of ``torch_npu.npu_moe_init_routing_v2``)::

    order              = sort(expert_idx), by expert, the earlier choice first; choices out of active_expert_range last
    expanded_x[i]      = x[order[i] // k]
    expanded_row_idx   = place of each choice in expanded_x, -1 where it has none      (row_idx_type 0)
                       = order                                                         (row_idx_type 1)
    expert_token_...   = running sums of the experts' choices (expert_tokens_num_type 0), their numbers (1), or rows
                         (expert, number) of the experts that have some (2)
    quant_mode -1:  as they are;   expanded_scale[i] = scale[order[i] // k]
    quant_mode  0:  round(expanded_x * scale + offset)                                 int8
    quant_mode  1:  y = expanded_x * scale[expert]; s = max(abs(y)) / 127; round(y / s), expanded_scale = s
    quant_mode 13:  the same with 7 for 127 and one scale; two int4 values in one byte, the first in its low half
    quant_mode  2 to 9, 11, 12, 14 to 17:  8-bit and 4-bit floats, see _routed_floats

With ``drop_pad_mode`` 1 each expert has ``expert_capacity`` rows of expanded_x; later choices are dropped and free rows are zero.
What the device leaves unwritten is zeros here: rows behind the last choice, and results that were not asked for.

Tokens that are 8-bit or 4-bit floats already move without quantisation, and so do the scales [N, H / 64, 2] of their blocks;
``x_dtype`` names what uint8 holds. Not covered: the different results of the inference chips of the 310P generation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._hifloat8 import HIFLOAT8
from npugraph_ex.operators._int4 import pack_bytes
from npugraph_ex.operators._precision import compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._routed_floats import FLOAT_MODES, HIFLOAT8_MODES, to_floats
from npugraph_ex.operators._routing import Routing, dynamic_quotient, route, taken

_NAME = "npu_moe_init_routing_v2"
_INT4 = 285
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BLOCKS = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT4 = frozenset({45, 296, torch.float4_e2m1fn_x2})
_OF_BYTES = _FLOAT4 | {HIFLOAT8}
"""What names float4_e2m1 and hifloat8, which lie in uint8."""
_PLAIN, _STATIC, _DYNAMIC, _DYNAMIC_INT4 = -1, 0, 1, 13
_CUMULATIVE, _KEY_VALUE = 0, 2


def _experts() -> torch.Tensor:
    return torch.tensor([[1, 0], [2, 1], [0, 3]], dtype=torch.int32)


@Operator(
    name="npu::npu_moe_init_routing_v2",
    source="operator documentation of torch_npu.npu_moe_init_routing_v2",
    covers={"expert_tokens_num_type": (0, 1, 2), "row_idx_type": (0, 1)},
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(
            torch.randn(3, 4).half(),
            _experts(),
            scale=torch.rand(3),
            expert_num=4,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, 4],
        ),
        lambda: call(torch.randn(3, 4), _experts(), expert_num=4, quant_mode=1, active_expert_range=[1, 3]),
        lambda: call(
            torch.randn(3, 4), _experts(), scale=torch.rand(1), offset=torch.rand(1), expert_num=4, quant_mode=0
        ),
        lambda: call(torch.randn(3, 72).half(), _experts(), expert_num=4, quant_mode=3),
        lambda: call(torch.randn(3, 140).half(), _experts(), expert_num=4, quant_mode=12, active_num=4),
        lambda: call(
            torch.randn(3, 4).half(),
            _experts(),
            expert_num=4,
            expert_capacity=1,
            drop_pad_mode=1,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
        ),
    ),
)
def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = [],
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(expanded_x, expanded_row_idx, expert_token_cumsum_or_count, expanded_scale)``.

    x: [N, H]; expert_idx: [N, K] int32. expanded_x: [N * K, H], or [active_num, H] if that is less, or [experts, capacity, H];
    expanded_row_idx: [N * K] int32; the third: int64, [experts] or [experts, 2]; expanded_scale: float32, one for each row.
    """
    padded = drop_pad_mode == 1
    _refuse_uncovered(x, x_dtype, quant_mode, padded)
    n, k = expert_idx.shape
    experts = (active_expert_range[0], active_expert_range[1]) if active_expert_range else (0, expert_num)
    rows = n * k if active_num <= 0 else min(active_num, n * k)
    routing = route(expert_idx, experts, rows=rows, capacity=expert_capacity if padded else None)
    expanded, scales = _quantised(x, expert_idx, routing, scale, offset, quant_mode, experts[0], x_dtype)
    if padded:
        expanded = expanded.reshape(expert_num, expert_capacity, -1)
    index = routing.order if row_idx_type == 1 and not padded else routing.row_index
    tokens = _tokens(routing.counts, experts, expert_num, expert_tokens_num_type if expert_tokens_num_flag else None)
    return expanded, index.to(torch.int32), tokens, scales


def _refuse_uncovered(x: torch.Tensor, x_dtype: int | None, quant_mode: int, padded: bool) -> None:
    """Raise for dtypes and modes that the formula above does not cover."""
    if quant_mode not in {_PLAIN, _STATIC, _DYNAMIC, _DYNAMIC_INT4, *FLOAT_MODES}:
        raise unsupported(_NAME, "quant_mode", quant_mode, "-1 to 9 and 11 to 17")
    if padded and quant_mode not in {_PLAIN, _STATIC, _DYNAMIC, *HIFLOAT8_MODES}:
        raise unsupported(_NAME, "drop_pad_mode", 1, f"0 with quant_mode {quant_mode}; 1 with -1, 0, 1, 6, 7 and 8")
    of_bytes = x_dtype in _OF_BYTES and x.dtype == torch.uint8 and quant_mode == _PLAIN and not padded
    if x_dtype is not None and not of_bytes and (x_dtype, quant_mode) != (_INT4, _DYNAMIC_INT4):
        only = "None, int4 with quant_mode=13, and float4_e2m1 and hifloat8 with tokens in uint8, quant_mode -1 and drop_pad_mode 0"
        raise unsupported(_NAME, "x_dtype", x_dtype, only)
    if x.dtype not in _FLOATING and not of_bytes and not (x.dtype in {torch.int8, *_BLOCKS} and quant_mode == _PLAIN):
        only = "float16, bfloat16 and float32, and without quantisation int8, float8_e4m3fn, float8_e5m2 and the x_dtype of uint8"
        raise unsupported(_NAME, "x", x.dtype, only)


def _tokens(counts: torch.Tensor, experts: tuple[int, int], expert_num: int, kind: int | None) -> torch.Tensor:
    """How many choices the experts have, in the form that ``expert_tokens_num_type`` asks for."""
    if kind is None:
        return counts.new_zeros(())
    if kind == _CUMULATIVE:
        return counts.cumsum(0)
    if kind != _KEY_VALUE:
        return counts
    pairs = torch.stack([torch.arange(*experts, device=counts.device), counts], 1)[counts > 0]
    return torch.cat([pairs, counts.new_zeros(expert_num - pairs.shape[0], 2)])


def _quantised(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    routing: Routing,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    quant_mode: int,
    first: int,
    x_dtype: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(expanded_x, expanded_scale)``, two-dimensional."""
    source, k = routing.source, expert_idx.shape[1]
    wide = compute_dtype(x, scale)
    if quant_mode == _PLAIN:
        none = torch.zeros(source.shape[0], dtype=wide)
        if scale is None and (x.dtype in _BLOCKS or x_dtype in _FLOAT4):
            none = none.to(torch.uint8).view(torch.float8_e8m0fnu)
        return _moved(x, source, k), none if scale is None else _moved(scale, source, k)
    rows = taken(x, source, k)
    rows = rows.to(wide)
    if quant_mode == _STATIC:
        if scale is None or offset is None:
            raise ValueError(f"{_NAME}: quant_mode 0 takes scale [1] and offset [1]; one of them is None.")
        quotient = rows * scale.to(wide) + offset.to(wide)
        return round_to_int8(quotient).masked_fill((source < 0).unsqueeze(-1), 0), rows.new_zeros(())
    if quant_mode in FLOAT_MODES:
        values, scales = to_floats(x, rows, quant_mode, scale)
        own = torch.arange(rows.shape[0]).masked_fill(source < 0, -1)
        return values, _moved(scales, own, 1) if scales.dim() else scales
    if scale is not None and rows.shape[0]:
        expert = taken(expert_idx.reshape(-1, 1), source, 1).squeeze(1).long() - first
        own = scale.expand(1, -1) if scale.shape[0] == 1 else scale[expert.clamp(min=0)]
        rows = rows * own.to(wide)
    quotient, scales = dynamic_quotient(rows) if quant_mode == _DYNAMIC else dynamic_quotient(rows, 7.0)
    values = round_to_int8(quotient)
    return (values if quant_mode == _DYNAMIC else pack_bytes(values)), scales


def _moved(x: torch.Tensor, source: torch.Tensor, k: int) -> torch.Tensor:
    """As ``taken``, of any dtype: 8-bit floats move as bytes."""
    bare = x.view(torch.uint8) if x.element_size() == 1 else x
    return taken(bare, source, k).view(x.dtype)
