"""From a function of device tensors to an ATen graph with fake tensors: no Dynamo, no AOT, no memory on any device.

``make_fx`` would give the same graph, ten times slower; it remains for what ``recording`` does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from npugraph_ex import _torch_private
from npugraph_ex.passes.dead_code import has_effect
from npugraph_ex.testing.inputs import Input, size_of
from npugraph_ex.testing.recording import Functionalizer, Recorder, UnknownViewError


def trace(
    function: Callable[..., Any], inputs: Sequence[Input], sizes: Mapping[str, int], *, dynamic: bool, functional: bool
) -> fx.GraphModule:
    """The ATen graph of ``function``; its nodes carry fake tensors.

    Args:
        function: of as many tensors as there are inputs; it calls operators only.
        inputs: their specification.
        sizes: the values of the symbols in shapes while tracing.
        dynamic: make sizes that are symbols in the specification symbolic in the graph; all others stay numbers.
        functional: replace in-place operators by functional ones and copies into the inputs at the end, as AOT does.
    """
    # A static mode holds no state but a cache of what operators return.
    mode = FakeTensorMode(shape_env=ShapeEnv()) if dynamic else FakeTensorMode()
    fakes = _fakes(mode, inputs, sizes, dynamic=dynamic)
    with _torch_private.fake_execution(mode):
        try:
            graph = (Functionalizer() if functional else Recorder()).record(function, fakes)
        except UnknownViewError:
            return make_fx(torch.func.functionalize(function))(*fakes)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    return _torch_private.lazy_graph_module(torch.nn.Module(), graph)


def _fakes(
    mode: FakeTensorMode, inputs: Sequence[Input], sizes: Mapping[str, int], *, dynamic: bool
) -> list[torch.Tensor]:
    """Fake tensors as ``make_inputs`` makes real ones: the same layouts and aliases."""
    symbols: dict[str, Any] = {}
    device = torch.device("npu", torch.accelerator.current_device_index())
    made: list[torch.Tensor] = []
    with mode:
        for spec in inputs:
            if spec.alias_of is not None:
                base = made[spec.alias_of]
                made.append(base.as_strided(base.shape, base.stride(), base.storage_offset()))
                continue
            shape = [_size(mode, dim, sizes, symbols) if dynamic else size_of(dim, sizes) for dim in spec.shape]
            made.append(_laid_out(spec, shape, device))
    return made


def _size(mode: FakeTensorMode, dim: int | str, sizes: Mapping[str, int], symbols: dict[str, Any]) -> Any:
    """A number, or the symbol that stands for every size of this name; the hint is its value while tracing."""
    if isinstance(dim, int):
        return dim
    if dim not in symbols:
        environment, source, hint = mode.shape_env, ConstantSource(f"size_{dim}"), size_of(dim, sizes)
        assert environment is not None  # noqa: S101 - trace gave it one
        symbol = environment.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        symbols[dim] = environment.create_symintnode(symbol, hint=hint, source=source)
    return symbols[dim]


def _laid_out(spec: Input, shape: list[Any], device: torch.device) -> torch.Tensor:
    dtype, rank = spec.torch_dtype, len(shape)
    if spec.layout == "transposed" and rank >= 2:
        return torch.empty([*shape[:-2], shape[-1], shape[-2]], dtype=dtype, device=device).transpose(-1, -2)
    if spec.layout == "strided" and rank >= 1:
        return torch.empty([*shape[:-1], shape[-1] * 2], dtype=dtype, device=device)[..., ::2]
    if spec.layout == "offset":
        return torch.empty([math.prod(shape) + 1], dtype=dtype, device=device)[1:].view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of a graph: passes edit in place."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, val_map={})
    graph.output(output)
    return _torch_private.lazy_graph_module(gm, graph)
