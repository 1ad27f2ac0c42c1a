"""What each option of the data dump changes: which values lie where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from option_effects import chain, compiled, fresh, ones, shows, told


def _dumped(folder: Path, call: int = 0) -> dict[str, Any]:
    (directory,) = folder.glob(f"npugraph_ex_data/*/*/call__{call}")
    entries = json.loads((directory / "index.json").read_text())
    return {entry["operator"]: torch.load(directory / entry["file"], weights_only=True) for entry in entries}


@shows("dump_tensor_data", "data_dump_dir")
def test_dump_tensor_data(tmp_path: Path) -> None:
    """Every input and every operator's value lies in the folder, for each call, and the graph is not captured."""
    entry = told(chain, *fresh(3), dump_tensor_data=True, data_dump_dir=str(tmp_path), inplace_pass=False)
    assert (entry.graph.fate, entry.captures) == ("dumped", ())
    values = _dumped(tmp_path, 2)
    assert values["L['x']"][0].item() == 2.0
    assert values["aten.add.Tensor"][0].item() == 3.0
    assert values["aten.mul.Tensor"][0].item() == 6.0
    assert not list(tmp_path.rglob("*.part"))


def test_a_dump_shows_a_value_before_it_is_overwritten(tmp_path: Path) -> None:
    """The value of the first operator is its own, although the second writes into the same memory."""
    told(chain, (ones() * -3,), dump_tensor_data=True, data_dump_dir=str(tmp_path))
    values = _dumped(tmp_path)
    assert values["aten.add.Tensor"][0].item() == -2.0
    assert values["aten.relu_.default"][0].item() == 0.0


@pytest.mark.slow
@shows("data_dump_stage")
def test_data_dump_stage(tmp_path: Path) -> None:
    """The graph that is run and dumped is the one after the passes, or the one that came from AOT."""
    for stage, operator in (("optimized", "aten.relu_.default"), ("original", "aten.relu.default")):
        told(chain, *fresh(1), dump_tensor_data=True, data_dump_dir=str(tmp_path / stage), data_dump_stage=stage)
        assert operator in _dumped(tmp_path / stage)


def test_a_dump_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the folder's place: the error names the option and what is wrong."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"data_dump_dir=.*cannot be written"):
        compiled(chain, dump_tensor_data=True, data_dump_dir=str(tmp_path / "file"))(ones())
