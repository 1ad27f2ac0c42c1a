"""Unwraps operators that mutate: AOT wraps them in `auto_functionalized`, which no device can capture.

The wrapper means "copy the mutated arguments, call the operator on the copies, return them". This pass writes exactly that,
with any options. Reinplacing then removes the unnecessary copies. torch_npu has operators that mean the same, named
``…_functional``; they are unwrapped likewise.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex import _torch_private
from npugraph_ex.errors import BrokenPromiseError
from npugraph_ex.graph.metadata import fake_mode_of
from npugraph_ex.graph.operators import is_filled, named_arguments
from npugraph_ex.graph.parts import MADE_COPY
from npugraph_ex.graph.source import source_line
from npugraph_ex.passes.base import PassContext


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Unwrap every wrapped operator of ``gm.graph``."""
    del context
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _torch_private.auto_functionalized_operators():
            _refuse_lost_contents(node)
            _unwrap(gm.graph, node, partial(_torch_private.call_unwrapped, node.target))
        elif isinstance(node.target, OpOverload) and (mutating := _mutating_form(node.target)) is not None:
            _unwrap(gm.graph, node, partial(_on_copies, mutating))


@functools.cache
def _mutating_form(functional: OpOverload) -> OpOverload | None:
    """The operator that writes its arguments where ``functional`` returns changed copies of them; None if there is none.

    By torch_npu's naming. The copies are the last results, in the order of the arguments (op-plugin).
    """
    namespace, name, overload = _torch_private.operator_name(functional)
    if not name.endswith("_functional"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_functional"), None)
    mutating = getattr(packet, overload, None)
    if not isinstance(mutating, OpOverload):
        return None
    ours, theirs = (_torch_private.schema(one) for one in (functional, mutating))
    if [(one.name, str(one.type)) for one in ours.arguments] != [(one.name, str(one.type)) for one in theirs.arguments]:
        return None
    return mutating if len(ours.returns) == len(theirs.returns) + len(_written(mutating)) else None


def _written(mutating: OpOverload) -> list[str]:
    """The names of the arguments that an operator writes."""
    arguments = _torch_private.schema(mutating).arguments
    return [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]


def _on_copies(mutating: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Call the operator on copies of what it writes; its results, then the copies."""
    given = named_arguments(mutating, args, kwargs)
    copies = {name: given[name].clone() for name in _written(mutating)}
    results = mutating(**{**given, **copies})
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    return (*results, *copies.values())


def _unwrap(graph: fx.Graph, node: fx.Node, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Replace one wrapper by the nodes that it means, which ``call`` runs."""
    arguments = node.all_input_nodes
    values = [argument.meta["val"] for argument in arguments]

    def plain(*inputs: Any) -> Any:
        given = dict(zip(arguments, inputs, strict=True))
        unwrapped: Any = fx.map_arg((node.args, node.kwargs), lambda argument: given[argument])
        args, kwargs = unwrapped
        return call(args, kwargs)

    with _torch_private.fake_execution(fake_mode_of(graph)):
        traced = make_fx(plain)(*values)
    results = _inline(
        graph, node, traced.graph, dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    )
    if isinstance(results, fx.Node):  # an operator with one `out`
        node.replace_all_uses_with(results)
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise NotImplementedError(f"{user.name} uses the results of {node.name} other than one by one")
        result = results[user.args[1]]
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)


def _refuse_lost_contents(node: fx.Node) -> None:
    """Raise if torch replaced a cache by new memory, although the operator writes only a part of the cache."""
    target = node.args[0]
    if not isinstance(target, OpOverload):
        return
    made = [a for a in _torch_private.schema(target).arguments if f"_{a.name}_device" in node.kwargs]
    lost = [argument.name for argument in made if not is_filled(target, argument)]
    if lost:
        raise BrokenPromiseError(
            f"{source_line(node) or node.name} calls {target}, which torch takes for an operator that fills all of "
            f"{' and '.join(lost)}; but it changes a part, and AOT has dropped the rest. Call it in an operator of your own: "
            f"torch.library.custom_op(..., mutates_args={lost})"
        )


def _inline(graph: fx.Graph, before: fx.Node, part: fx.Graph, known: dict[fx.Node, fx.Node]) -> Any:
    """Copy the nodes of ``part`` in front of ``before`` and return what its output has: nodes, or one."""
    with graph.inserting_before(before):
        for inner in part.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                return fx.map_arg(inner.args[0], lambda argument: known[argument])
            if inner.op == "get_attr":
                raise NotImplementedError(f"the operator behind {before.name} needs the constant {inner.target}")
            copy = graph.node_copy(inner, lambda argument: known[argument])
            copy.meta.update({key: value for key, value in before.meta.items() if key not in {"val", "tensor_meta"}})
            if inner.target is torch.ops.aten.clone.default:
                copy.meta[MADE_COPY] = True
            known[inner] = copy
    raise AssertionError("an fx graph always ends in an output")
