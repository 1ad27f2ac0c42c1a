"""Unwraps custom operators that mutate: AOT hides them behind `auto_functionalized`, which no device can capture.

The wrapper stands for "copy what is mutated, call the operator on the copies, return them". This pass writes exactly
that, always, whatever the options; reinplacing then removes the copies that nobody needs.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex import _torch_private
from npugraph_ex.passes.metadata import fake_mode_of
from npugraph_ex.passes.pass_ import PassContext


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Unwrap every wrapped operator of ``gm.graph``."""
    del context
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _torch_private.auto_functionalized_operators():
            _unwrap(gm.graph, node)


def _unwrap(graph: fx.Graph, node: fx.Node) -> None:
    """Replace one wrapper by the nodes that it stands for."""
    arguments = node.all_input_nodes
    values = [argument.meta["val"] for argument in arguments]

    def plain(*inputs: Any) -> Any:
        given = dict(zip(arguments, inputs, strict=True))
        unwrapped: Any = fx.map_arg((node.args, node.kwargs), lambda argument: given[argument])
        args, kwargs = unwrapped
        return _torch_private.call_unwrapped(node.target, args, kwargs)

    with _torch_private.fake_execution(fake_mode_of(graph)):
        traced = make_fx(plain)(*values)
    results = _inline(
        graph, node, traced.graph, dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    )
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise NotImplementedError(f"{user.name} uses the results of {node.name} other than one by one")
        result = results[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)


def _inline(graph: fx.Graph, before: fx.Node, part: fx.Graph, known: dict[fx.Node, fx.Node]) -> list[Any]:
    """Copy the nodes of ``part`` in front of ``before`` and return what its output lists."""
    with graph.inserting_before(before):
        for inner in part.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                return list(fx.map_arg(inner.args[0], lambda argument: known[argument]))
            if inner.op == "get_attr":
                raise NotImplementedError(f"the operator behind {before.name} needs the constant {inner.target}")
            copy = graph.node_copy(inner, lambda argument: known[argument])
            copy.meta.update({key: value for key, value in before.meta.items() if key not in {"val", "tensor_meta"}})
            known[inner] = copy
    raise AssertionError("an fx graph always ends in an output")
