"""Adds up what the experts made of each token.

Formula (operator documentation of ``torch_npu.npu_moe_finalize_routing``), for token i and its K experts e = expert[i, k]::

    out[i] = skip1[i] + skip2[i] + sum over k of scales[i, k] * (rows[place(i, k)] + bias[e])

``place(i, k)`` is ``expanded_src_to_dst_row[i + k * N]`` with ``drop_pad_mode`` 0 and 1, and ``expanded_src_to_dst_row[i * K + k]``
with 2 and 3. A place of -1 is a choice that was dropped: its row counts as zeros.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_moe_finalize_routing"


def _floats(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


@Operator(
    name="npu::npu_moe_finalize_routing",
    source="operator documentation of torch_npu.npu_moe_finalize_routing",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("expanded_permuted_rows", "skip1", "skip2", "bias")),
    examples=(
        lambda: call(
            _floats(6, 4), _floats(3, 4), None, _floats(5, 4), _floats(3, 2),
            torch.tensor([3, 1, 0, 5, 4, 2], dtype=torch.int32), torch.tensor([[0, 1], [2, 3], [4, 0]], dtype=torch.int32),
        ),
        lambda: call(_floats(2, 2, 4), None, None, None, None, torch.tensor([3, -1, 0], dtype=torch.int32), None, 3),
    ),
)  # fmt: skip
def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """[N, H] like the rows; rows: [N * K, H], or [experts, capacity, H] with ``drop_pad_mode`` 1 and 3.

    skip1, skip2: [N, H]; bias: [experts, H]; scales, export_for_source_row (the experts): [N, K]; K is ``k`` without scales.
    """
    mode = drop_pad_mode or 0
    if mode not in {0, 1, 2, 3}:
        raise unsupported(_NAME, "drop_pad_mode", mode, "0, 1, 2 and 3")
    rows = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.shape[-1])
    wide = compute_dtype(rows)
    choices = scales.shape[1] if scales is not None else (k or 1)
    if choices < 1 or expanded_src_to_dst_row.shape[0] % choices:
        raise refused(_NAME, "k", k, f"a divisor of the {expanded_src_to_dst_row.shape[0]} choices")
    tokens = expanded_src_to_dst_row.shape[0] // choices
    places = expanded_src_to_dst_row.long()
    places = places.reshape(tokens, choices) if mode >= 2 else places.reshape(choices, tokens).t()
    parts = rows.to(wide)[places.clamp(min=0)].masked_fill((places < 0).unsqueeze(-1), 0)
    if bias is not None:
        if export_for_source_row is None:
            raise ValueError(
                f"{_NAME}: bias is added for each expert; export_for_source_row, which names them, is None."
            )
        parts = parts + bias.to(wide)[export_for_source_row.reshape(tokens, choices).long()]
    if scales is not None:
        parts = parts * scales.to(wide).unsqueeze(-1)
    out = parts.sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + skip.to(wide)
    return out.to(expanded_permuted_rows.dtype)
