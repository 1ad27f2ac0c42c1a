"""Checks what must be true of a graph after every pass. An error names the pass and the node.

The contract comes from AOT's graph: the metadata of its outputs, which inputs and earlier
outputs each output shares memory with, and which inputs the graph writes. Not checked here: values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph import collectives
from npugraph_ex.graph.memory.aliases import AliasFacts, mutated_inputs, output_values
from npugraph_ex.graph.metadata import difference
from npugraph_ex.graph.sizes import SYMBOLS


@dataclass(frozen=True)
class Contract:
    """What callers of a graph rely on.

    Attributes:
        inputs: the names of the placeholders.
        outputs: the fake value, or the constant, of each output.
        sharing: for each output, the positions of the inputs in the same memory, and of the earlier outputs in the same
            memory (shifted by the number of inputs).
        written: the positions of the inputs that the graph writes.
        collectives: the graph's collectives in order; the other processes run the same ones.
    """

    inputs: tuple[str, ...]
    outputs: tuple[object, ...]
    sharing: tuple[frozenset[int], ...]
    written: frozenset[int]
    collectives: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_graph(cls, graph: fx.Graph) -> Contract:
        """The contract of ``graph`` in its present state."""
        facts = AliasFacts(graph)
        values = output_values(graph)
        metadata = tuple(value.meta.get("val") if isinstance(value, fx.Node) else value for value in values)
        inputs = tuple(node.name for node in graph.find_nodes(op="placeholder"))
        return cls(
            inputs, metadata, _sharing(graph, facts, values), mutated_inputs(graph, facts), collectives.sequence(graph)
        )

    def check(self, graph: fx.Graph, pass_name: str) -> None:
        """Raise ``GraphVerificationError`` unless ``graph`` is sound and still fulfils this contract."""
        check_definitions(graph, pass_name)
        new = Contract.from_graph(graph)
        if len(new.inputs) != len(self.inputs):
            came, went = (", ".join(set_) or "none" for set_ in _differing(self.inputs, new.inputs))
            raise _violation(
                pass_name,
                f"the graph has {len(new.inputs)} inputs instead of {len(self.inputs)}; new nodes: {came}; missing: {went}",
            )
        values = output_values(graph)
        if len(values) != len(self.outputs):
            raise _violation(
                pass_name,
                f"node {graph.output_node().name} returns {len(values)} values, {list(values)}, instead of {len(self.outputs)}",
            )
        for position, value in enumerate(values):
            self._check_output(new, position, value, pass_name)
        self._check_writes(new, graph, pass_name)
        if new.collectives != self.collectives:
            raise _violation(
                pass_name,
                f"the graph's collectives are {_listed(new.collectives)} instead of {_listed(self.collectives)}, and other "
                "processes would wait for ever",
            )

    def with_collectives_of(self, graph: fx.Graph) -> Contract:
        """This contract after a pass that may replace collectives, as fusion and a user's pass may."""
        return replace(self, collectives=collectives.sequence(graph))

    def _check_output(self, new: Contract, position: int, value: object, pass_name: str) -> None:
        changed = difference(self.outputs[position], new.outputs[position])
        if changed:
            raise _violation(pass_name, f"output {position}, node {value}, has {changed}")
        if new.sharing[position] != self.sharing[position]:
            raise _violation(
                pass_name,
                f"output {position}, node {value}, shares memory with {self._named(new.sharing[position])} "
                f"instead of {self._named(self.sharing[position])}",
            )

    def _check_writes(self, new: Contract, graph: fx.Graph, pass_name: str) -> None:
        names = [node.name for node in graph.find_nodes(op="placeholder")]
        for position in sorted(self.written - new.written):
            raise _violation(pass_name, f"input {position}, node {names[position]}, is no longer written by the graph")
        for position in sorted(new.written - self.written):
            raise _violation(pass_name, f"input {position}, node {names[position]}, is now written by the graph")

    def _named(self, sharing: frozenset[int]) -> str:
        count = len(self.inputs)
        names = [f"input {p}" if p < count else f"output {p - count}" for p in sorted(sharing)]
        return ", ".join(names) or "nothing"


def _differing(old: Sequence[str], new: Sequence[str]) -> tuple[list[str], list[str]]:
    """The new names, and the missing names."""
    return [name for name in new if name not in old], [name for name in old if name not in new]


def _listed(sequence: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{target} in {group!r}" for target, group in sequence) or "none"


def _sharing(graph: fx.Graph, facts: AliasFacts, values: list[object]) -> tuple[frozenset[int], ...]:
    """``Contract.sharing`` in time linear in inputs and outputs."""
    holders: dict[int, list[int]] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        for root in facts.roots(node):
            holders.setdefault(root, []).append(position)
    first_output = len(graph.find_nodes(op="placeholder"))
    result = []
    for position, value in enumerate(values):
        roots = facts.roots(value) if isinstance(value, fx.Node) else frozenset()
        result.append(frozenset(holder for root in roots for holder in holders.get(root, ())))
        for root in roots:
            # The first output in a memory represents the later ones.
            holders.setdefault(root, [first_output + position])
    return tuple(result)


def check_definitions(graph: fx.Graph, pass_name: str) -> None:
    """Raise ``GraphVerificationError`` unless nodes are defined before they are used and ``fx``'s own lint agrees."""
    if len(graph.find_nodes(op="output")) != 1:
        raise _violation(pass_name, f"the graph has {len(graph.find_nodes(op='output'))} output nodes instead of one")
    defined: set[fx.Node] = set()
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in defined:
                raise _violation(pass_name, f"node {node.name} uses {argument.name} before it is defined")
        defined.add(node)
    try:
        graph.lint()
    except (RuntimeError, ValueError) as error:
        raise _violation(pass_name, f"fx's lint says: {error}") from error


def check_values(graph: fx.Graph, pass_name: str) -> None:
    """Raise ``GraphVerificationError`` unless each tensor and symbol that a node reads is a node's, and constants have values."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, SYMBOLS):
                raise GraphVerificationError(
                    f"After pass {pass_name}: an argument of node {node.name} is the symbol {leaf}, which a node must compute. "
                    "A size is the result of gm.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))."
                )
            if isinstance(leaf, torch.Tensor):
                raise _no_constant(pass_name, f"an argument of node {node.name} is a tensor")
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(attrgetter(str(node.target))(graph.owning_module), FakeTensor):
            raise _no_constant(
                pass_name,
                f"node {node.name} reads gm.{node.target}, which is a fake tensor without values, as all are that a pass makes",
            )


def _no_constant(pass_name: str, what: str) -> GraphVerificationError:
    return GraphVerificationError(
        f"After pass {pass_name}: {what}. Make a constant outside of the pass, gm.register_buffer it in the pass and read "
        "it by gm.graph.get_attr; or let the graph make it by an operator such as aten.full."
    )


def _violation(pass_name: str, what: str) -> GraphVerificationError:
    return GraphVerificationError(f"After pass {pass_name}: {what.rstrip('.')}. A pass must leave this as it found it.")
