"""The compiler object that vLLM calls: it hashes, compiles, saves and loads, and replaces nothing of anybody's.

vLLM takes it by its full name, ``npugraph_ex.integrations.vllm.compiler.NpuGraphExCompiler``, as what a platform's
``get_compile_backend`` returns. vLLM itself is not needed to use it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex._own_files import read_own, write_whole
from npugraph_ex.aclgraph import compile_graph
from npugraph_ex.cache.key import cache_key
from npugraph_ex.errors import SavedGraphError, address_of
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.frontend.entry.compiler import CompiledFxGraph
from npugraph_ex.integrations.vllm.config import VllmSettings, captured_batch_sizes
from npugraph_ex.integrations.vllm.pieces import piece_key
from npugraph_ex.observe.logger import logger
from npugraph_ex.saving.artifact import SavedGraph

try:
    from vllm.compilation.compiler_interface import CompilerInterface as _Interface
except ImportError:
    _Interface = object

Handle = tuple[str, str]
"""What vLLM keeps for a saved graph: its key and the path of its file."""


@dataclass
class _Made:
    """A compiled piece: its function with flat results, what was compiled for it, and where that is saved."""

    function: Callable[..., Sequence[Any]]
    compiled: list[CompiledFxGraph]
    handle: Handle | None = None


class NpuGraphExCompiler(_Interface):  # type: ignore[misc] # a class of vLLM's, or object
    """vLLM's compiler interface over this library.

    Graphs are optimised and not captured: the engine captures. A compiled graph is saved as text, and loaded in a fresh
    process without tracing or passes. Equal pieces of a model are compiled once, and share a file.
    """

    name = "npugraph_ex"

    def __init__(self) -> None:
        self._settings = VllmSettings()
        self._batch_sizes: list[int] | None = None
        self._directory: Path | None = None
        self._pieces: dict[object, _Made] = {}

    def compute_hash(self, vllm_config: Any) -> str:
        """Read the configuration, and give vLLM the part of its cache's name that this compiler decides."""
        self._settings = VllmSettings.of(vllm_config.additional_config)
        if self._settings.enable_static_kernel:
            self._batch_sizes = captured_batch_sizes(vllm_config)
        if not self._settings.enable:
            return "disabled"
        return cache_key(self._settings.options(self._batch_sizes))[:16]

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:  # noqa: FBT001, FBT002 - vLLM's signature
        """Save graphs under ``cache_dir``; vLLM gives each rank a folder of its own."""
        self._directory = None if disable_cache else Path(cache_dir) / prefix
        self._pieces.clear()  # their files lie in the folder before

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: dict[str, Any] | None = None,
        compile_range: Any = None,
        key: str | None = None,
    ) -> tuple[Callable[..., Any], Handle | None]:
        """Compile one graph of Dynamo's.

        Args:
            graph: left as it is.
            example_inputs: fake or real, sizes symbolic or not; also under a fake mode of the caller's.
            compiler_config: vLLM's; unused, because the options come from ``additional_config``.
            compile_range: for which sizes vLLM will call it; unused, because the graph says it.
            key: under which to save it; None to save nothing.

        Returns:
            The callable, and the handle for `load`; None for a graph that is not saved.
        """
        del compiler_config, compile_range
        if not self._settings.enable:
            return graph, None
        piece = piece_key(graph, example_inputs)
        options = cache_key(self._settings.options(self._batch_sizes))
        made = self._pieces.get((piece, options))
        if made is None:
            made = self._compile(graph, example_inputs)
            if piece is not None:
                self._pieces[piece, options] = made
        if key is not None and (made.handle is None or made.handle[0] == key):
            made.handle = self._save(made.compiled, key)
        return _structured(made.function, _structure(graph)), None if key is None else made.handle

    def _compile(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> _Made:
        torch.npu.set_compile_mode(jit_compile=False)
        compiled: list[CompiledFxGraph] = []
        backend = get_npu_backend(
            compiler_config=self._settings.compiler_config(self._batch_sizes), on_compiled=compiled.append
        )
        made = _Made(backend(_returning_tuple(graph), example_inputs), compiled)
        for one in compiled:
            one.changed = lambda: self._save(compiled, made.handle[0]) if made.handle is not None else None
        return made

    def _save(self, compiled: Sequence[CompiledFxGraph], key: str) -> Handle | None:
        if self._directory is None:
            return None
        text, path = compiled[0].get_code() if len(compiled) == 1 else None, self._directory / key
        try:
            if text is None:
                path.unlink(missing_ok=True)  # perhaps of a graph that was saved until an operator showed what it does
                return None
            write_whole(path, text.encode())
        except OSError as error:
            logger.warning("The compiled graph %s is not saved: %s\n%s", key, error, address_of("SavedGraphError"))
            return None
        return key, str(path)

    def load(
        self,
        handle: Handle,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        graph_index: int = 0,
        compile_range: Any = None,
    ) -> Callable[..., Any]:
        """Make a saved graph callable; a file that is gone or damaged is compiled anew, and saved again.

        Args:
            handle: what `compile` returned, perhaps in another process.
            graph: Dynamo's graph: the form of its results, and the graph itself where it has to be compiled.
            example_inputs: as in `compile`.
            graph_index: unused.
            compile_range: as in `compile`.
        """
        del graph_index
        key, path = handle
        try:
            saved = SavedGraph.read(read_own(Path(path)).decode())
            function = saved.load(
                compile_graph, elsewhere=lambda *inputs: pytree.tree_leaves(graph(*inputs)), unguarded=True
            )
        except (SavedGraphError, OSError, UnicodeDecodeError) as error:
            logger.warning(
                "The saved graph %s is compiled anew: %s\n%s", os.fspath(path), error, address_of("SavedGraphError")
            )
            return self.compile(graph, example_inputs, compile_range=compile_range, key=key)[0]
        return _structured(function, _structure(graph))


def _structure(graph: fx.GraphModule) -> pytree.TreeSpec:
    """How the results of a graph are put together."""
    output = next(iter(graph.graph.find_nodes(op="output")))
    return pytree.tree_structure(_plain(output.args[0]))


def _plain(results: Any) -> Any:
    """The same containers, as the user wrote them: fx keeps lists and dicts of kinds that cannot be changed."""
    if isinstance(results, dict):
        return {key: _plain(value) for key, value in results.items()}
    if isinstance(results, list):
        return [_plain(value) for value in results]
    return tuple(map(_plain, results)) if type(results) is tuple else results


def _returning_tuple(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``graph`` that returns a flat tuple, as AOT wants it."""
    flat = copy.deepcopy(graph)
    output = next(iter(flat.graph.find_nodes(op="output")))
    output.args = (tuple(pytree.tree_leaves(output.args[0])),)
    flat.recompile()
    return flat


def _structured(function: Callable[..., Sequence[Any]], spec: pytree.TreeSpec) -> Callable[..., Any]:
    """``function`` with its flat results put together."""

    def run(*inputs: Any) -> Any:
        return pytree.tree_unflatten(list(function(*inputs)), spec)

    run.serialize = CompiledFxGraph.serialize
    return run
