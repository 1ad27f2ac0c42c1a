"""Parameters that lifting joins: a concatenation of them becomes a constant of the module, which the caller keeps up to date.

The concatenation costs a kernel and the weights' traffic, so it does not stay in the graph. Whoever runs the graph makes an input
of each of these constants: `frontend/entry/joined_inputs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.metadata import fake_mode_of
from npugraph_ex.lifting.trials import on_real_values

PREFIX = "_joined_"
"""Of the constants' names. `node.meta[PARTS]` of one says how it is made: `JoinedParts`."""
PARTS = "npugraph_ex_joined"

_aten = torch.ops.aten


@dataclass(frozen=True)
class JoinedParts:
    """The parameters at these places among the graph's inputs, joined along ``dim``."""

    places: tuple[int, ...]
    dim: int

    def joined(self, inputs: Sequence[Any] | Mapping[int, Any]) -> torch.Tensor:
        """A new tensor, of these inputs."""
        return torch.cat([inputs[place] for place in self.places], self.dim)


def parameters(graph: fx.Graph, values: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
    """The inputs that are matrices and vectors of the model, with their values; none where the values of the call are unknown."""
    given = graph.find_nodes(op="placeholder")
    return {
        node: value
        for node, value in zip(given, values, strict=False)
        # A tensor of inference mode does not count its versions, so a change would not show.
        if type(value) is torch.nn.Parameter
        and value.dim() in {1, 2}
        and value.is_contiguous()
        and not value.is_inference()
    }


def in_a_call(replacement: fx.Graph) -> list[fx.Node]:
    """The nodes that run in each call: all but a concatenation of inputs."""
    return [
        node
        for node in replacement.nodes
        if node.target is not _aten.cat.default or any(one.op != "placeholder" for one in node.all_input_nodes)
    ]


def take_out(graph: fx.Graph, known: Mapping[fx.Node, torch.Tensor]) -> None:
    """Put a constant in the place of each concatenation of parameters that lifting made."""
    gm, mode = graph.owning_module, fake_mode_of(graph)
    assert gm is not None  # noqa: S101 - passes get the graph of a module
    assert mode is not None  # noqa: S101 - asked before
    places = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    for number, node in enumerate(graph.find_nodes(op="call_function", target=_aten.cat.default)):
        parts, *dim = node.args
        if not dim or not all(part in known for part in parts):
            continue
        name = f"{PREFIX}{number}"
        with on_real_values():
            gm.register_buffer(name, torch.cat([known[part].detach() for part in parts], *dim))
        with graph.inserting_before(next(iter(graph.nodes))):
            read = graph.get_attr(name)
        read.meta = {
            "val": mode.from_tensor(getattr(gm, name), static_shapes=True),
            PARTS: JoinedParts(tuple(places[part] for part in parts), *dim),
        }
        node.replace_all_uses_with(read)
        graph.erase_node(node)
