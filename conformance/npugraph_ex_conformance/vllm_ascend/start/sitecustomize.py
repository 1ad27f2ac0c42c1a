"""Read by Python at the start of the engine's processes: torchvision's wheel for CUDA becomes importable beside a torch without.

Its library does not load, so two operators lack their schemas, for which it defines fake functions. Nothing calls them here.
"""

from __future__ import annotations

import sys


class _BeforeTorchvision:
    """Finds no module, and defines the operators when torchvision is looked for."""

    def __init__(self) -> None:
        self._libraries: list[object] = []

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torchvision" and not self._libraries:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            self._libraries.append(library)
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
