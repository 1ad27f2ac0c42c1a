"""Traces search and replacement functions into FX graphs, at registration and again for each possible match.

A trace has new fake tensors only, one for each argument: one tensor as the example of two arguments must not make the pattern
require one tensor for both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import fwd_only
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.fusion import dispatch_tracer
from npugraph_ex.graph import noops
from npugraph_ex.graph.memory.aliases import written_by
from npugraph_ex.tracing_repairs.as_aot import as_aot_traces
from npugraph_ex.versions.joint_tracing import with_decompositions

TraceFn = Callable[..., fx.GraphModule]


def _no_decompositions() -> dict[Any, Any]:
    """No decompositions: the operators of AOT graphs are not decomposed, so those of patterns must not be either."""
    return {}


def fresh(value: Any, device: torch.device | None = None) -> Any:
    """A new fake tensor with the metadata of ``value``, under the active fake mode, or on ``device``; other values unchanged.

    It requires a gradient if ``value`` does, because a ``trace_fn`` for training reads that.
    """
    if not isinstance(value, torch.Tensor):
        return value
    mode = _torch_private.active_fake_mode()
    assert mode is not None  # noqa: S101 - see above
    new = _torch_private.fresh_fake(mode, value, device)
    return new.requires_grad_(value.requires_grad)


def registration_mode(stack: ExitStack) -> FakeTensorMode:
    """Enter a new fake mode, whatever mode or compilation is active in the caller."""
    stack.enter_context(unset_fake_temporarily())
    stack.enter_context(_torch_private.outside_compilation())
    return stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def _keywords(trace_fn: TraceFn) -> dict[str, Any]:
    """The keywords for ``trace_fn``; a user's own function may take fewer."""
    wanted = {"get_decomp_fn": _no_decompositions, "run_functional_passes": False}
    parameters = inspect.signature(trace_fn).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {"get_decomp_fn": _no_decompositions}
    return {name: value for name, value in wanted.items() if name in parameters}


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a method, a module or a partial, whose arguments torch's tracer counts wrongly."""
    if inspect.isfunction(function):
        return function

    def call(*args: Any) -> Any:
        return function(*args)

    return call


def trace(function: Callable[..., Any], args: Sequence[Any], trace_fn: TraceFn = fwd_only) -> fx.GraphModule:
    """The graph of ``function(*args)``, without dead code and no-ops; writes are kept so that they can be refused."""
    if trace_fn not in (dispatch_tracer.forward, dispatch_tracer.inference):
        dispatch_tracer.import_quietly()
    with as_aot_traces(), _torch_private.as_compilation(), with_decompositions(_no_decompositions):
        gm = _functional(trace_fn(_plain(function), list(args), **_keywords(trace_fn)), args)
        noops.remove(gm.graph)
        gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or bool(written_by(node)))
    return gm


def _functional(gm: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """The trace as AOT has it: a write into what the function itself made computes a new value.

    A write of an argument has no such form, nor has an operator for which torch knows none. Then the trace stays, so that the
    write can be named.
    """
    leaves = pytree.tree_leaves(list(args))
    if not any(map(written_by, gm.graph.nodes)) or len(gm.graph.find_nodes(op="placeholder")) != len(leaves):
        return gm
    try:
        found = dispatch_tracer.inference(torch.func.functionalize(_plain(gm)), leaves)
    except Exception:  # noqa: BLE001 - whatever torch raises of an operator without a functional form
        return gm
    return gm if any(map(written_by, found.graph.nodes)) else found


def matched_outputs(graph: fx.Graph, arguments: int) -> tuple[int, ...]:
    """The positions of the outputs that operators compute: all, or in a joint graph those that are not incoming gradients.

    Args:
        graph: the graph of a search function.
        arguments: the number of the function's arguments; further inputs are incoming gradients. For an argument
            that is only added, a joint graph returns an incoming gradient; for one without a gradient it returns None.
    """
    results = output_leaves(graph)
    gradients = graph.find_nodes(op="placeholder")[arguments:]
    passed_on = [*gradients, None] if gradients else []
    return tuple(position for position, result in enumerate(results) if result not in passed_on)


def output_leaves(graph: fx.Graph) -> list[object]:
    """The results of ``graph``, as a flat list."""
    return list(
        pytree.tree_leaves(next(iter(graph.find_nodes(op="output"))).args[0], is_leaf=lambda leaf: leaf is None)
    )


def keep_outputs(graph: fx.Graph, positions: Sequence[int]) -> None:
    """Make ``graph`` return only the outputs at ``positions``."""
    results = output_leaves(graph)
    if len(positions) == len(results):
        return
    output = next(iter(graph.find_nodes(op="output")))
    output.args = (tuple(results[position] for position in positions),)
    graph.eliminate_dead_code()


def symbols_of(args: Sequence[Any]) -> list[torch.SymInt]:
    """The distinct symbolic sizes and strides among tensors, in order of appearance."""
    seen: dict[str, torch.SymInt] = {}
    for leaf in pytree.tree_leaves(list(args)):
        if isinstance(leaf, torch.Tensor):
            for number in (*leaf.shape, *leaf.stride()):
                if isinstance(number, torch.SymInt):
                    seen.setdefault(str(number), number)
    return list(seen.values())


def named_symbols(args: Sequence[Any]) -> dict[str, torch.SymInt]:
    """``symbols_of(args)`` by their names in a pattern, whose matches bind each to a size of the graph."""
    return {f"symbol_{number}": symbol for number, symbol in enumerate(symbols_of(args))}


def trace_with_symbols(function: Callable[..., Any], args: Sequence[Any], trace_fn: TraceFn) -> fx.GraphModule:
    """As ``trace``, with the symbols of ``args`` as leading inputs.

    Otherwise the trace would compute them with ``sym_size`` nodes. The compiled graph has none, because its inputs include
    the symbols.
    """
    symbols = symbols_of(args)

    def with_leading_symbols(*all_args: Any) -> Any:
        return function(*all_args[len(symbols) :])

    gm = trace(with_leading_symbols if symbols else function, [*symbols, *args], trace_fn)
    inputs = len(symbols) + len(pytree.tree_leaves(list(args)))
    if symbols and len(gm.graph.find_nodes(op="placeholder")) > inputs:
        _drop_gradients_of(len(symbols), inputs, gm.graph)
    return gm


def _drop_gradients_of(symbols: int, inputs: int, graph: fx.Graph) -> None:
    """Remove the gradients of the leading symbols, all None, from the results of a joint graph."""
    results = len(output_leaves(graph))
    forward = results - inputs
    keep_outputs(graph, [*range(forward), *range(forward + symbols, results)])
