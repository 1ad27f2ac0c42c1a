"""Inputs on which a subgraph and the operator in its place are compared: ordinary ones, and the ranges where roundings go wrong.

Shapes are those of the graph. Where it has symbols, several sizes stand for each. Of large tensors some of the rows are drawn,
where `fewer_rows.py` has found them to be computed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from npugraph_ex import _torch_private
from npugraph_ex.versions.symbol_values import symbol_values

_SYMBOL_SIZES = (2, 5)
_KINDS = (
    ("ordinary", True), ("negative", True), ("large", False), ("tiny", False), ("subnormal", False), ("special", False),
    ("zero", False), ("masked", False), ("large", True), ("tiny", True), ("special", True),
)  # fmt: skip
"""Each with whether all inputs are of the kind, or masks and the first alone and the others ordinary."""
_FINE = 1e-4
_MANY = 64
_UNIFORM: MutableMapping[torch.Tensor, torch.Tensor | None] = WeakTensorKeyDictionary()
"""Of constants, which nobody writes: each is copied from the device once, however many forms ask."""
_APART = 1000
"""Seeds of one kind lie so far apart that those of two kinds are never the same."""


@dataclass(frozen=True)
class Sizes:
    """Numbers in place of sizes: of symbols, and of inputs of which some rows are drawn."""

    symbols: tuple[tuple[Any, int], ...] = ()
    shapes: Mapping[fx.Node, tuple[int, ...] | None] = field(default_factory=dict)

    def of(self, size: Any) -> Any:
        """The number for one size; -1, as views have it, stays."""
        if isinstance(size, torch.SymInt):
            return int(size.node.expr.xreplace(dict(self.symbols)))
        return size

    def shape(self, node: fx.Node) -> list[int]:
        """The one that is drawn for an input."""
        return list(self.shapes.get(node) or map(self.of, node.meta["val"].shape))


def sizes(inputs: Sequence[fx.Node]) -> Iterator[Sizes]:
    """The sizes to try: the graph's own, or the sizes compiled for and others where they are symbols."""
    symbols: dict[Any, int] = {}
    for number in _numbers(inputs):
        if isinstance(number, torch.SymInt):
            known = symbol_values(number.node.shape_env)
            symbols |= {symbol: int(known.get(symbol, _SYMBOL_SIZES[1])) for symbol in _free(number)}
    ways = [symbols, *({symbol: size + at for at, symbol in enumerate(symbols)} for size in _SYMBOL_SIZES if symbols)]
    yield from (Sizes(tuple(way.items())) for way in ways)


def _free(number: torch.SymInt) -> list[Any]:
    return sorted(number.node.expr.free_symbols, key=str)


def _numbers(inputs: Sequence[fx.Node]) -> Iterator[Any]:
    """All sizes and strides, and the numbers that are inputs themselves."""
    for value in (node.meta["val"] for node in inputs):
        if isinstance(value, torch.Tensor):
            yield from (*value.shape, *value.stride())
        else:
            yield value


@contextmanager
def on_real_values() -> Iterator[None]:
    """Compute on real tensors of the CPU, whatever mode the compilation is in.

    In one thread: the tensors are small, and sums must not depend on the number of cores.
    """
    # A default device costs at each operator, and is the CPU in most programs.
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _torch_private.real_execution(), device, torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


FOLDED = "_lifted_"
"""Before the names of the constants that lifting makes."""


def uniform(node: fx.Node) -> torch.Tensor | None:
    """The only element of a constant that lifting made, on the CPU; None for anything else, such as different elements."""
    if node.op != "get_attr" or not str(node.target).startswith(FOLDED):
        return None
    value: torch.Tensor = getattr(node.graph.owning_module, str(node.target))
    if value not in _UNIFORM:
        with on_real_values():
            elements = value.cpu().flatten()
            _UNIFORM[value] = elements[0] if elements.numel() and bool((elements == elements[0]).all()) else None
    return _UNIFORM[value]


@dataclass(frozen=True)
class InputKind:
    """Inputs of one kind, and the kind in words."""

    name: str
    seed: int
    draw_from: Callable[[int], list[Any]]

    def draw(self, again: int) -> list[Any]:
        """The inputs, on the CPU; ``again`` says how often there were some before."""
        return self.draw_from(self.seed + again * _APART)


def kinds(inputs: Sequence[fx.Node], at: Sizes, *, few: bool, places: Sequence[fx.Node] = ()) -> Iterator[InputKind]:
    """Each kind of inputs.

    Args:
        inputs: what is drawn.
        at: the sizes.
        few: the first and the last kind only.
        places: those whose numbers are different places.
    """
    constants = _constants(inputs)
    for kind, everywhere in _KINDS[:: len(_KINDS) - 1] if few else _KINDS:
        those = [kind if everywhere or not place or _is_mask(node) else "ordinary" for place, node in enumerate(inputs)]
        draw = partial(_drawn_together, inputs, those, at, places=places, constants=constants)
        yield InputKind(f"{kind} {'inputs' if everywhere else 'values in the first input'}", len(kind), draw)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def ordinary(inputs: Sequence[fx.Node], at: Sizes, places: Sequence[fx.Node] = ()) -> Iterator[list[Any]]:
    """Ordinary inputs, many times: a graph's own sizes, with few of its rows, may be one row."""
    constants = _constants(inputs)
    for seed in range(_MANY):
        yield _drawn_together(inputs, ["ordinary"] * len(inputs), at, seed, places=places, constants=constants)


def _constants(inputs: Sequence[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """Those of the inputs that are constants of one element, asked once for all kinds."""
    return {node: known for node in inputs if (known := uniform(node)) is not None}


def _drawn_together(
    inputs: Sequence[fx.Node], kinds: Sequence[str], at: Sizes, seed: int, *, places: Sequence[fx.Node],
    constants: Mapping[fx.Node, torch.Tensor],
) -> list[Any]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    values: dict[fx.Node, Any] = {}  # a node that is two inputs has one value
    for node, kind in zip(inputs, kinds, strict=True):
        value = node.meta["val"]
        if node in constants:
            drawn_alike = constants[node].expand(at.shape(node))
        elif node in places:
            shape = at.shape(node)
            drawn_alike = torch.randperm(math.prod(shape), generator=generator).view(shape).to(value.dtype)
        else:
            drawn_alike = _drawn(node, kind, at, generator)
        values.setdefault(node, drawn_alike)
    return [values[node] for node in inputs]


def _drawn(node: fx.Node, kind: str, at: Sizes, generator: torch.Generator) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return at.of(value) if isinstance(value, torch.SymInt) else value
    shape = at.shape(node)
    if value.dtype == torch.bool:  # true may hide or keep: one of the two kinds hides all
        return torch.rand(shape, generator=generator) < {"zero": 0.0, "masked": 1.0}.get(kind, 0.25)
    if value.dtype == torch.int8:  # of quantised numbers the largest tell most
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    if not value.is_floating_point():
        return torch.randint(0, 3, shape, generator=generator).to(value.dtype)
    dense = _FLOATS[kind](torch.randn(shape, generator=generator, dtype=torch.float64), torch.finfo(value.dtype))
    return _laid_out(dense.to(value.dtype), value)


def _special(values: torch.Tensor, limits: torch.finfo) -> torch.Tensor:
    """One value in 24 is none of the ordinary ones, and not every row has one."""
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, limits.max, limits.tiny], dtype=values.dtype)
    places = values.view(-1)[::24]
    places.copy_(odd.repeat(len(places) // len(odd) + 1)[: len(places)])
    return values


_FLOATS: dict[str, Callable[[torch.Tensor, torch.finfo], torch.Tensor]] = {
    "ordinary": lambda values, _: values,
    "negative": lambda values, _: -values.abs(),
    "large": lambda values, limits: (values * (limits.max / 8)).clamp(-limits.max, limits.max),
    "tiny": lambda values, _: values * _FINE,
    "subnormal": lambda values, limits: values * limits.tiny / 2,
    "special": _special,
    "zero": lambda values, _: values * 0.0,
    "masked": lambda values, _: torch.full_like(values, -torch.inf),
}


def _laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The values in the memory order of ``like``, without its gaps."""
    order = sorted(range(values.dim()), key=lambda dim: -_hint(like.stride(dim)))
    if order == [*range(values.dim())]:
        return values
    return values.permute(order).contiguous().permute([order.index(dim) for dim in range(values.dim())])


def _hint(number: Any) -> int:
    return number if isinstance(number, int) else int(number.node.hint or 1)
