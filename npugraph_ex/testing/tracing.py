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
    ground = _ground(sizes if dynamic else None)
    fakes = _fakes(ground, inputs, sizes, dynamic=dynamic)
    ground.begun()
    with _torch_private.fake_execution(ground.mode):
        try:
            graph = (Functionalizer() if functional else Recorder()).record(function, fakes)
        except UnknownViewError:
            return make_fx(torch.func.functionalize(function))(*fakes)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    return _torch_private.lazy_graph_module(torch.nn.Module(), graph)


class _Ground:
    """A fake mode with the symbols of one set of sizes, for every program that has them.

    What operators return is remembered by the mode, or by its environment of symbols, which makes tracing several times
    faster for the next program. An environment that has learnt more of its symbols than that they are sizes is not used
    again: what holds for one program need not hold for another.
    """

    def __init__(self, *, dynamic: bool) -> None:
        self.environment = ShapeEnv() if dynamic else None
        self.mode = FakeTensorMode(shape_env=self.environment)
        self.symbols: dict[str, Any] = {}
        self._known: object = None

    def begun(self) -> None:
        """The symbols are made; whatever is known beyond this point was learnt."""
        self._known = self._knowledge()

    def is_innocent(self) -> bool:
        """Whether nothing was learnt."""
        return self._known == self._knowledge()

    def size(self, dim: int | str, sizes: Mapping[str, int]) -> Any:
        """A number, or the symbol that stands for every size of this name; the hint is its value while tracing."""
        if isinstance(dim, int):
            return dim
        if dim not in self.symbols:
            environment, source, hint = self.environment, ConstantSource(f"size_{dim}"), size_of(dim, sizes)
            assert environment is not None  # noqa: S101 - sizes are symbols only where there is one
            symbol = environment.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            self.symbols[dim] = environment.create_symintnode(symbol, hint=hint, source=source)
        return self.symbols[dim]

    def _knowledge(self) -> object:
        known = self.environment
        if known is None:
            return None
        return (
            len(known.guards),
            dict(known.replacements),
            dict(known.var_to_range),
            sum(map(len, known.deferred_runtime_asserts.values())),
        )


_grounds: dict[tuple[tuple[str, int], ...] | None, _Ground] = {}
_MOST_GROUNDS = 64


def _ground(sizes: Mapping[str, int] | None) -> _Ground:
    """The ground for programs of these sizes; for those without symbols when None."""
    key = None if sizes is None else tuple(sorted(sizes.items()))
    found = _grounds.get(key)
    if found is None or not found.is_innocent():
        if len(_grounds) >= _MOST_GROUNDS:
            _grounds.clear()
        found = _grounds[key] = _Ground(dynamic=sizes is not None)
    return found


def _fakes(ground: _Ground, inputs: Sequence[Input], sizes: Mapping[str, int], *, dynamic: bool) -> list[torch.Tensor]:
    """Fake tensors as ``make_inputs`` makes real ones: the same layouts and aliases."""
    device = torch.device("npu", torch.accelerator.current_device_index())
    made: list[torch.Tensor] = []
    with ground.mode:
        for spec in inputs:
            if spec.alias_of is not None:
                base = made[spec.alias_of]
                made.append(base.as_strided(base.shape, base.stride(), base.storage_offset()))
                continue
            shape = [ground.size(dim, sizes) if dynamic else size_of(dim, sizes) for dim in spec.shape]
            made.append(_laid_out(spec, shape, device))
    return made


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
