"""What a form answers: a proposal to put an operator in the place of a subgraph, or why it is none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.graph import metadata


class Emit:
    """Makes the nodes of a replacement, each with its metadata, in a graph of its own."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self._mode = mode

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = metadata.derive(node, self._mode)
        return node


Build = Callable[..., tuple[fx.Node, ...]]
"""``build(emit, *inputs)``: makes the replacement, and returns one node for each output."""


@dataclass(frozen=True)
class Assumed:
    """What a user declares: in each row of ``scores``, the largest is above ``least``.

    Attributes:
        option: the name that declares it.
        scores: the scores; a row is their last dimension.
        least: what the largest of a row is above.
        order: dimensions of the scores in the order in which ``result`` has those of the result.
        result: dimensions of the result that have the same rows; the last one has what becomes of a row.
    """

    option: str
    scores: fx.Node
    least: float
    order: tuple[int, ...]
    result: tuple[int, ...]

    def holds(self, scores: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """For which rows of a result it is so, or the largest score is NaN; repeated along a row, it has the result's shape."""
        rows = ~(scores.amax(-1, keepdim=True) <= self.least)
        sizes = [result.shape[dim] for dim in self.result]
        return (
            rows.permute(self.order)
            .reshape(*sizes[:-1], 1)
            .permute([self.result.index(dim) for dim in range(len(sizes))])
        )


@dataclass(frozen=True)
class Proposal:
    """An operator in the place of a subgraph.

    Attributes:
        inputs: the nodes that the replacement reads; the subgraph reads these and no others.
        outputs: the nodes whose place its results take.
        builds: ways to make it, of which the first is taken whose results have the metadata of the outputs.
        rounds_alike: whether the operator rounds where the spelling does; then every bit must be eager mode's.
        rounds_elsewhere: whether the device may round, for all that is known, where its formula here does not, or not where it
            does: then no trial shows that every bit is eager mode's.
        sums_rows: whether an element is a difference of sums over its row, computed in float32: it cannot be nearer to the
            right value than their rounding.
        steps: what is judged in its place, where it does several things one after the other: nothing between them is rounded
            otherwise than in the spelling, so that each is judged by itself.
        ranked: what outputs of whole numbers are places in, along the last dimension; of equal elements each may be chosen.
        rounds: whether outputs of int8 are rounded values; they are judged by their distance from the value that is rounded.
        places: inputs of whole numbers that say where rows are written: each place comes once, because the program does not say
            which of several rows stays.
        parts: whether the results are views of one tensor, where those that they replace lie alone: for outputs whose strides and
            memory no program can see.
        dense: whether the results lie densely where those that they replace may be views of more: for outputs whose strides no
            program can see.
        assumed: what the user declares of the rows, so that others are not compared.
        named: sizes that an argument of the operator names, such as the number of heads: trials have as many.
        otherwise: what is told where it is not lifted, with the reason in the place of that of this one.
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    builds: tuple[Build, ...]
    named: tuple[Any, ...] = ()
    rounds_alike: bool = False
    rounds_elsewhere: bool = False
    sums_rows: bool = False
    steps: tuple[Proposal, ...] = ()
    ranked: fx.Node | None = None
    rounds: bool = False
    places: tuple[fx.Node, ...] = ()
    parts: bool = False
    dense: bool = False
    assumed: Assumed | None = None
    otherwise: Unlike | None = None


@dataclass(frozen=True)
class Change:
    """A change of the program that may bring the form.

    Attributes:
        now: the subgraph that the changed lines take the place of.
        name: what these lines call.
        program: computes what they compute, of the inputs of ``now``; its trace is read, from its first result, judged and counted.
        mend: the change in words, for the report.
        lines: the model, changed so.
    """

    now: Proposal
    name: str
    program: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    mend: str
    lines: str


@dataclass(frozen=True)
class Unlike:
    """Why a subgraph that looks like the form is none, and the node that stands for it in the report.

    ``change``: one of the program, which is told where it saves kernels. ``lines``: the model with a change that nobody counts.
    ``declared``: what would be lifted if the user declared what it assumes.
    """

    node: fx.Node
    reason: str
    change: Change | None = None
    lines: str = ""
    declared: Proposal | None = None


class Form(Protocol):
    """One form. Its module in ``forms`` holds it as ``FORM``."""

    @property
    def name(self) -> str:
        """Its name in the report."""

    @property
    def ends_with(self) -> Collection[Callable[..., Any]]:
        """The operators that the last node of a spelling calls."""

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The form that ends with ``node``; None where nothing resembles it."""
