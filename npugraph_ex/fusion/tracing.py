"""TraceCache search and replacement functions into FX graphs, at registration and again for each possible match.

Tracing sees fresh fake tensors only, one for each argument: the same tensor passed twice as an example must not make
the pattern demand the same tensor twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch._inductor.pattern_matcher import fwd_only
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.graph import noops
from npugraph_ex.graph.memory.aliases import written_by

TraceFn = Callable[..., fx.GraphModule]


def _no_decompositions() -> dict[Any, Any]:
    """AOT graphs reach fusion with their operators as they are, so patterns must keep theirs."""
    return {}


def fresh(value: Any) -> Any:
    """A new fake tensor with the metadata of ``value``, under the active fake mode; other values unchanged.

    It requires a gradient when ``value`` does, which a ``trace_fn`` for training looks at.
    """
    if not isinstance(value, torch.Tensor):
        return value
    mode = _torch_private.active_fake_mode()
    assert mode is not None  # noqa: S101 - see above
    new = _torch_private.fresh_fake(mode, value)
    return new.requires_grad_(value.requires_grad)


def registration_mode(stack: ExitStack) -> FakeTensorMode:
    """Enter a fake mode of our own, whatever mode or compilation the caller is in."""
    stack.enter_context(unset_fake_temporarily())
    stack.enter_context(tracing(None))
    return stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def _keywords(trace_fn: TraceFn) -> dict[str, Any]:
    """What to pass to ``trace_fn`` besides function and arguments; a user's own may take less."""
    wanted = {"get_decomp_fn": _no_decompositions, "run_functional_passes": False}
    parameters = inspect.signature(trace_fn).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {"get_decomp_fn": _no_decompositions}
    return {name: value for name, value in wanted.items() if name in parameters}


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in place of a method, a module or a partial, of which torch's tracing counts the arguments wrongly."""
    if inspect.isfunction(function):
        return function

    def call(*args: Any) -> Any:
        return function(*args)

    return call


def trace(function: Callable[..., Any], args: Sequence[Any], trace_fn: TraceFn = fwd_only) -> fx.GraphModule:
    """The graph of ``function(*args)``, without dead code and no-ops; writes are kept so that they can be refused."""
    gm = trace_fn(_plain(function), list(args), **_keywords(trace_fn))
    noops.remove(gm.graph)
    gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or bool(written_by(node)))
    return gm


def matched_outputs(graph: fx.Graph, arguments: int) -> tuple[int, ...]:
    """The positions of the outputs that an operator makes: all, or in a joint graph those that are not mere gradients.

    Args:
        graph: of a search function.
        arguments: how many of its inputs are the function's; any further one is an incoming gradient. A joint graph
            returns one as it is for an argument that is only added, and None for one that needs no gradient.
    """
    results = output_leaves(graph)
    gradients = graph.find_nodes(op="placeholder")[arguments:]
    passed_on = [*gradients, None] if gradients else []
    return tuple(position for position, result in enumerate(results) if result not in passed_on)


def output_leaves(graph: fx.Graph) -> list[object]:
    """What ``graph`` returns, flat."""
    return list(
        pytree.tree_leaves(next(iter(graph.find_nodes(op="output"))).args[0], is_leaf=lambda leaf: leaf is None)
    )


def keep_outputs(graph: fx.Graph, positions: Sequence[int]) -> None:
    """Let ``graph`` return the outputs at ``positions`` only; one that returns all stays as it is."""
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
    """``symbols_of(args)`` by the names that they have in a pattern, whose matches bind each to a size of the graph."""
    return {f"symbol_{number}": symbol for number, symbol in enumerate(symbols_of(args))}


def trace_with_symbols(function: Callable[..., Any], args: Sequence[Any], trace_fn: TraceFn) -> fx.GraphModule:
    """As ``trace``, with the symbols of ``args`` as leading inputs.

    Otherwise the traced graph would compute them with ``sym_size`` nodes, which the graph to be matched, having
    symbols among its inputs, does not contain.
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
    """Take the gradients of the leading symbols, all None, out of the results of a joint graph."""
    results = len(output_leaves(graph))
    forward = results - inputs
    keep_outputs(graph, [*range(forward), *range(forward + symbols, results)])
