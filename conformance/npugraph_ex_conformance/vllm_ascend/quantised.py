"""W8A8: int8 weights with a scale a row, as the client's quantiser writes them, and what they say in float32."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["quantise", "write_description"]

_KEPT = "lm_head"
"""The linear that stays as it is."""


def quantise(model: nn.Module) -> dict[str, torch.Tensor]:
    """Round the linears of a model to int8 in place; return its weights as the client reads them, the rest in bfloat16."""
    weights = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for path, linear in model.named_modules():
            if not isinstance(linear, nn.Linear) or path == _KEPT:
                continue
            scale = (linear.weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16).float()
            rounded = (linear.weight / scale).round().clamp(-128, 127)
            linear.weight.copy_(rounded * scale)
            weights[f"{path}.weight"] = rounded.to(torch.int8)
            weights[f"{path}.weight_scale"] = scale.to(torch.bfloat16)
            weights[f"{path}.weight_offset"] = torch.zeros_like(scale).to(torch.bfloat16)
    return weights


def write_description(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the file that tells the client how each weight is quantised: activations a token at a time."""
    kinds = dict.fromkeys(weights, "FLOAT")
    for name in weights:
        if name.endswith(".weight_scale"):
            stem = name.removesuffix("_scale")
            kinds |= {stem: "W8A8_DYNAMIC", f"{stem}_scale": "W8A8_DYNAMIC", f"{stem}_offset": "W8A8_DYNAMIC"}
    (folder / "quant_model_description.json").write_text(json.dumps(kinds), encoding="utf-8")
