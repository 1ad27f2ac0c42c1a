"""Which operators round to whole numbers: their results jump, and inputs near the jumps are drawn for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

ROUNDING = frozenset({"round", "floor", "ceil", "trunc", "frac", "floor_divide", "remainder", "fmod"})


def rounds_to_whole(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the results of the operator of this name are whole numbers, or what is left beside them."""
    dtype = kwargs.get("dtype")
    to_integers = isinstance(dtype, torch.dtype) and not dtype.is_floating_point and dtype != torch.bool
    return name in ROUNDING or kwargs.get("rounding_mode") is not None or (name == "_to_copy" and to_integers)
