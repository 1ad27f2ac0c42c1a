"""Returns views of a written input, where AOT returns views of the value that it copies into the input.

For `x.add_(1); return x[1:]` AOT's graph computes `y = x + 1`, ends with `copy_(x, y)` and returns `y[1:]`. AOT's wrapper
then returns a view of `x` with the offset and strides of `y[1:]`, which belong to other memory. If `x` begins in the middle
of its storage and a size is symbolic, or if inputs alias each other, these are other elements, in `aot_eager` too.

This repair makes the view from the input, after the copy. Its offset and strides are right by construction, whatever the
offset of a call's input. Because `y` is no longer an output, it can be computed in the input's own memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph.memory.aliases import is_view, output_values, tensor_leaves
from npugraph_ex.graph.metadata import derive, fake_mode_of
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A view of a written input is made with the offset and strides of other memory, or fails.",
    threads=("pytorch#198095",),
    test="tests/frontend/test_returned_views.py",
)


_copy = torch.ops.aten.copy_.default


def restore(graph: fx.Graph) -> None:
    """Make ``graph`` return views of its inputs directly, and stop AOT from making its own; edits the graph.

    Args:
        graph: AOT's graph, while AOT's metadata is available, with fake tensors in ``meta["val"]``.
    """
    homes = _torch_private.outputs_in_inputs(graph)
    if not homes:
        return
    _return_views_of_written_inputs(graph, homes)
    _torch_private.replay_no_views_of_bases(graph)
    inputs, values = graph.find_nodes(op="placeholder"), output_values(graph)
    reinterpreted = [position for position, home in homes.items() if _is_reinterpreted(values[position], inputs[home])]
    _torch_private.hand_out_as_they_are(graph, reinterpreted)


def _return_views_of_written_inputs(graph: fx.Graph, homes: Mapping[int, int]) -> None:
    output = graph.output_node()
    inputs = graph.find_nodes(op="placeholder")
    written = {copy.args[0]: _Written(copy) for copy in graph.find_nodes(op="call_function", target=_copy)}
    values: list[Any] = output_values(graph)
    for position, home in homes.items():
        value, written_value = values[position], written.get(inputs[home])
        chain = written_value.chain(value) if written_value is not None else None
        if written_value is None or chain is None:
            continue
        with graph.inserting_before(output):
            values[position] = written_value.view(chain) or value
        output.args = (values,)
        for view in reversed(chain):
            if not view.users:
                graph.erase_node(view)


class _Written:
    """An input into which the graph copies a value at its end.

    Args:
        copy: the copy, whose result is the input from then on.
    """

    def __init__(self, copy: fx.Node) -> None:
        self._value = copy.args[1]
        self._of_input: dict[object, fx.Node] = {self._value: copy}  # by view of the value, the same view of the input

    def chain(self, value: object) -> list[fx.Node] | None:
        """The chain of views from the copied value to ``value``, first to last; None if there is no such chain."""
        found: list[fx.Node] = []
        while value is not self._value:
            if not isinstance(value, fx.Node) or value.op != "call_function" or not value.args or not is_view(value):
                return None
            found.append(value)
            value = value.args[0]
        return found[::-1]

    def view(self, chain: list[fx.Node]) -> fx.Node | None:
        """Apply the views of ``chain`` to the input, each once; None if the input has no such view.

        The value may have another layout than the input, so that `reshape` is a view of one and copies the other.
        """
        result = self._of_input[self._value]
        for view in chain:
            if view not in self._of_input:
                result = view.graph.node_copy(view, lambda node: self._of_input.get(node, node))
                try:
                    result.meta["val"] = derive(result, fake_mode_of(view.graph))
                except GraphVerificationError:
                    view.graph.erase_node(result)
                    return None
                self._of_input[view] = result
            result = self._of_input[view]
        return result


def _is_reinterpreted(value: object, home: fx.Node) -> bool:
    """Whether an output lies in an input, but AOT cannot rebuild it from offset and strides."""
    if not isinstance(value, fx.Node):
        return False
    (there,), (here,) = tensor_leaves(value), tensor_leaves(home)
    if _torch_private.storage_key(there) != _torch_private.storage_key(here):
        return False
    kinds = [(tensor.dtype, tensor.is_conj(), tensor.is_neg()) for tensor in (there, here)]
    return kinds[0] != kinds[1]
