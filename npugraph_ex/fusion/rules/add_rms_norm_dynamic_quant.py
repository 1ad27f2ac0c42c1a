"""``npu_add_rms_norm`` then ``npu_dynamic_quant`` => ``npu_add_rms_norm_dynamic_quant``.

With and without ``smooth_scales``, whatever epsilon is, whether or not the residual sum is used. The norm's ``rstd``
vanishes, so a graph that uses it is left alone.

Constraints (CANN operator documentation, aclnnAddRmsNormDynamicQuantV2): x1, x2, gamma and smoothing vector are all
float16 or all bfloat16; x1 and x2 have one shape of 2 to 8 dimensions; gamma and the smoothing vector are vectors of
its last size; empty tensors are not supported.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.pattern_matcher import Match
from torch.fx.experimental.symbolic_shapes import statically_known_true

from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.passes.metadata import difference, same_numbers

DTYPES = (torch.float16, torch.bfloat16)
RANKS = range(2, 9)
_EPSILON_WHILE_TRACING = 0.1875


def _search(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    quantised, scale = torch.ops.npu.npu_dynamic_quant(y)
    return quantised, scale, x_out


def _replace(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    quantised, _, x_out, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, epsilon=epsilon)
    return quantised, scale, x_out


def _search_smoothed(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, smooth_scales: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, x_out = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    quantised, scale = torch.ops.npu.npu_dynamic_quant(y, smooth_scales=smooth_scales)
    return quantised, scale, x_out


def _replace_smoothed(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, smooth_scales: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    quantised, _, x_out, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
        x1, x2, gamma, smooth_scale1=smooth_scales, epsilon=epsilon
    )
    return quantised, scale, x_out


def _value(match: Match, name: str) -> torch.Tensor | None:
    node = match.kwargs.get(name)
    return node.meta["val"] if isinstance(node, fx.Node) else None


def _unsupported(match: Match) -> str | None:
    """The first documented constraint that the match violates."""
    x1 = _value(match, "x1")
    assert x1 is not None  # noqa: S101 - the matcher bound it to a tensor
    if x1.dtype not in DTYPES:
        return f"x1 is {x1.dtype}; the fused operator takes {' and '.join(map(str, DTYPES))}"
    if x1.dim() not in RANKS:
        return f"x1 has {x1.dim()} dimensions; the fused operator takes {RANKS.start} to {RANKS.stop - 1}"
    if not statically_known_true(x1.numel() > 0):
        return "x1 may be empty, which the fused operator does not take"
    x2 = _value(match, "x2")
    if x2 is None or not same_numbers(x2.shape, x1.shape) or x2.dtype != x1.dtype:
        return "x1 and x2 differ in shape or dtype"
    vector = x1.new_empty(x1.shape[-1:])
    for name in ("gamma", "smooth_scales"):
        value = _value(match, name)
        if value is not None and difference(vector, value.contiguous()):
            return f"{name} must be a {x1.dtype} vector of x1's last size; it has {difference(vector, value)}"
    return None


def _examples(tensors: int) -> tuple[torch.Tensor, ...]:
    rows = [torch.empty(2, 16, dtype=torch.float16, device="npu") for _ in range(2)]
    return (*rows, *(torch.empty(16, dtype=torch.float16, device="npu") for _ in range(tensors - 2)))


_SCALARS = {"epsilon": _EPSILON_WHILE_TRACING}
NAME = "add_rms_norm_dynamic_quant"

RULES = (
    FusionRule(NAME, _search, _replace, lambda: _examples(3), _unsupported, _SCALARS),
    FusionRule(NAME, _search_smoothed, _replace_smoothed, lambda: _examples(4), _unsupported, _SCALARS),
)
