"""Graph dumps: after each pass one Python file that shows, and can run, the graph as it then was.

Dumps appear when ``TORCH_COMPILE_DEBUG=1`` under
``torch_compile_debug/run_<time>-pid_<pid>/npugraph_ex/model__K/NNN_<name>.py``, K counting the graphs of the process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from npugraph_ex import _torch_private

_HEADER = '''"""{title}."""

import operator

import torch
from torch import device, inf, nan  # noqa: F401 - printed graphs use these names bare
{imports}

'''


def graph_source(gm: fx.GraphModule, title: str) -> str:
    """``gm`` as a Python module: class ``GraphModule`` with each node's dtype, shape, strides and device beside it.

    Tensors that the graph reads from its module (``self.name``) are not written; assign them before calling.
    """
    code = gm.graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    imports = "\n".join(
        f"import {value.__name__}" for name, value in code.globals.items() if name in ("torch_npu", "math")
    )
    body = "\n".join(f"    {line}" if line else "" for line in code.src.strip("\n").splitlines())
    return f"{_HEADER.format(title=title, imports=imports)}class GraphModule(torch.nn.Module):\n{body}\n"


@dataclass
class GraphDumper:
    """Writes one graph's dumps, numbered in order, into ``directory``, which exists."""

    directory: Path
    _count: int = field(default=0)

    def graph(self, gm: fx.GraphModule, name: str) -> Path:
        """Write ``gm`` as ``NNN_<name>.py``."""
        return self.text(graph_source(gm, f"The graph after {name}"), name, ".py")

    def text(self, content: str, name: str, suffix: str = ".txt") -> Path:
        """Write ``content`` as ``NNN_<name><suffix>``, for example the pass report."""
        path = self.directory / f"{self._count:03d}_{name}{suffix}"
        path.write_text(content, encoding="utf-8")
        self._count += 1
        return path


def dumping() -> bool:
    """Whether the user asked for dumps."""
    return os.environ.get("TORCH_COMPILE_DEBUG", "0") == "1"


def new_dumper() -> GraphDumper | None:
    """A dumper in a fresh ``model__K`` directory, or None when nobody asked for dumps."""
    if not dumping():
        return None
    root = _torch_private.debug_directory() / "npugraph_ex"
    root.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in root.glob("model__*"))
    while True:
        directory = root / f"model__{number}"
        try:
            directory.mkdir()
        except FileExistsError:  # another thread took the number
            number += 1
        else:
            return GraphDumper(directory)
