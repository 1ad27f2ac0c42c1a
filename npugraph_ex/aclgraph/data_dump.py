"""Runs a graph operator by operator and writes what every node computed: the option `dump_tensor_data`.

Each call gets a folder `<data_dump_dir>/npugraph_ex_data/pid_<pid>/graph__<number>/call__<n>/`. Every value is one file
`NNN_<node>.pt` for `torch.load`, written under another name first and then renamed, so that no file is ever incomplete. The results
come last, by position: passes may give the last operators other names, and no pass changes what the graph returns.
`index.json` gives the operator of each file, its source line, and the names of its inputs.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.aclgraph import scopes
from npugraph_ex.errors import NpuGraphExError
from npugraph_ex.graph.memory.aliases import written_by
from npugraph_ex.graph.source import source_line
from npugraph_ex.observe.logger import logger


class DumpedGraph:
    """A graph that runs without a capture and dumps each value. Call it like the graph's forward.

    Args:
        gm: the graph to run, optimised or not.
        names: the user's name of each input.
        directory: the option `data_dump_dir`; the folder is created if necessary.
        number: the compiled graph's number, for the folder's name.
    """

    def __init__(self, gm: fx.GraphModule, names: Sequence[str], directory: str, number: int) -> None:
        self.gm = gm
        self._names = tuple(names)
        root = Path(directory) / "npugraph_ex_data" / f"pid_{os.getpid()}"
        self.directory = root / f"graph__{number}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NpuGraphExError(
                f"data_dump_dir={directory!r} cannot be written: {error}. Choose another folder"
            ) from error
        self._calls = itertools.count()
        logger.warning("dump_tensor_data: graph %d runs uncaptured and writes into %s", number, self.directory)

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph on ``inputs``, dump, and return its outputs."""
        folder = self.directory / f"call__{next(self._calls)}"
        folder.mkdir()
        run = _Dumping(self.gm, folder, self._names)
        try:
            return scopes.closing(run.run)(*inputs, enable_io_processing=False)
        finally:
            text = json.dumps(run.index, indent=2) + "\n"
            _replace(folder / "index.json", lambda path: path.write_text(text, encoding="utf-8"))


class _Dumping(fx.Interpreter):
    """Writes the value of each node as soon as it is computed, because a later operator may overwrite it."""

    def __init__(self, gm: fx.GraphModule, folder: Path, names: Sequence[str]) -> None:
        super().__init__(gm)
        self.index: list[dict[str, object]] = []
        self._folder = folder
        self._inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), names, strict=True))

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            for position, (leaf, result) in enumerate(zip(*map(pytree.tree_leaves, (value, n.args[0])), strict=True)):
                if isinstance(leaf, torch.Tensor):
                    self._write(f"result {position}", "result", source_line(result), leaf)
            return value
        # Otherwise an operator that writes an argument and returns nothing would leave no file.
        shown = value if value is not None else tuple(self.env[node] for node in written_by(n))
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(shown)):
            self._write(n.name, self._inputs.get(n, str(n.target)), source_line(n), shown)
        return value

    def _write(self, name: str, operator: str, source: str, value: Any) -> None:
        file = f"{len(self.index):04d}_{name.replace(' ', '_')}.pt"
        host = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), value)
        _replace(self._folder / file, lambda path: torch.save(host, path))
        self.index.append({"file": file, "node": name, "operator": operator, "source": source})


def _replace(path: Path, write: Any) -> None:
    """Write a file that is either complete or absent."""
    part = path.with_name(f".{path.name}.part")
    write(part)
    part.replace(path)
