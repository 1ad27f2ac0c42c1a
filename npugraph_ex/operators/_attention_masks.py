"""Which scores an ``atten_mask`` and a ``sparse_mode`` leave out; the same for attention of training and of inference.

From the operator documentation of ``torch_npu.npu_fusion_attention`` and ``torch_npu.npu_fused_infer_attention_score``:

==== ==========================================================================================================
mode left out
==== ==========================================================================================================
0    where the whole mask is true, or outside the band counted from the upper left
1    where the whole mask is true
2    keys behind the query, counted from the upper left (the mask is only a compressed triangle)
3    keys behind the query, counted from the lower right
4    outside the band, counted from the lower right
5, 6 as 3, but the first ``prefix`` keys are seen (5: where a whole mask is given, that mask)
7    as 3, the last sequence as 4
8    as 2, the first sequence as 4
==== ==========================================================================================================
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._attention import excluded_by_band
from npugraph_ex.operators._precision import unsupported

__all__ = ["Masking", "left_out"]


class Masking(NamedTuple):
    """The arguments of a call that say which scores are left out."""

    mask: torch.Tensor | None
    mode: int
    before: int
    after: int
    prefix: list[int] | None = None


def left_out(
    operator: str, how: Masking, rows: int, columns: int, *, sequence: int = 0, last: int = 0
) -> torch.Tensor | None:
    """True where a score is left out, [..., rows, columns]; None where none is. ``sequence`` 0 to ``last`` is looked at."""
    mode = how.mode
    if mode == 7:
        mode = 4 if sequence == last else 3
    elif mode == 8:
        mode = 4 if sequence == 0 else 2
    if mode in {0, 1}:
        return _whole(how, rows, columns)
    if mode == 2:
        return excluded_by_band(rows, columns, torch.inf, 0, at_end=False)
    if mode == 3:
        return excluded_by_band(rows, columns, torch.inf, 0, at_end=True)
    if mode == 4:
        return excluded_by_band(rows, columns, how.before, how.after, at_end=True)
    if mode == 5 and how.mask is not None:
        return how.mask.bool()[..., :rows, :columns]
    if mode in {5, 6} and how.prefix is not None:
        behind = excluded_by_band(rows, columns, torch.inf, 0, at_end=True)
        starts = torch.tensor(how.prefix).reshape(-1, 1, 1, 1) if last == 0 else torch.tensor(how.prefix[sequence])
        return behind & (torch.arange(columns) >= starts)
    raise unsupported(operator, "sparse_mode", how.mode, "0 to 8, of which 5 and 6 need prefix")


def _whole(how: Masking, rows: int, columns: int) -> torch.Tensor | None:
    if how.mask is None:
        return None
    mask = how.mask.bool()[..., :rows, :columns]
    if how.mode == 0 and (how.before < rows or how.after < columns):
        mask = mask | excluded_by_band(rows, columns, how.before, how.after, at_end=False)
    return mask
