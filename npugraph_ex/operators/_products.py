"""Generations of devices, as the operators' documents name them in their tables of products."""

from __future__ import annotations

PRODUCTS = {"A2": "Ascend910B", "A3": "Ascend910_93", "950": "Ascend950"}
"""Of each, how the names of its devices begin (`torch.npu.get_device_name`)."""


def product_of(device: str) -> str | None:
    """The product that a device of this name is; None for one that is none of these."""
    return next((product for product, begins in PRODUCTS.items() if device.startswith(begins)), None)
