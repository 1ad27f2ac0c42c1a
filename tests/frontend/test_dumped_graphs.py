"""The dumps of a compilation: one folder a graph, with every stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import npugraph_ex
from npugraph_ex.observe import dump


def test_all_dumps_of_a_graph_lie_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's graph, each pass, the report, the inputs by class and the captures: numbered, in model__0."""

    def step(x: torch.Tensor, cache: torch.Tensor, factor: int) -> torch.Tensor:
        cache.add_(x)
        return (x * factor).relu().t() + cache.sum()

    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    monkeypatch.setattr(dump._torch_private, "debug_directory", lambda: tmp_path)
    npugraph_ex.explain(step, torch.randn(4, 4, device="npu"), torch.randn(4, 4, device="npu"), 3)
    (folder,) = (tmp_path / "npugraph_ex").iterdir()
    assert folder.name == "model__0"
    names = sorted(path.name for path in folder.iterdir())
    assert names[:2] == ["000_dynamo.py", "001_aot.py"]
    assert any(name.endswith("_reinplace_inputs.py") for name in names)
    description = next(folder.glob("*_captured_graph.txt")).read_text()
    assert "L['cache']" in description
    assert "6 before the passes, 5 after" in description
    captures = (folder / "captures.txt").read_text().splitlines()
    assert [line.split("because of ")[1].split(";")[0] for line in captures] == [
        "the first call",
        "a new address of L['cache']",
    ]


@pytest.mark.slow
def test_the_dump_of_torch_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch.compile and torch's own folder: the documented layout, and each dumped graph computes what eager mode does."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x * 2).relu() + y).t()

    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    fast = torch.compile(function, backend="npugraph_ex", fullgraph=True, dynamic=False)
    kept = []
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path / "torch_compile_debug")):
        for _ in range(3):
            inputs = torch.randn(3, 4, device="npu"), torch.randn(3, 4, device="npu")
            kept.append((fast(*inputs), function(*inputs), inputs))
        torch.compile(lambda x: x + 1, backend="npugraph_ex")(torch.randn(2, device="npu"))
    for got, expected, _ in kept:
        assert torch.equal(got.cpu(), expected.cpu())
    (run,) = (tmp_path / "torch_compile_debug").glob(f"run_*-pid_{os.getpid()}")
    assert sorted(path.name for path in (run / "npugraph_ex").iterdir()) == ["model__0", "model__1"]
    names = sorted(path.name for path in (run / "npugraph_ex" / "model__0").iterdir())
    assert names[:2] == ["000_dynamo.py", "001_aot.py"]
    assert [name.split("_", 1)[0] for name in names[:-1]] == [f"{number:03d}" for number in range(len(names) - 1)]
    assert names[-1] == "captures.txt"
    assert {"pass_report.txt", "pass_report.json", "captured_graph.txt"} <= {name.split("_", 1)[-1] for name in names}
    for name in names[1:]:
        if name.endswith(".py"):
            space: dict[str, Any] = {}
            exec((run / "npugraph_ex" / "model__0" / name).read_text(), space)  # noqa: S102 - that it runs is the point
            _, expected, inputs = kept[-1]
            (value,) = space["GraphModule"]()(*inputs)
            assert torch.equal(value.cpu(), expected.cpu()), name
