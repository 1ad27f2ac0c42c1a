"""`explain(model, *inputs)`: compile, call, and report what happened. `npugraph-ex explain` does the same for a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph.compiled_graph import peak_bytes, pool_bytes
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.errors import NpuGraphExError
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.observe.explain import Explanation, collect
from npugraph_ex.report.captures import captures_so_far
from npugraph_ex.report.graphs import graphs_so_far, loaded_so_far, refused_findings, refused_so_far


class Watch:
    """All compilations since this object was made, or since the process started. It may be read repeatedly."""

    def __init__(self, *, from_start: bool = False) -> None:
        self._graphs, self._captures = (0, 0) if from_start else (graphs_so_far(), captures_so_far())
        self._refused = 0 if from_start else refused_so_far()
        self._loaded = 0 if from_start else loaded_so_far()
        self._breaks = Counter[str]() if from_start else _torch_private.graph_breaks()

    def explanation(self, function: str = "") -> Explanation:
        """What happened so far: to ``function`` alone, if it has a name."""
        return collect(
            graphs_after=self._graphs,
            captures_after=self._captures,
            pools=pool_bytes(),
            breaks=tuple(_torch_private.graph_breaks() - self._breaks),
            peak=peak_bytes(),
            function=function,
            refused=refused_findings(after=self._refused),
            loaded=loaded_so_far() - self._loaded,
        )


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    calls: int = 2,
    **named_inputs: Any,
) -> Explanation:
    """Compile a model with this backend, call it, and report the result.

    The inputs are cloned for each call, so the caller's tensors do not change. The model itself is called, so its buffers may
    change.

    Args:
        model: a module or function, before ``torch.compile``.
        inputs: its positional inputs, on the device.
        options: as in ``torch.compile(options=...)``.
        dynamic: as in ``torch.compile(dynamic=...)``.
        calls: how often to call it, at least once; the second call shows what a later call captures again.
        named_inputs: its keyword inputs.

    Returns:
        The explanation. Print it, or read its fields.

    Raises:
        NpuGraphExError: the model is not callable or compiled already, an option is wrong, or ``calls`` is no count.
    """
    if not callable(model):
        raise NpuGraphExError(f"explain takes a module or function, and then its inputs; got {model!r} for the model")
    if _torch_private.is_compiled(model):
        raise NpuGraphExError(
            "explain compiles the model itself and would not see the options that this one is compiled with; give it the model "
            "before torch.compile, and the options as explain(..., options={...})"
        )
    if type(calls) is not int or calls < 1:
        raise NpuGraphExError(f"explain(calls=...) takes an int >= 1, got {calls!r}")
    config = CompilerConfig()
    apply_flat(config, {} if options is None else options)
    watch = Watch()
    compiled = torch.compile(model, backend=get_npu_backend(compiler_config=config), dynamic=dynamic)
    with torch.no_grad():
        for _ in range(calls):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _copy, (inputs, named_inputs))
            compiled(*args, **kwargs)
    return watch.explanation(getattr(model, "__qualname__", type(model).__qualname__))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor with the same layout; a parameter itself, because its address matters."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)
