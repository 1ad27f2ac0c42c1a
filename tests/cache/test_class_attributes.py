"""What a class holds decides what its objects compute: a saved compilation compares it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from npugraph_ex.inference import cache_compile
from npugraph_ex.report.graphs import graphs_so_far


class Settings:
    """What a model holds."""

    gain = 3.0


class Base(torch.nn.Module):
    """A class that others derive from."""

    scale = 2.0


class Model(Base):
    """Computes with numbers of three classes."""

    shift = 1.0
    table: ClassVar = [4.0]

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of any shape."""
        return x * self.scale + self.shift + self.settings.gain * self.table[0]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(Model, "shift", 5.0), (Base, "scale", 7.0), (Settings, "gain", 9.0), (Model, "table", [6.0]), (Model, "table", [4.0, 1.0])],
)  # fmt: skip
def test_a_changed_class_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, value: Any
) -> None:
    """An attribute of the own class, of a base or of a held object's; a list by its elements and its length."""
    x = torch.tensor([1.0, -2.0], device="npu")
    for changed, new in ((False, 1), (False, 0), (True, 1)):
        if changed:
            monkeypatch.setattr(owner, name, value)
        model, before = Model(), graphs_so_far()
        with torch.no_grad():
            assert torch.equal(cache_compile(model.forward, cache_dir=tmp_path)(x).cpu(), model.forward(x).cpu())
        assert graphs_so_far() - before == new
