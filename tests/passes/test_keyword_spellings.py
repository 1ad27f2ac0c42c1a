"""Arguments that a graph passes by keyword are worth the same to every pass as those that it passes by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_helpers import evaluate
from torch import fx

from npugraph_ex.config.options import Options
from npugraph_ex.passes import pipeline

aten = torch.ops.aten


def concatenation(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Two results side by side."""
    parts = [graph.call_function(aten.add.Tensor, (x, number)) for number in (1, 2)]
    return graph.call_function(aten.cat.default, (), {"tensors": parts, "dim": 0})


def view_of_a_view(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A view that says where it begins."""
    double = graph.call_function(aten.mul.Tensor, (x, 2))
    lower = graph.call_function(aten.as_strided.default, (double,), {"size": [2, 4], "stride": [4, 1]})
    upper = graph.call_function(aten.as_strided.default, (lower, [4], [1]), {"storage_offset": 2})
    return graph.call_function(aten.add.Tensor, (upper, 1))


def assignment(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Some rows and then all rows of a tensor are set."""
    base = graph.call_function(aten.mul.Tensor, (x, 2))
    source = graph.call_function(aten.slice.Tensor, (x,), {"end": 1})
    some = graph.call_function(aten.slice_scatter.default, (base,), {"src": source, "end": 1})
    return graph.call_function(aten.slice_scatter.default, (some,), {"src": x, "step": 1})


def a_gap(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """An argument is left out before one that is given."""
    return graph.call_function(aten.argmax.default, (x,), {"keepdim": True})


@pytest.mark.parametrize("program", [concatenation, view_of_a_view, assignment, a_gap])
@pytest.mark.parametrize("by_user", [False, True], ids=["from the start", "by a pass"])
def test_keywords_are_understood(program: Callable[..., fx.Node], by_user: bool) -> None:
    """No pass fails, and the values are those of the graph as it was written."""
    x = torch.randn(4, 4)

    def make(graph: fx.Graph) -> fx.GraphModule:
        inside = graph.placeholder("x")
        graph.output((program(graph, inside),))
        return fx.GraphModule({}, graph)

    def rewrite(gm: fx.GraphModule, _inputs: object, _config: object) -> None:
        (output,), (inside,) = gm.graph.find_nodes(op="output"), gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_before(output):
            output.args = ((program(gm.graph, inside),),)

    expected = evaluate(make(fx.Graph()), x)
    gm = make(fx.Graph())
    options: dict[str, Any] = {}
    if by_user:
        options["post_grad_custom_post_pass"] = rewrite
    (inside,) = gm.graph.find_nodes(op="placeholder")
    with torch._subclasses.FakeTensorMode() as mode:
        inside.meta["val"] = mode.from_tensor(x)
    report = pipeline.run(gm, [x], Options(**options))
    assert {record.name for record in report.passes if record.outcome == "rolled back"} == set()
    assert torch.equal(evaluate(gm, x)[0], expected[0])
    kept = [node.kwargs for node in gm.graph.nodes if node.target is not aten.empty_strided.default]
    assert all(set(kwargs) <= {"out"} for kwargs in kept)
