"""Runs a traced graph on the CPU in float64: the reference that every floating-point result is judged by.

Every floating-point tensor is float64 whatever dtype the graph gives it; integers are exact. npu operators compute
through ``npugraph_ex.operators``. A quantised tensor keeps its value from before rounding, through views and
copies, because the judge needs it.
"""

from __future__ import annotations

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
from npugraph_ex.testing.oracle.exactness import (
    MOVES_DATA,
    REINTERPRETS,
    ExactElements,
    jumps,
    only_moves,
    only_selects,
    rounds_numbers,
)
from npugraph_ex.testing.oracle.host import HostGraph, ReferenceUnavailableError, copied
from npugraph_ex.testing.oracle.rounding_noise import Noise, adds_that_cancel, magnitude, rounded_results, terms_added

_WIDE = torch.float64


@dataclass(frozen=True)
class Exact:
    """What eager mode computes without rounding anything.

    Attributes:
        arguments: by operator that jumps, and argument: which of its elements are exact, and the values.
        results: by operator: which elements of its result are, and are not moved.
    """

    arguments: Mapping[fx.Node, Mapping[fx.Node, tuple[torch.Tensor, torch.Tensor]]]
    results: Mapping[fx.Node, torch.Tensor]


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
        self._noisy = {node: shapes for node, *_ in self.calls if (shapes := rounded_results(node)) is not None}
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
        noise: Noise | None = None,
        exact: Exact | None = None,
    ) -> Reference:
        """One run.

        Args:
            inputs: on any device, of the graph's own dtypes; not changed.
            forced: values to continue with in place of what a node computes, by node name.
            noise: moves the results; None for the exact run.
            exact: what is not moved.
        """
        arguments = _copies(inputs)
        values = self.start(arguments)
        quotients: dict[fx.Node, torch.Tensor] = {}
        terms: dict[fx.Node, float] = {}
        with torch.no_grad(), _wide_by_default():
            for node, function, args, kwargs in self.calls:
                given = values
                if noise is not None and adds_that_cancel(node) and node.name not in forced:
                    given = {source: noise.argument(values[source]) for source in node.all_input_nodes}
                if exact and node in exact.arguments:
                    given = _unmoved(values, exact.arguments[node])
                if noise is not None and node in self._rounds_numbers:
                    args, kwargs = noise.numbers((args, kwargs))  # noqa: PLW2901 - for this call alone
                value = values[node] = self.call(function, args, kwargs, given)
                if noise is not None and (count := terms_added(node, values, terms)):
                    terms[node] = count
                self._follow_quotient(node, (args, kwargs), values, quotients)
                if node.name in forced:
                    values[node] = _continued(node, value, forced[node.name])
                elif noise is not None and node in self._noisy:
                    if node in terms:
                        magnitudes = {source: magnitude(values[source]) for source in node.all_input_nodes}
                        size = self.call(function, args, kwargs, magnitudes)
                        value.add_(noise.accumulation(size, terms[node]))
                    noise.round(value, self._noisy[node], exact.results.get(node) if exact else None)
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
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.split("::")[1] in MOVES_DATA:
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
    if node.target is not REINTERPRETS:
        return None
    source, dtype = node.args[0].meta["val"].dtype, node.args[1]  # type: ignore[union-attr]
    return lambda value, _: _widened(value.to(source).view(dtype))


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
