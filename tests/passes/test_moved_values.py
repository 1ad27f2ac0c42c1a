"""Facts of memory that are built after an edit know it, also where an operator moved a value to another storage."""

from __future__ import annotations

import torch

from npugraph_ex.graph import metadata
from npugraph_ex.graph.memory.aliases import AliasFacts
from npugraph_ex.testing import Input
from npugraph_ex.testing.generator.program import function_of
from npugraph_ex.testing.oracle import tracing

SOURCE = """def program(x0, x1):
    y = torch.ops.aten.relu.default(x0)
    torch.ops.aten.set_.source_Tensor(x1, y)
    return (y,)
"""


def test_a_value_that_set_moves_is_where_it_was_moved_to() -> None:
    """Deriving the metadata of `set_` puts its argument into the new source's storage, and out of the old one's."""
    inputs = [Input((2, 4), "float32")] * 2
    graph = tracing.trace(function_of(SOURCE), inputs, {}, dynamic=False, functional=False).graph
    (moved,) = graph.find_nodes(op="call_function", target=torch.ops.aten.set_.source_Tensor)
    target, source = moved.all_input_nodes
    before = AliasFacts(graph)
    with graph.inserting_before(moved):
        new = graph.call_function(torch.ops.aten.neg.default, (source,))
    moved.replace_input_with(source, new)
    metadata.refresh(graph, [new, moved])
    assert before.share_storage(target, source)
    after = AliasFacts(graph)
    assert after.share_storage(target, new)
    assert not after.share_storage(target, source)


def test_a_trusted_value_is_derived_once_it_or_what_it_is_made_of_is_another() -> None:
    """Trust ends with one refresh, with other arguments, and with another value of an argument."""
    source = (
        "def program(x0, x1):\n    y = torch.ops.aten.relu.default(x0)\n    return (torch.ops.aten.neg.default(y),)\n"
    )
    inputs = [Input((2, 4), "float32")] * 2
    graph = tracing.trace(function_of(source), inputs, {}, dynamic=False, functional=True).graph
    first, second = graph.find_nodes(op="placeholder")
    relu, neg = (node for node in graph.nodes if node.op == "call_function")
    metadata.trust(relu)
    metadata.trust(neg)
    assert metadata.refresh(graph, [relu]) == []
    assert metadata.refresh(graph, [relu]) == [relu]
    assert metadata.refresh(graph, [neg]) == [neg]  # the value of `relu` is another now
    metadata.trust(relu)
    relu.replace_input_with(first, second)
    assert metadata.refresh(graph, [relu]) == [relu]
