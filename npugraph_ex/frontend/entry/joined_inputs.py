"""Joined weights as inputs of a compiled graph, which are made from the parameters of a call and kept as long as these live.

A graph may run with the weights of one layer, then with those of another, and weights may change. So each call compares the
parameters' identities, addresses and versions. What changes without a new version, as by ``parameter.data.copy_()``, is not seen:
the option `join_projections` says so. `join_again` is for programs that change weights so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from npugraph_ex.aclgraph.compiled_graph import when_invalidated
from npugraph_ex.frontend.upstream_repairs.version_counters import count_writes
from npugraph_ex.lifting.distances import same_bits
from npugraph_ex.lifting.joined_weights import PARTS, PREFIX, JoinedParts

_VERSION = attrgetter("_version")


@dataclass(frozen=True)
class _Kept:
    """Joined weights, and what their parameters were when they were joined."""

    state: tuple[Any, ...]
    weights: list[torch.Tensor]
    alive: list[weakref.ref[Any]]


class JoinedInputs:
    """The joined weights of one graph.

    Args:
        gm: the graph after all passes; its constants of joined weights become its last inputs.

    Attributes:
        parts: which inputs each of them is made of.
        examples: their values at the compilation, without contents.
        unsaved: why the graph cannot be saved; empty if it can.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        constants = [node for node in gm.graph.find_nodes(op="get_attr") if str(node.target).startswith(PREFIX)]
        self.parts: list[JoinedParts] = [node.meta[PARTS] for node in constants]
        self.examples = [node.meta["val"] for node in constants]
        self.unsaved = "the option join_projections joins weights anew in each process" if constants else ""
        last = (gm.graph.find_nodes(op="placeholder") or [None])[-1]
        for node in constants:
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(str(node.target))
            last.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(last)
            gm.graph.erase_node(node)
            delattr(gm, str(node.target))
        self._kept: dict[tuple[int, ...], _Kept] = {}
        if constants:
            gm.recompile()
            count_writes()
            _living.add(self)

    def forget(self) -> None:
        """Join the parameters anew at the next call."""
        self._kept.clear()

    def behind(
        self, static: Sequence[int], names: Sequence[str], examples: Sequence[Any]
    ) -> tuple[tuple[int, ...], list[str], list[Any]]:
        """Positions of static inputs, names and examples, with the joined weights behind those of AOT's inputs."""
        numbers = range(len(self.examples))
        joined = (*static, *(len(examples) + number for number in numbers))
        return joined, [*names, *(f"joined weights {number}" for number in numbers)], [*examples, *self.examples]

    def keeps(self, weights: list[torch.Tensor]) -> bool:
        """Whether the next call of their parameters has these joined weights, unless a parameter is written before."""
        return any(kept.weights is weights for kept in self._kept.values())

    def around(self, compiled: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """A function of the inputs that AOT passes."""
        return JoinedRun(compiled, self) if self.examples else compiled

    def parameters(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Those that the joined weights of a call are made from."""
        return [inputs[position] for parts in self.parts for position in parts.places]

    def weights(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """The joined weights of a call, made anew if a parameter is another one, has other memory or was written."""
        parameters = self.parameters(inputs)
        names = tuple(map(id, parameters))
        state = (*map(torch.Tensor.data_ptr, parameters), *map(_VERSION, parameters))
        kept = self._kept.get(names)
        if kept is None or kept.state != state:
            # New memory, because a replay of an earlier call may still read the old one on another stream.
            with torch.no_grad():
                joined = [parts.joined(inputs) for parts in self.parts]
            forget = lambda _: self._kept.pop(names, None)  # noqa: E731 - a new tensor may get the id of a freed one
            kept = self._kept[names] = _Kept(state, joined, [weakref.ref(one, forget) for one in parameters])
        return kept.weights


class JoinedRun:
    """Runs a compiled graph with its joined weights behind the inputs that AOT passes.

    Args:
        graph: the compiled graph.
        joined: its joined weights.
    """

    def __init__(self, graph: Callable[..., Sequence[Any]], joined: JoinedInputs) -> None:
        self.graph = graph
        self.joined = joined

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph."""
        return self.graph(*inputs, *self.joined.weights(inputs))


class Followed:
    """The parameters of one call's joined weights, as they were at that call.

    Args:
        joined: makes the joined weights.
        inputs: those that AOT passes.

    Attributes:
        weights: the joined weights.
    """

    def __init__(self, joined: JoinedInputs, inputs: Sequence[Any]) -> None:
        self._joined = joined
        self._inputs = {place: inputs[place] for parts in joined.parts for place in parts.places}
        self._parameters = joined.parameters(inputs)
        self._versions = [*map(_VERSION, self._parameters)]  # before the parameters are read
        self.weights = joined.weights(inputs)

    def are_unwritten(self) -> bool:
        """Whether none has been written since; the cost is that of reading one number of each."""
        return self._versions == [*map(_VERSION, self._parameters)]

    def changed_unseen(self) -> bool:
        """Whether the next call has joined weights with other values than the parameters; reads all of them."""
        if not self.are_unwritten() or not self._joined.keeps(self.weights):
            return False
        with torch.no_grad():
            pairs = zip(self._joined.parts, self.weights, strict=True)
            return not all(same_bits(parts.joined(self._inputs), weight) for parts, weight in pairs)


def join_again() -> None:
    """Join all parameters anew at the next call of each graph, because some may have changed unseen."""
    for one in list(_living):
        one.forget()


when_invalidated(join_again)
_living: weakref.WeakSet[JoinedInputs] = weakref.WeakSet()
