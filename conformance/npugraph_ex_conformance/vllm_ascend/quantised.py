"""W8A8: int8 weights with a scale a row, as the client's quantiser writes them, and what they say in float32.

Experts, shared ones too, always have dynamic activations: the client has no static ones for them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["DYNAMIC", "STATIC", "quantise", "write_description"]

DYNAMIC = "W8A8_DYNAMIC"
"""Activations have a scale a token, found when they are there."""
STATIC = "W8A8"
"""The activations of a linear have one scale, found beforehand."""
_KEPT = ("lm_head", "kv_b_proj")
"""The linears that stay as they are; the client multiplies the second with others."""
_SHARED = ".shared_experts."
"""A part of the names of linears in shared experts."""
_SAMPLE = torch.arange(512).view(2, 256)
"""Tokens on which the scales of static activations are found."""


def quantise(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """Round the linears of a model to int8 in place; return its weights as the client reads them, the rest in bfloat16.

    A static model rounds the inputs of its linears too from then on, to the same int8 as the client.
    """
    weights = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    linears = {
        path: linear
        for path, linear in model.named_modules()
        if isinstance(linear, nn.Linear) and not path.endswith(_KEPT)
    }
    for path, linear in linears.items():
        weights |= _rounded(path, linear.weight)
    for path, module in model.named_modules():
        for number, one in _experts(module):
            for name, weight in one.items():
                weights |= _rounded(f"{path}.{number}.{name}", weight)
        if next(_experts(module), None):
            del weights[f"{path}.gate_up_proj"], weights[f"{path}.down_proj"]
    if kind == STATIC:
        static = {path: linear for path, linear in linears.items() if _SHARED not in path}
        for path, scale in _round_inputs(model, static).items():
            weights[f"{path}.input_scale"] = scale.to(torch.bfloat16).view(1)
            weights[f"{path}.input_offset"] = torch.zeros(1, dtype=torch.int8)
            rows = weights[f"{path}.weight_scale"].float().flatten()
            weights[f"{path}.deq_scale"] = scale * rows
            weights[f"{path}.quant_bias"] = torch.zeros(len(rows), dtype=torch.int32)
    return weights


def _experts(module: nn.Module) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Views of the weights of each expert in a module that has them in one tensor, by the names they have in a file."""
    joined: Any = module
    if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
        for number, down in enumerate(joined.down_proj.data):
            gate, up = joined.gate_up_proj.data[number].chunk(2)
            yield number, {"gate_proj": gate, "up_proj": up, "down_proj": down}


def _rounded(path: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round a weight in place; return its int8 values, scales and offsets by their names in a file."""
    with torch.no_grad():
        scale = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16).float()
        rounded = (weight / scale).round().clamp(-128, 127)
        weight.copy_(rounded * scale)
    return {
        f"{path}.weight": rounded.to(torch.int8),
        f"{path}.weight_scale": scale.to(torch.bfloat16),
        f"{path}.weight_offset": torch.zeros_like(scale).to(torch.bfloat16),
    }


def _round_inputs(model: nn.Module, linears: dict[str, nn.Linear]) -> dict[str, torch.Tensor]:
    """Find the scale of each linear's input on a sample, and round it in every later call; return the scales.

    The client multiplies by the reciprocal in bfloat16, and so does this.
    """
    largest: dict[str, torch.Tensor] = {}

    def look(path: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            largest[path] = inputs[0].abs().max()

        return hook

    looking = [linear.register_forward_pre_hook(look(path)) for path, linear in linears.items()]
    with torch.no_grad():
        model(_SAMPLE)
    for one in looking:
        one.remove()
    scales = {path: (most / 127).to(torch.bfloat16) for path, most in largest.items()}
    for path, linear in linears.items():
        linear.register_forward_pre_hook(_rounding(scales[path]))
    return {path: scale.float() for path, scale in scales.items()}


def _rounding(scale: torch.Tensor) -> Any:
    reciprocal, scale = (1 / scale).float(), scale.float()

    def hook(_: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return ((inputs[0] * reciprocal).round().clamp(-128, 127) * scale,)

    return hook


def write_description(weights: dict[str, torch.Tensor], kind: str, folder: Path) -> None:
    """Write the file that tells the client how each weight is quantised."""

    def kind_of(name: str) -> str:
        layer = name.rpartition(".")[0]
        if f"{layer}.weight_scale" not in weights:
            return "FLOAT"
        return kind if f"{layer}.input_scale" in weights else DYNAMIC

    kinds = {name: kind_of(name) for name in weights}
    (folder / "quant_model_description.json").write_text(json.dumps(kinds), encoding="utf-8")
