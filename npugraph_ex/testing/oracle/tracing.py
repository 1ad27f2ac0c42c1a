"""Traces a function of device tensors to the ATen graph of ``make_fx``, with fake tensors: no Dynamo, no device memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex import _torch_private
from npugraph_ex.fusion import dispatch_tracer
from npugraph_ex.graph.effects import has_effect
from npugraph_ex.testing.generator.inputs import BEFORE, BEHIND, Dim, Input, alias_of, size_of, sizes_in_memory
from npugraph_ex.tracing_repairs.as_aot import as_aot_traces


def trace(
    function: Callable[..., Any], inputs: Sequence[Input], sizes: Mapping[str, int], *, dynamic: bool, functional: bool
) -> fx.GraphModule:
    """The ATen graph of ``function``; its nodes carry fake tensors.

    Args:
        function: of as many tensors as there are inputs; it calls operators only.
        inputs: their specification.
        sizes: the values of the symbols in shapes while tracing.
        dynamic: make sizes that are symbols in the specification symbolic in the graph; all others stay numbers.
        functional: replace in-place operators by functional ones and copies into the inputs at the end, as AOT does. Two
            inputs that share memory are treated as if they did not.
    """
    with as_aot_traces():
        return _aten(function, inputs, sizes, dynamic=dynamic, functional=functional)


def _aten(
    function: Callable[..., Any], inputs: Sequence[Input], sizes: Mapping[str, int], *, dynamic: bool, functional: bool
) -> fx.GraphModule:
    try:
        graph, symbols = _traced(partial(dispatch_tracer.recorded, function), inputs, sizes, dynamic=dynamic)
        general = all(symbol.node.expr.free_symbols for symbol in symbols)
    except Exception:  # noqa: BLE001 - it writes, or make_fx raises the error again
        general = False
    if not general:  # an operator that reads a size as a number leaves the number in what was recorded
        whole = torch.func.functionalize(function) if functional else function
        graph, _ = _traced(lambda fakes: make_fx(whole)(*fakes).graph, inputs, sizes, dynamic=dynamic)
        _read_sizes_of_inputs(graph)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    return _torch_private.lazy_graph_module(torch.nn.Module(), graph)


def _traced(
    tracer: Callable[[list[torch.Tensor]], fx.Graph],
    inputs: Sequence[Input],
    sizes: Mapping[str, int],
    *,
    dynamic: bool,
) -> tuple[fx.Graph, list[Any]]:
    """The graph that ``tracer`` makes of fake inputs, and the symbols of their sizes."""
    mode, symbols = _symbols(inputs, sizes) if dynamic else (FakeTensorMode(), {})
    with _torch_private.fake_execution(mode, symbolic=dynamic):
        fakes = _fakes(inputs, lambda dim: symbols[dim] if dim in symbols else size_of(dim, sizes))
        return tracer(fakes), [*symbols.values()]


def _read_sizes_of_inputs(graph: fx.Graph) -> None:
    """Read each symbol from an input. Read from a value on the way, as make_fx has it, it would be a user of that value."""
    inputs = graph.find_nodes(op="placeholder")
    sources = {
        _torch_private.expression_of(size): (node, dim)
        for node in reversed(inputs)
        for dim, size in enumerate(node.meta["val"].shape)
        if isinstance(size, torch.SymInt)
    }
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        source = sources.get(_torch_private.expression_of(node.meta["val"]))
        node.args = node.args if source is None else source


def _symbols(inputs: Sequence[Input], sizes: Mapping[str, int]) -> tuple[FakeTensorMode, dict[Dim, Any]]:
    """A fake mode with a symbol for each symbolic size of the inputs."""
    hints = {dim: size_of(dim, sizes) for spec in inputs for dim in spec.shape if isinstance(dim, str)}
    mode, symbols = _torch_private.new_symbols(hints)
    mode.cache_enabled = False  # no other program has these symbols; to fill the cache takes a third of the time
    return mode, {dim: _torch_private.symbolic_size(mode, symbols[dim], hint) for dim, hint in hints.items()}


def _fakes(inputs: Sequence[Input], size: Callable[[Dim], Any]) -> list[torch.Tensor]:
    """Fake tensors as ``make_inputs`` makes real ones: the same layouts and aliases. Call it under their fake mode."""
    made: list[torch.Tensor] = []
    for spec in inputs:
        if spec.alias_of is not None:
            made.append(alias_of(made[spec.alias_of]))
        else:
            made.append(_laid_out(spec, list(map(size, spec.shape))))
    return made


def _laid_out(spec: Input, shape: list[Any]) -> torch.Tensor:
    device, dtype, rank = torch.device("npu", torch.accelerator.current_device_index()), spec.torch_dtype, len(shape)
    if spec.layout == "transposed" and rank >= 2:
        return torch.empty([*shape[:-2], shape[-1], shape[-2]], dtype=dtype, device=device).transpose(-1, -2)
    if spec.layout == "strided" and rank >= 1:
        return torch.empty([*shape[:-1], shape[-1] * 2], dtype=dtype, device=device)[..., ::2]
    if spec.layout == "offset":
        return torch.empty([math.prod(shape) + 1], dtype=dtype, device=device)[1:].view(shape)
    if spec.layout == "inside":
        size = BEFORE + math.prod(shape) + BEHIND
        return torch.empty([size], dtype=dtype, device=device)[BEFORE:-BEHIND].view(shape)
    if spec.is_expanded:
        return torch.empty(sizes_in_memory(shape, spec.layout), dtype=dtype, device=device).expand(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of a graph: passes edit in place."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, val_map={})
    graph.output(output)
    return _torch_private.lazy_graph_module(gm, graph)
