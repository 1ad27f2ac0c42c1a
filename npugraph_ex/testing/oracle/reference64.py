"""Runs a traced graph on the CPU in float64: the reference that every floating-point result is judged by.

Every floating-point tensor is float64 whatever dtype the graph gives it; integers are exact. npu operators compute
through ``npugraph_ex.operators``. A quantised tensor keeps its value from before rounding, through views and
copies, because the judge needs it.

With ``noise``, the movement of the results shows the size of eager mode's rounding errors (stochastic arithmetic: Vignes,
1993). These are moved:

* each result that eager mode would round to dtype d: multiplied by 1 + u*xi, u the unit roundoff of d and xi uniform in [-1, 1];
* a sum: by roundoffs of float32 of the magnitudes of its terms, because where terms cancel, its error is large beside its result;
* the arguments of other operators that add terms: by a roundoff of float32 (backward stability: Wilkinson, 1963);
* a number that float32 has not, as 0.7: by a roundoff of float32, because a kernel computes with the rounded number.

These are not moved:

* what eager mode computes without rounding anything, where an operator jumps, as a comparison does;
* what it computes so of integers and masks alone: of a mask's ``(1 - mask) * -1e9`` nothing is rounded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.operators import cast_to_float64, on_host_in_float64, record_of
from npugraph_ex.testing.oracle.exactness import ExactElements, jumps, only_selects, rounds_numbers
from npugraph_ex.testing.oracle.formats import FORMATS, Format
from npugraph_ex.testing.oracle.host import HostGraph, ReferenceUnavailableError, copied

FEW_RUNS, MANY_RUNS = 4, 64
"""How often a graph runs with noise: a few runs excuse nearly everything that is right, many the one element in millions."""
_MOVES_DATA = (
    "view", "transpose", "permute", "slice", "select", "expand", "squeeze", "unsqueeze", "clone", "alias", "t",
)  # fmt: skip
_WIDE = torch.float64
_aten = torch.ops.aten
_REINTERPRETS = _aten.view.dtype


@dataclass(frozen=True)
class Exact:
    """What eager mode computes without rounding anything.

    Attributes:
        arguments: by operator that jumps, and argument: which of its elements are exact, and the values.
        results: by operator: which elements of its result are, and are not moved.
    """

    arguments: Mapping[fx.Node, Mapping[fx.Node, tuple[torch.Tensor, torch.Tensor]]]
    results: Mapping[fx.Node, torch.Tensor]


_PRODUCTS = frozenset({
    _aten.mm.default, _aten.bmm.default, _aten.matmul.default, _aten.addmm.default, _aten.baddbmm.default,
})  # fmt: skip
_SELECTS = frozenset({
    "amax", "amin", "aminmax", "max", "min", "cummax", "cummin", "sort", "topk", "kthvalue", "median",
})  # fmt: skip
"""What gives some of its values is as exact as these: the largest one equals one of them."""
_SUMS = frozenset({_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.cumsum.default})
_CANCELLING = frozenset({
    _aten.native_layer_norm.default, _aten.native_group_norm.default, _aten.convolution.default,
    _aten.var.correction, _aten.std.correction, _aten.var_mean.correction, _aten.std_mean.correction,
})  # fmt: skip
"""Other operators that add terms, which may cancel, and whose result is smooth in their arguments."""


@dataclass(frozen=True)
class Reference:
    """What the graph computes.

    Attributes:
        values: the outputs, then the inputs after the call; floating-point ones float64.
        quotients: for each of these, the value before it was quantised, or None.
    """

    values: tuple[Any, ...]
    quotients: tuple[torch.Tensor | None, ...]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu()
        return host.to(_WIDE) if host.dtype.is_floating_point else host
    return value


def only_moves(target: torch._ops.OpOverload) -> bool:
    """Whether an operator rounds nothing, because it only views or copies."""
    moves = target.is_view or target._schema.name.split("::")[1] in _MOVES_DATA
    return moves and target is not _REINTERPRETS


class WideGraph(HostGraph):
    """A graph prepared for running in float64, as often as its judge likes.

    Args:
        gm: a graph of ATen and npu operators, as traced from the original program, with ``meta["val"]``.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, on_host_in_float64)
        self.calls = [
            (node, _reinterpreting(node) or function, *cast_to_float64(node.target, args, kwargs))
            for node, function, args, kwargs in self.calls
        ]
        self._noisy = {node: shapes for node, *_ in self.calls if (shapes := _rounded_results(node)) is not None}
        self._quotients = {node: before for node, *_ in self.calls if (before := _before_rounding(node)) is not None}
        self._rounds_numbers = {node for node, *_ in self.calls if rounds_numbers(node)}
        self._jumps = {node for node, *_ in self.calls if jumps(node)}
        self._widens = any(_widens(node) for node, *_ in self.calls)

    def exact(self, inputs: Sequence[Any], forced: Mapping[str, Any], *, every: bool = False) -> Exact | None:
        """What eager mode computes without rounding anything; None where the graph has no use for it.

        The results are those that come of integers and masks alone; with ``every``, all.
        """
        if not self._jumps and not self._widens and not every:
            return None
        values = self.start(_copies(inputs))
        exact, found = ExactElements(values), {}
        of_integers = ExactElements(dict(filter(_is_integer, values.items())), divides=False)
        with torch.no_grad(), _wide_by_default():
            for node, function, args, kwargs in self.calls:
                if node in self._jumps:
                    found[node] = exact.of(node)
                value = values[node] = self.call(function, args, kwargs, values)
                if node.name in forced:
                    values[node] = _continued(node, value, forced[node.name])
                    exact.take(node, values[node])
                    continue
                moves = isinstance(node.target, torch._ops.OpOverload) and only_moves(node.target)
                moved = partial(self.call, function, args, kwargs) if moves else None
                exact.follow(node, value, moved)
                of_integers.follow(node, value, moved)
                if _is_integer((node, value)):
                    of_integers.take(node, value)
        if not every:
            return Exact(found, of_integers.where())
        selected = {
            node: torch.ones(values[node].shape, dtype=torch.bool) for node in self._noisy if only_selects(node)
        }
        return Exact(found, {**exact.where(), **selected})

    def compute(
        self,
        inputs: Sequence[Any],
        forced: Mapping[str, Any],
        noise: torch.Generator | None = None,
        exact: Exact | None = None,
    ) -> Reference:
        """One run.

        Args:
            inputs: on any device, of the graph's own dtypes; not changed.
            forced: values to continue with in place of what a node computes, by node name.
            noise: where the movement of results comes from; None for the exact run.
            exact: what is not moved.
        """
        arguments = _copies(inputs)
        values = self.start(arguments)
        quotients: dict[fx.Node, torch.Tensor] = {}
        terms: dict[fx.Node, float] = {}
        with torch.no_grad(), _wide_by_default():
            for node, function, args, kwargs in self.calls:
                given = values
                if noise is not None and node.target in _CANCELLING and node.name not in forced:
                    given = {source: _moved(values[source], noise) for source in node.all_input_nodes}
                if exact and node in exact.arguments:
                    given = _unmoved(values, exact.arguments[node])
                if noise is not None and node in self._rounds_numbers:
                    args, kwargs = _with_rounded_numbers((args, kwargs), noise)  # noqa: PLW2901 - for this call alone
                value = values[node] = self.call(function, args, kwargs, given)
                if noise is not None and (count := _terms(node, values, terms)):
                    terms[node] = count
                self._follow_quotient(node, (args, kwargs), values, quotients)
                if node.name in forced:
                    values[node] = _continued(node, value, forced[node.name])
                elif noise is not None and node in self._noisy:
                    if node in terms:
                        magnitudes = {source: _magnitude(values[source]) for source in node.all_input_nodes}
                        size = self.call(function, args, kwargs, magnitudes)
                        value.add_(_accumulation(size, terms[node], noise))
                    _perturb(value, self._noisy[node], noise, exact.results.get(node) if exact else None)
        outputs = self.results(values)
        followed = [quotients.get(leaf) if isinstance(leaf, fx.Node) else None for leaf in self.outputs]
        return Reference(tuple(map(copied, (*outputs, *arguments))), (*followed, *[None] * len(arguments)))

    def _follow_quotient(
        self, node: fx.Node, given: Any, values: Mapping[fx.Node, Any], quotients: dict[fx.Node, torch.Tensor]
    ) -> None:
        """Keep the value before rounding of what ``node`` produced, if it was quantised."""
        if node in self._quotients:
            args, kwargs = fx.map_arg(given, values.__getitem__)
            quotients[node] = self._quotients[node](*args, **kwargs)
            return
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in quotients:
            return
        if node.target is operator.getitem:
            part = quotients[source][node.args[1]]  # type: ignore[index]
            if isinstance(values[node], torch.Tensor) and not values[node].dtype.is_floating_point:
                quotients[node] = part
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.split("::")[1] in _MOVES_DATA:
            args, kwargs = fx.map_arg((given[0][1:], given[1]), values.__getitem__)
            quotients[node] = node.target(quotients[source], *args, **kwargs)


@contextmanager
def _wide_by_default() -> Iterator[None]:
    """Make float64 the default dtype within the block, so that integers are promoted to it."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(_WIDE)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _before_rounding(node: fx.Node) -> Any:
    """The function that computes what ``node`` rounds to integers; None where it does not."""
    record = record_of(node.target)
    return record and record.before_rounding


def _continued(node: fx.Node, value: Any, forced: Any) -> Any:
    """A value given in place of the computed one."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return value.copy_(_widened(forced))  # what it wrote is seen through every alias
    # A copy, because the graph may write it; a symbolic size is a number.
    return pytree.tree_map(lambda leaf: copied(_widened(leaf)), forced)


def _rounded_results(node: fx.Node) -> list[Format | None] | None:
    """The formats that eager mode rounds the results of ``node`` to; None where it rounds nothing."""
    if not isinstance(node.target, torch._ops.OpOverload) or only_moves(node.target) or node.target is _REINTERPRETS:
        return None
    if node.target._schema.name.removeprefix("aten::") in _SELECTS:
        return None
    fakes = pytree.tree_leaves(node.meta.get("val"))
    formats = [FORMATS.get(fake.dtype) if isinstance(fake, torch.Tensor) else None for fake in fakes]
    return formats if any(formats) else None


def _perturb(
    value: Any, formats: Sequence[Format | None], noise: torch.Generator, exact: torch.Tensor | None = None
) -> None:
    """Round each element in some direction, but for those that are exact."""
    for leaf, format_ in zip(pytree.tree_leaves(value), formats, strict=True):
        if format_ is None or leaf.dtype != _WIDE or leaf.numel() == 0:
            continue
        xi = torch.rand(leaf.shape, generator=noise, dtype=_WIDE) * 2 - 1
        if exact is not None:
            xi = xi.masked_fill(exact, 0)
        leaf.add_(leaf * (format_.roundoff * xi) + format_.tiniest * xi / 2)


def _with_rounded_numbers(given: Any, noise: torch.Generator) -> Any:
    """The arguments of an operator, with each number a roundoff of float32 away."""

    def rounded(leaf: Any) -> Any:
        if not isinstance(leaf, float):
            return leaf
        xi = float(torch.rand((), generator=noise, dtype=_WIDE)) * 2 - 1
        return leaf * (1 + FORMATS[torch.float32].roundoff * xi)

    return pytree.tree_map(rounded, given)


def _widens(node: fx.Node) -> bool:
    """Whether an operator makes floating-point numbers of integers or of a mask."""
    return _has_floats(node) and any(not _has_floats(source) for source in node.all_input_nodes)


def _has_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_integer(pair: tuple[fx.Node, Any]) -> bool:
    """Whether the value of a node is a tensor of integers, or a mask."""
    return isinstance(pair[1], torch.Tensor) and not pair[1].is_floating_point()


def _reinterpreting(node: fx.Node) -> Any:
    """What reads the bits of a number in another dtype, which are those of its own dtype; None for other operators."""
    if node.target is not _REINTERPRETS:
        return None
    source, dtype = node.args[0].meta["val"].dtype, node.args[1]  # type: ignore[union-attr]
    return lambda value, _: _widened(value.to(source).view(dtype))


def _magnitude(value: Any) -> Any:
    return value.abs() if isinstance(value, torch.Tensor) and value.dtype == _WIDE else value


def _terms(node: fx.Node, values: Mapping[fx.Node, Any], terms: Mapping[fx.Node, float]) -> float | None:
    """How many terms each element of a sum, of a product of matrices, or of a view of one is the sum of; None for others.

    The terms of a sum of sums are those of all of them, because a replacement may add them one after another.
    """
    if node.target in _PRODUCTS:
        return values[node.args[-2]].shape[-1]  # type: ignore[index, no-any-return]
    if not node.args or not isinstance(source := node.args[0], fx.Node):
        return None
    if node.target in _SUMS:
        given, results = values[source], values[node].numel()
        added = given.numel() / results if results else 0
        if node.target is _aten.cumsum.default:
            added = given.shape[node.args[1]] if given.dim() else 1
        return added * terms.get(source, 1)
    moves = isinstance(node.target, torch._ops.OpOverload) and only_moves(node.target)
    return terms.get(source) if moves else None


def _accumulation(size: torch.Tensor, terms: float, noise: torch.Generator) -> torch.Tensor:
    """How adding terms in float32 moves their sum.

    By a roundoff of the sum of their magnitudes, and for many terms by as many of them as a quarter of the root of
    their number: rounding errors of one sum go their way as a random walk does (Higham and Mary, 2019).

    In half of the runs all elements are moved by the same share, because independent movements of what is added up
    afterwards would average out.

    Args:
        size: the sums of the magnitudes.
        terms: how many were added.
        noise: where the movement comes from.
    """
    together = bool(torch.rand((), generator=noise) < 0.5)
    xi = torch.rand(() if together else size.shape, generator=noise, dtype=_WIDE) * 2 - 1
    roundoffs = max(1.0, math.sqrt(terms) / 4)
    return size.to(_WIDE).abs() * (FORMATS[torch.float32].roundoff * roundoffs * xi)


def _moved(value: Any, noise: torch.Generator) -> Any:
    """An argument that is a roundoff of float32 away."""
    if not isinstance(value, torch.Tensor) or value.dtype != _WIDE:
        return value
    xi = torch.rand(value.shape, generator=noise, dtype=_WIDE) * 2 - 1
    return value + value * (FORMATS[torch.float32].roundoff * xi)


def _unmoved(
    values: Mapping[fx.Node, Any], exact: Mapping[fx.Node, tuple[torch.Tensor, torch.Tensor]]
) -> dict[fx.Node, Any]:
    """The values, of arguments the exact ones where there are such."""
    return {**values, **{node: torch.where(where, value, values[node]) for node, (where, value) in exact.items()}}


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Float64 copies of the inputs, which share memory where the inputs do and have the same strides."""
    bases: dict[int, torch.Tensor] = {}
    copies: list[Any] = []
    for tensor in inputs:
        if not isinstance(tensor, torch.Tensor):
            copies.append(tensor)
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr() or id(tensor)
        if key not in bases:
            elements = storage.nbytes() // tensor.element_size()
            bases[key] = _widened(tensor.as_strided((elements,), (1,), 0)).clone()
        copies.append(bases[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return copies


def run_reference(
    gm: fx.GraphModule | WideGraph, inputs: Sequence[Any], *, forced: Mapping[str, Any] | None = None
) -> Reference:
    """Run a graph in float64.

    Args:
        gm: as for ``WideGraph``, or one.
        inputs: on any device, of the graph's own dtypes; not changed.
        forced: values to continue with in place of what a node computes, by node name: what a candidate quantised to,
            and what was computed before the part that is judged.

    Raises:
        ReferenceUnavailableError: the graph has an operator without a reference, or one that the CPU does not take.
    """
    graph = gm if isinstance(gm, WideGraph) else WideGraph(gm)
    try:
        return graph.compute(inputs, forced or {})
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # eager mode has run
        raise ReferenceUnavailableError(f"the reference does not run on the CPU: {error}") from error


@dataclass(frozen=True)
class Spread:
    """How far roundings move each value and each quotient of a ``Reference``; None for what is not floating point."""

    values: tuple[torch.Tensor | None, ...]
    quotients: tuple[torch.Tensor | None, ...]

    def times(self, factor: float) -> Spread:
        """Everything ``factor`` times as far."""
        values, quotients = (
            tuple(None if moved is None else moved * factor for moved in part) for part in (self.values, self.quotients)
        )
        return Spread(values, quotients)


def run_spread(  # noqa: PLR0913 - keyword arguments but for three
    gm: fx.GraphModule | WideGraph,
    inputs: Sequence[Any],
    reference: Reference,
    *,
    seed: int = 0,
    runs: int = FEW_RUNS,
    forced: Mapping[str, Any] | None = None,
    exactly: bool = False,
) -> Spread:
    """Run a graph ``runs`` times with noise; ``pooled`` combines the differences.

    With ``exactly``, nothing is moved that eager mode does not round. Otherwise only integers and masks are spared: a replacement
    may round where eager mode does not.
    """
    graph = gm if isinstance(gm, WideGraph) else WideGraph(gm)
    generator = torch.Generator().manual_seed(seed)
    exact = graph.exact(inputs, forced or {}, every=exactly)
    noisy = [graph.compute(inputs, forced or {}, generator, exact) for _ in range(runs)]
    return Spread(
        tuple(_spread(base, [run.values[i] for run in noisy]) for i, base in enumerate(reference.values)),
        tuple(_spread(base, [run.quotients[i] for run in noisy]) for i, base in enumerate(reference.quotients)),
    )


def _spread(base: Any, noisy: Sequence[Any]) -> torch.Tensor | None:
    if not isinstance(base, torch.Tensor) or base.dtype != _WIDE or base.numel() == 0:
        return None
    return pooled(base, torch.stack([(value - base).abs().nan_to_num(posinf=0.0) for value in noisy]).amax(0))


def pooled(base: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """The larger of ``moved`` and the usual relative movement in the row.

    A few random runs leave some elements unmoved by luck. Elements of one row went through the same roundings, so the
    row's root mean square of the relative movement is a fair lower bound for each of them.
    """
    relative = torch.where(base != 0, moved / base.abs(), 0.0).nan_to_num(posinf=0.0).clamp(max=1.0)
    usual = relative.square().mean(dim=-1, keepdim=True).sqrt() if base.dim() else relative
    return torch.maximum(moved, usual * base.abs().nan_to_num(posinf=0.0))
