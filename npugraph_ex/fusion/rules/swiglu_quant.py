"""``npu_swiglu`` then ``npu_dynamic_quant`` => ``npu_swiglu_quant``. An extra rule, off unless switched on.

Constraints (operator documentation of ``torch_npu.npu_swiglu_quant``): x is float16, bfloat16 or float32, has two or
more dimensions, and its last is even and at most 8192; empty tensors are not fused. ``npu_swiglu_quant`` returns the factor
by which it multiplied a row, so its reciprocal is the scale of ``npu_dynamic_quant``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor.pattern_matcher import Match

from npugraph_ex.fusion.conditions import holds, value_of
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules._built_in_rule import FLOATING, BuiltInRule, Operands

NAME = "swiglu_quant"
DTYPES = FLOATING
LARGEST = 8192
_DYNAMIC = 1


def _search(x: Tensor) -> tuple[Tensor, Tensor]:
    quantised, scale = torch.ops.npu.npu_dynamic_quant(torch.ops.npu.npu_swiglu(x))
    return quantised, scale


def _replace(x: Tensor) -> tuple[Tensor, Tensor]:
    # npu_swiglu activates the first half, which is the left one.
    quantised, scale = torch.ops.npu.npu_swiglu_quant(x, activate_left=True, quant_mode=_DYNAMIC)
    return quantised, scale.reciprocal()


def _unsupported(match: Match) -> str | None:
    x = value_of(match, "x")
    if x is None or x.dtype not in DTYPES or x.dim() < 2:
        return f"x must have two or more dimensions and a dtype of {', '.join(map(str, DTYPES))}"
    if not holds(x.numel() > 0):
        return "x may be empty, which the fused operator does not take"
    return None if holds(x.shape[-1] <= LARGEST) else f"last dim {x.shape[-1]} of x is above {LARGEST}"


def _examples() -> list[Tensor]:
    return [torch.empty(2, 16, dtype=torch.float16, device="npu")]


RULE = BuiltInRule(
    variants=(FusionRule(NAME, _search, _replace, _examples, _unsupported),),
    default=False,
    order=30,
    operands=Operands(dtypes=DTYPES, refused_sizes=({16: LARGEST + 16},)),
)
