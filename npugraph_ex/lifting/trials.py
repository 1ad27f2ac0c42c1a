"""Inputs on which a subgraph and the operator in its place are compared: ordinary ones, and the ranges where roundings go wrong.

Shapes are those of the graph. Where it has symbols, several sizes stand for each. Very large tensors are cut: sizes that the
proposal does not name become small ones, each its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.versions.symbol_values import symbol_values

_MOST_ELEMENTS = 1 << 15
_SMALLEST_CUT = 3
_SYMBOL_SIZES = (2, 5)
_KINDS = (
    ("ordinary", True), ("negative", True), ("large", False), ("tiny", False), ("subnormal", False), ("special", False),
    ("zero", False), ("masked", False), ("large", True), ("tiny", True), ("special", True),
)  # fmt: skip
"""Each with whether all inputs are of the kind, or masks and the first alone and the others ordinary."""
_FINE = 1e-4
_MANY = 64


@dataclass(frozen=True)
class Sizes:
    """Numbers in place of sizes; ``symbols`` and ``cut`` are what stands for what."""

    symbols: tuple[tuple[Any, int], ...] = ()
    cut: tuple[tuple[int, int], ...] = ()

    def of(self, size: Any) -> Any:
        """The number for one size; -1, as views have it, stays."""
        if isinstance(size, torch.SymInt):
            size = int(size.node.expr.xreplace(dict(self.symbols)))
        return dict(self.cut).get(size, size)


def sizes(inputs: Sequence[fx.Node], kept: Sequence[Any]) -> Iterator[Sizes]:
    """The sizes to try: the graph's own, or the sizes compiled for and others where they are symbols."""
    symbols: dict[Any, int] = {}
    for number in _numbers(inputs):
        if isinstance(number, torch.SymInt):
            known = symbol_values(number.node.shape_env)
            symbols |= {symbol: int(known.get(symbol, _SYMBOL_SIZES[1])) for symbol in _free(number)}
    ways = [symbols, *({symbol: size + at for at, symbol in enumerate(symbols)} for size in _SYMBOL_SIZES if symbols)]
    for way in ways:
        own = Sizes(tuple(way.items()))
        yield Sizes(own.symbols, _cut(inputs, own, {own.of(size) for size in kept}))


def _free(number: torch.SymInt) -> list[Any]:
    return sorted(number.node.expr.free_symbols, key=str)


def _numbers(inputs: Sequence[fx.Node]) -> Iterator[Any]:
    """All sizes and strides, and the numbers that are inputs themselves."""
    for value in (node.meta["val"] for node in inputs):
        if isinstance(value, torch.Tensor):
            yield from (*value.shape, *value.stride())
        else:
            yield value


def _cut(inputs: Sequence[fx.Node], own: Sizes, kept: set[int]) -> tuple[tuple[int, int], ...]:
    shapes = [
        [own.of(size) for size in node.meta["val"].shape]
        for node in inputs
        if isinstance(node.meta["val"], torch.Tensor)
    ]
    if max((torch.Size(shape).numel() for shape in shapes), default=0) <= _MOST_ELEMENTS:
        return ()
    large = sorted({size for shape in shapes for size in shape if size > _SMALLEST_CUT and size not in kept})
    return tuple((size, min(size, _SMALLEST_CUT + at)) for at, size in enumerate(large))


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
    with on_real_values():
        elements = value.cpu().flatten()
        return elements[0] if elements.numel() and bool((elements == elements[0]).all()) else None


def drawn(
    inputs: Sequence[fx.Node], at: Sizes, *, few: bool, places: Sequence[fx.Node] = ()
) -> Iterator[tuple[str, list[Any]]]:
    """Inputs of each kind, in words too, on the CPU.

    Args:
        inputs: what is drawn.
        at: the sizes.
        few: the first and the last kind only.
        places: those whose numbers are different places.
    """
    constants = _constants(inputs)
    for kind, everywhere in _KINDS[:: len(_KINDS) - 1] if few else _KINDS:
        kinds = [kind if everywhere or not place or _is_mask(node) else "ordinary" for place, node in enumerate(inputs)]
        said = f"{kind} {'inputs' if everywhere else 'values in the first input'}"
        yield said, _drawn_together(inputs, kinds, at, len(kind), places, constants)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def ordinary(inputs: Sequence[fx.Node], at: Sizes, places: Sequence[fx.Node] = ()) -> Iterator[list[Any]]:
    """Ordinary inputs, many times: a graph's own sizes, cut as they are, may be one row."""
    constants = _constants(inputs)
    for seed in range(_MANY):
        yield _drawn_together(inputs, ["ordinary"] * len(inputs), at, seed, places, constants)


def _constants(inputs: Sequence[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """Those of the inputs that are constants of one element, asked once for all kinds."""
    return {node: known for node in inputs if (known := uniform(node)) is not None}


def _drawn_together(
    inputs: Sequence[fx.Node], kinds: Sequence[str], at: Sizes, seed: int, places: Sequence[fx.Node],
    constants: Mapping[fx.Node, torch.Tensor],
) -> list[Any]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    values: dict[fx.Node, Any] = {}  # a node that is two inputs has one value
    for node, kind in zip(inputs, kinds, strict=True):
        value = node.meta["val"]
        if node in constants:
            drawn_alike = constants[node].expand([at.of(size) for size in value.shape])
        elif node in places:
            shape = [at.of(size) for size in value.shape]
            drawn_alike = torch.randperm(math.prod(shape), generator=generator).view(shape).to(value.dtype)
        else:
            drawn_alike = _drawn(value, kind, at, generator)
        values.setdefault(node, drawn_alike)
    return [values[node] for node in inputs]


def _drawn(value: Any, kind: str, at: Sizes, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return at.of(value) if isinstance(value, torch.SymInt) else value
    shape = [at.of(size) for size in value.shape]
    if value.dtype == torch.bool:  # true may hide or keep: one of the two kinds hides all
        return torch.rand(shape, generator=generator) < {"zero": 0.0, "masked": 1.0}.get(kind, 0.25)
    if value.dtype == torch.int8:  # of quantised numbers the largest tell most
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    if not value.is_floating_point():
        return torch.randint(0, 3, shape, generator=generator).to(value.dtype)
    dense = _FLOATS[kind](torch.randn(shape, generator=generator, dtype=torch.float64), torch.finfo(value.dtype))
    return _laid_out(dense.to(value.dtype), value)


def _special(values: torch.Tensor, limits: torch.finfo) -> torch.Tensor:
    """One value in eight is none of the ordinary ones, and not every row has one."""
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, limits.max, limits.tiny], dtype=values.dtype)
    flat = values.flatten()
    places = torch.arange(0, len(flat), 8)
    flat[places[::3]] = odd.repeat(len(places) // len(odd) + 1)[: len(places[::3])]
    return flat.view(values.shape)


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
