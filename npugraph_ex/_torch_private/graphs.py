"""FX graphs and their nodes, as torch's own rewriters use them."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen


def debug_directory() -> Path:
    """The folder of this process's files under TORCH_COMPILE_DEBUG=1.

    Dynamo and Inductor choose ``torch_compile_debug/run_<time>-pid_<pid>`` once a process; our dumps belong beside theirs,
    and torch has no public function for the folder.
    """
    from torch._dynamo.utils import get_debug_dir

    return Path(get_debug_dir())


def provenance_fields() -> tuple[str, ...]:
    """The ``node.meta`` keys with the origin of a node, which torch's own rewriters copy."""
    from torch.fx.proxy import _COPY_META_FIELDS

    return ("stack_trace", *_COPY_META_FIELDS)


def is_erased(node: fx.Node) -> bool:
    """Whether a later edit erased ``node`` from its graph."""
    return bool(node._erased)


def codegen_of(graph: fx.Graph) -> CodeGen:
    """The code generator of ``graph``; torch has a public setter and no public getter."""
    return graph._codegen


def lazy_graph_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose Python code is generated at the first call, and not after each change."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)
