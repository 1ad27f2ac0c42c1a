"""The descriptions of launched operators that CANN writes between `aclopStartDumpArgs` and `aclopStopDumpArgs`.

One JSON file for each operator and set of shapes, in a folder whose name ends in `_opcompile`, as CANN names it. Their
contents follow CANN's documentation: the operator's type, and format, dtype and shape of its inputs and outputs.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

__all__ = ["OperatorRecords"]


class OperatorRecords:
    """Describes operators in a folder of its own under `folder`, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / f"{os.getpid()}_opcompile"
        self._folder.mkdir(parents=True, exist_ok=True)

    def note(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Describe the operator `name`, launched on these tensors."""
        kind = name.replace("::", "_").replace(".", "_")
        said = {"op_type": kind, "inputs": [*map(_described, reads)], "outputs": [*map(_described, writes)]}
        text = json.dumps(said, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        (self._folder / f"{kind}_{digest}.json").write_text(text, encoding="utf-8")


def _described(tensor: torch.Tensor) -> dict[str, object]:
    return {"format": "ND", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.size())}
