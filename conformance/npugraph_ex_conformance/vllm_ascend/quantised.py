"""W8A8: int8 weights with a scale a row, as the client's quantiser writes them, and what they say in float32."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DYNAMIC", "STATIC", "quantise", "write_description"]

DYNAMIC = "W8A8_DYNAMIC"
"""Activations have a scale a token, found when they are there."""
STATIC = "W8A8"
"""The activations of a linear have one scale, found beforehand."""
_KEPT = "lm_head"
"""The linear that stays as it is."""
_SAMPLE = torch.arange(512).view(2, 256)
"""Tokens on which the scales of static activations are found."""


def quantise(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """Round the linears of a model to int8 in place; return its weights as the client reads them, the rest in bfloat16.

    A static model rounds the inputs of its linears too from then on, to the same int8 as the client.
    """
    weights = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    linears = {
        path: linear for path, linear in model.named_modules() if isinstance(linear, nn.Linear) and path != _KEPT
    }
    with torch.no_grad():
        for path, linear in linears.items():
            scale = (linear.weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16).float()
            rounded = (linear.weight / scale).round().clamp(-128, 127)
            linear.weight.copy_(rounded * scale)
            weights[f"{path}.weight"] = rounded.to(torch.int8)
            weights[f"{path}.weight_scale"] = scale.to(torch.bfloat16)
            weights[f"{path}.weight_offset"] = torch.zeros_like(scale).to(torch.bfloat16)
    if kind == STATIC:
        for path, scale in _round_inputs(model, linears).items():
            weights[f"{path}.input_scale"] = scale.to(torch.bfloat16).view(1)
            weights[f"{path}.input_offset"] = torch.zeros(1, dtype=torch.int8)
            rows = weights[f"{path}.weight_scale"].float().flatten()
            weights[f"{path}.deq_scale"] = scale * rows
            weights[f"{path}.quant_bias"] = torch.zeros(len(rows), dtype=torch.int32)
    return weights


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
    of_int8 = {name.removesuffix("weight_scale") for name in weights if name.endswith(".weight_scale")}
    kinds = {name: kind if f"{name.rpartition('.')[0]}." in of_int8 else "FLOAT" for name in weights}
    (folder / "quant_model_description.json").write_text(json.dumps(kinds), encoding="utf-8")
