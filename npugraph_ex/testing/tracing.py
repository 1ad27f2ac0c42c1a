"""From a function of device tensors to an ATen graph, without Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from npugraph_ex.testing.inputs import Input, make_inputs


def trace(
    function: Callable[..., Any], inputs: Sequence[Input], sizes: Mapping[str, int], *, dynamic: bool, functional: bool
) -> fx.GraphModule:
    """The ATen graph of ``function``; its nodes carry fake tensors.

    Args:
        function: of as many tensors as there are inputs.
        inputs: their specification.
        sizes: the values of the symbols in shapes while tracing.
        dynamic: make sizes that are symbols in the specification symbolic in the graph; all others stay numbers.
        functional: replace in-place operators by functional ones and copies into the inputs at the end, as AOT does.
    """
    examples = make_inputs(inputs, sizes=sizes, call=0)
    mode = FakeTensorMode(shape_env=ShapeEnv()) if dynamic else FakeTensorMode()
    fakes = [_fake(mode, tensor, spec, dynamic=dynamic) for tensor, spec in zip(examples, inputs, strict=True)]
    traced = torch.func.functionalize(function) if functional else function
    with torch.no_grad():
        return make_fx(traced, tracing_mode="fake")(*fakes)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, spec: Input, *, dynamic: bool) -> torch.Tensor:
    if not dynamic:
        return mode.from_tensor(tensor)
    sizes = [DimDynamic.DUCK if isinstance(dim, str) else DimDynamic.STATIC for dim in spec.shape]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of a graph: passes edit in place."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, val_map={})
    graph.output(output)
    return fx.GraphModule(gm, graph)
