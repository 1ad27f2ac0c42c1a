"""Spellings in float32 of what an operator does by itself with 16 bits, and what nearly is one: functions by name.

All take ``ACTIVATION_SPECS``.
"""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

WIDTH = 64


def layer_norm_of_olmo(x: Any) -> Any:
    return functional.layer_norm(x.to(torch.float32), (WIDTH,), None, None, 1e-5).to(x.dtype)


def layer_norm_in_float32(x: Any) -> Any:
    w, b = x[0, 0], x[0, 1]
    return functional.layer_norm(x.float(), (WIDTH,), w.float(), b.float(), 1e-5).type_as(x)


def group_norm_in_float32(x: Any) -> Any:
    """As diffusion models have it."""
    w, b = x[0, :, 0], x[1, :, 0]
    return functional.group_norm(x.float(), 3, w.float(), b.float(), 1e-6).type(x.dtype)


def softmax_in_float32(x: Any) -> Any:
    return torch.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)


def log_softmax_in_float32(x: Any) -> Any:
    return functional.log_softmax(x.float(), dim=1).to(x.dtype)


def gelu_of_float32(x: Any) -> Any:
    return functional.gelu(x.float()).to(x.dtype)


def tanh_gelu_of_float32(x: Any) -> Any:
    return functional.gelu(x.float(), approximate="tanh").to(x.dtype)


def silu_of_float32(x: Any) -> Any:
    return functional.silu(x.float()).to(x.dtype)


UPCASTS: dict[Callable[..., Any], str] = {
    layer_norm_of_olmo: "native_layer_norm", layer_norm_in_float32: "native_layer_norm",
    group_norm_in_float32: "native_group_norm", softmax_in_float32: "_softmax", log_softmax_in_float32: "_log_softmax",
    gelu_of_float32: "gelu", tanh_gelu_of_float32: "gelu", silu_of_float32: "silu",
}  # fmt: skip


def gated_in_float32(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(x.dtype)


def gated_before_the_cast(x: Any) -> Any:
    gate, up = x.float().chunk(2, dim=-1)
    return (up * (gate * torch.sigmoid(gate))).type_as(x)


def gated_by_gelu_in_float32(x: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return (first.float() * functional.gelu(second.float(), approximate="tanh")).to(x.dtype)


def silu_of_a_group_norm_in_float32(x: Any) -> Any:
    normed = functional.group_norm(x.float(), 3, x[0, :, 0].float(), x[1, :, 0].float(), 1e-6)
    return functional.silu(normed).to(x.dtype)


GATED_IN_FLOAT32: tuple[Callable[..., Any], ...] = (gated_in_float32, gated_before_the_cast)
OTHERS_IN_FLOAT32: tuple[Callable[..., Any], ...] = (gated_by_gelu_in_float32, silu_of_a_group_norm_in_float32)


def norm_with_a_weight_in_float32(x: Any) -> Any:
    """As a model has it that keeps its norms in float32."""
    w = x[0, 0].float() * 1.5
    return functional.layer_norm(x.float(), (WIDTH,), w, None, 1e-5).to(x.dtype)


def softmax_of_scores_in_float32(x: Any) -> Any:
    return torch.softmax(x.float() * 1.5, dim=-1).to(x.dtype)


def deviation_of_a_norm(x: Any) -> Any:
    """What is cast back is the norm's third result."""
    return torch.native_layer_norm(x.float(), (WIDTH,), None, None, 1e-5)[2].to(x.dtype)


def power_in_float32(x: Any) -> Any:
    """An operator of which nobody says that it computes in float32."""
    return x.float().pow(3).to(x.dtype)


def softmax_that_stays_wide(x: Any) -> Any:
    return torch.softmax(x.float(), dim=-1)


def gates_in_another_dtype(x: Any) -> Any:
    """Nothing casts it back."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate.float()) * up


NOT_UPCASTS: dict[Callable[..., Any], str] = {
    norm_with_a_weight_in_float32: "weight and bias are torch.float32", softmax_of_scores_in_float32: "",
    deviation_of_a_norm: "", power_in_float32: "", softmax_that_stays_wide: "",
    gates_in_another_dtype: "the halves are torch.float16 and the product torch.float32",
}  # fmt: skip
