"""From a function of device tensors to an ATen graph with fake tensors: no Dynamo, no AOT, no memory on any device.

``make_fx`` would give the same graph, ten times slower; it remains for what ``recording`` does not know.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from npugraph_ex import _torch_private
from npugraph_ex.graph.effects import has_effect
from npugraph_ex.testing.inputs import Input, size_of
from npugraph_ex.testing.lifting import Lifting, Numbers, primes, run_liftable
from npugraph_ex.testing.pointwise import run_pointwise
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
    if not dynamic:
        return _traced(_without_symbols(), function, inputs, sizes, functional=functional)
    hints = _hints(sizes)
    if hints is not sizes:
        with contextlib.suppress(Exception):  # then its numbers are no products of symbols, or it takes no large sizes
            return _lifted(_ground(hints), function, inputs, sizes, functional=functional)
        # What is learnt from hints that are not the program's sizes, or refused for them, need not hold for it.
        shared = _ground(hints)
        with contextlib.suppress(Exception):
            graph = _traced(shared, function, inputs, sizes, functional=functional)
            if shared.is_innocent():
                return graph
    return _traced(_ground(sizes), function, inputs, sizes, functional=functional)


def _lifted(
    ground: _Ground,
    function: Callable[..., Any],
    inputs: Sequence[Input],
    sizes: Mapping[str, int],
    *,
    functional: bool,
) -> fx.GraphModule:
    """Traced with primes for sizes, which takes a third of the time, and then lifted to the symbols of ``ground``."""
    symbols = frozenset(dim for spec in inputs for dim in spec.shape if isinstance(dim, str))
    numbers = _without_symbols()
    fakes = _fakes(numbers, inputs, {**sizes, **primes(symbols)})
    with _torch_private.fake_execution(numbers.mode, symbolic=False):
        graph = _recorded(partial(run_liftable, numbers.run), function, fakes, functional=functional)
    new = _fakes(ground, inputs, sizes)
    ground.begun()
    Lifting(ground.mode, ground.numbers(symbols)).lift(graph.graph, new)
    return graph


def _traced(
    ground: _Ground,
    function: Callable[..., Any],
    inputs: Sequence[Input],
    sizes: Mapping[str, int],
    *,
    functional: bool,
) -> fx.GraphModule:
    fakes = _fakes(ground, inputs, sizes)
    ground.begun()
    with _torch_private.fake_execution(ground.mode, symbolic=ground.environment is not None):
        try:
            return _recorded(ground.run, function, fakes, functional=functional)
        except UnknownViewError:
            return make_fx(torch.func.functionalize(function))(*fakes)


def _recorded(
    run: Callable[..., Any], function: Callable[..., Any], fakes: Sequence[torch.Tensor], *, functional: bool
) -> fx.GraphModule:
    graph = (Functionalizer if functional else Recorder)(run).record(function, fakes)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    return _torch_private.lazy_graph_module(torch.nn.Module(), graph)


class _Ground:
    """A fake mode with symbols, for every program that has these.

    Products of its symbols are made once, which is most of what a lifted program needs. An environment that has learnt more
    of its symbols than that they are sizes is not used again: what holds for one program need not hold for another.

    Args:
        hints: what each symbol is while tracing; None where sizes are numbers.
    """

    def __init__(self, hints: Mapping[str, int] | None) -> None:
        self.environment = None if hints is None else ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment)
        self.symbols: dict[str, Any] = {}
        self._numbers: dict[frozenset[str], Numbers] = {}
        self._hints = hints or {}
        self._known: object = None

    def begun(self) -> None:
        """The symbols are made; whatever is known beyond this point was learnt."""
        self._known = self._knowledge()

    def is_innocent(self) -> bool:
        """Whether nothing was learnt."""
        return self._known == self._knowledge()

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns for fake tensors."""
        run = partial(_torch_private.run_meta_kernel, self.mode, func, args, kwargs)
        return run() if self.environment is not None else run_pointwise(self.mode, func, args, kwargs, run)

    def size(self, dim: int | str, sizes: Mapping[str, int]) -> Any:
        """A number, or the symbol that stands for every size of this name."""
        environment = self.environment
        if isinstance(dim, int) or environment is None:
            return size_of(dim, sizes)
        if dim not in self.symbols:
            source, hint = ConstantSource(f"size_{dim}"), size_of(dim, self._hints)
            symbol = environment.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            self.symbols[dim] = environment.create_symintnode(symbol, hint=hint, source=source)
        return self.symbols[dim]

    def numbers(self, names: frozenset[str]) -> Numbers:
        """What numbers stand for that were computed with ``primes(names)``."""
        if names not in self._numbers:
            self._numbers[names] = Numbers({prime: self.symbols[name] for name, prime in primes(names).items()})
        return self._numbers[names]

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


_grounds: dict[tuple[tuple[str, int], ...], _Ground] = {}
_MOST_GROUNDS = 64
_HINTS = (3, 5, 7, 11)


def _hints(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Hints that all programs with as many symbols share; ``sizes`` themselves where 0 or 1 says more than a hint."""
    if len(sizes) > len(_HINTS) or any(size in (0, 1) for size in sizes.values()):
        return sizes
    return dict(zip(sorted(sizes), _HINTS, strict=False))


@cache
def _without_symbols() -> _Ground:
    """The ground of every program whose sizes are numbers."""
    return _Ground(None)


def _ground(hints: Mapping[str, int]) -> _Ground:
    """The ground of programs whose symbols have these hints."""
    key = tuple(sorted(hints.items()))
    found = _grounds.get(key)
    if found is None or not found.is_innocent():
        if len(_grounds) >= _MOST_GROUNDS:
            _grounds.clear()
        found = _grounds[key] = _Ground(hints)
    return found


def _fakes(ground: _Ground, inputs: Sequence[Input], sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """Fake tensors as ``make_inputs`` makes real ones: the same layouts and aliases."""
    device = torch.device("npu", torch.accelerator.current_device_index())
    made: list[torch.Tensor] = []
    for spec in inputs:
        if spec.alias_of is not None:
            base = made[spec.alias_of]
            made.append(base.as_strided(base.shape, base.stride(), base.storage_offset()))
            continue
        made.append(_laid_out(spec, [ground.size(dim, sizes) for dim in spec.shape]))
    return [_torch_private.fake_of_meta(ground.mode, tensor, device) for tensor in made]


def _laid_out(spec: Input, shape: list[Any]) -> torch.Tensor:
    """A tensor of the meta device, made by the few operators whose kernels know symbolic sizes outside a fake mode."""
    make, rank = partial(torch.empty, dtype=spec.torch_dtype, device="meta"), len(shape)
    if spec.layout == "transposed" and rank >= 2:
        return make([*shape[:-2], shape[-1], shape[-2]]).transpose(-1, -2)
    if spec.layout == "strided" and rank >= 1:
        wide = make([*shape[:-1], shape[-1] * 2])
        return wide.as_strided(shape, [*wide.stride()[:-1], 2])
    if spec.layout == "offset":
        dense = [math.prod(shape[dim + 1 :]) for dim in range(rank)]
        return make([math.prod(shape) + 1]).as_strided(shape, dense, 1)
    return make(shape)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of a graph: passes edit in place."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, val_map={})
    graph.output(output)
    return _torch_private.lazy_graph_module(gm, graph)
