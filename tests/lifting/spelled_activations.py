"""Spellings of activations, gated ones among them, and what nearly is one: functions by name, and their shapes."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

WIDTH = 64


def gelu_of_gpt2(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_of_bloom(x: Any) -> Any:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def gelu_of_bert(x: Any) -> Any:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_by_sigmoid(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x)


def gelu_by_the_other_error_function(x: Any) -> Any:
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def silu_by_quotient(x: Any) -> Any:
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


ACTIVATIONS: dict[Callable[..., Any], str] = {
    gelu_of_gpt2: "gelu", gelu_of_bloom: "gelu", gelu_of_bert: "gelu", gelu_by_sigmoid: "npu_fast_gelu",
    silu_by_quotient: "silu", gelu_by_the_other_error_function: "gelu",
}  # fmt: skip


def gelu_with_another_cubic(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.04472 * torch.pow(x, 3.0))))


def gelu_in_float32(x: Any) -> Any:
    """Right to the last bit, as the operator is not."""
    wide = x.float()
    return (wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))).to(x.dtype)


def gelu_with_another_slope(x: Any) -> Any:
    return x * torch.sigmoid(1.7 * x)


def gelu_of_two(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x.flip(0))


def gated(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gated_behind(x: Any) -> Any:
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return up * (gate * torch.sigmoid(gate))


def gated_before_its_sigmoid(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return (gate * up) * torch.sigmoid(gate)


def gated_by_a_quotient(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return gate * up / (1 + torch.exp(-gate))


def gated_in_other_dimensions(x: Any) -> Any:
    """As behind an `addmm`, which takes rows of two dimensions."""
    gate, up = (half.view(4, 6, -1) for half in x.view(24, -1).chunk(2, dim=-1))
    return functional.silu(gate) * up


def silu_of_a_group_norm(x: Any) -> Any:
    return functional.silu(functional.group_norm(x, 3, x[0, :, 0], x[1, :, 0], 1e-6))


GATED: tuple[Callable[..., Any], ...] = (
    gated,
    gated_behind,
    gated_before_its_sigmoid,
    gated_by_a_quotient,
    gated_in_other_dimensions,
)


def gated_by_gelu(x: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return first * functional.gelu(second)


def gated_by_tanh(x: Any) -> Any:
    half = x.shape[-1] // 2
    return functional.gelu(x[..., :half], approximate="tanh") * x[..., half:]


def gated_before_its_error_function(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return 0.5 * gate * up * (1 + torch.erf(gate * 0.5**0.5))


GATED_BY_GELU: tuple[Callable[..., Any], ...] = (gated_by_gelu, gated_by_tanh, gated_before_its_error_function)


def gate_and_up_swapped(x: Any) -> Any:
    up, gate = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_of_a_group_norm_without_a_weight(x: Any) -> Any:
    return functional.silu(functional.group_norm(x, 3))


def sigmoid_of_a_group_norm(x: Any) -> Any:
    return functional.sigmoid(functional.group_norm(x, 3, x[0, :, 0], x[1, :, 0], 1e-6))


def gated_rows(x: Any) -> Any:
    gate, up = x.chunk(2, dim=0)
    return functional.silu(gate) * up


def gated_in_other_rows(x: Any) -> Any:
    gate, up = (half.reshape(4, 12, -1) for half in x.view(24, -1).chunk(2, dim=-1))
    return functional.silu(gate) * up


def each_row_gated_by_all(x: Any) -> Any:
    gate, up = x.view(24, -1).chunk(2, dim=-1)
    return functional.silu(gate.unsqueeze(1)) * up.view(1, 24, -1)


NOT_ACTIVATIONS: dict[Callable[..., Any], str] = {
    gelu_with_another_cubic: "up to 3e-06 from torch.nn.functional.gelu(x, approximate='tanh'), which is x / 2",
    gelu_with_another_slope: "up to 0.0003 from torch_npu.npu_fast_gelu(x), which is x * sigmoid(1.702 * x)", gelu_of_two: "",
    gelu_in_float32: "farther from float64 than eager mode",
    silu_of_a_group_norm_without_a_weight: "no weight", sigmoid_of_a_group_norm: "",
    gate_and_up_swapped: "the operator takes the first half as the gate", gated_rows: "",
    gated_in_other_rows: "", each_row_gated_by_all: "",
}  # fmt: skip


ACTIVATION_SPECS = ((4, 6, WIDTH),)
