"""FX graphs and their nodes, as torch's own rewriters see them."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx
from torch.fx.graph import CodeGen


def debug_directory() -> Path:
    """Where this process writes under TORCH_COMPILE_DEBUG=1.

    Dynamo and Inductor choose ``torch_compile_debug/run_<time>-pid_<pid>`` once a process; our dumps belong beside
    theirs, and there is no public question for it.
    """
    from torch._dynamo.utils import get_debug_dir

    return Path(get_debug_dir())


def provenance_fields() -> tuple[str, ...]:
    """The ``node.meta`` keys that say where a node came from, which torch's own rewriters carry over."""
    from torch.fx.proxy import _COPY_META_FIELDS

    return ("stack_trace", *_COPY_META_FIELDS)


def is_erased(node: fx.Node) -> bool:
    """Whether ``node`` was erased from its graph by an edit that happened since it was looked up."""
    return bool(node._erased)


def codegen_of(graph: fx.Graph) -> CodeGen:
    """How ``graph`` prints its signature; ``set_codegen`` is public, asking for it is not."""
    return graph._codegen


def lazy_graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose Python code is written when it is first called, not whenever its graph changes."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)
