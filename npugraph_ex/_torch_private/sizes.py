"""Symbolic sizes: their symbols, their guards, and the functions that an expression of them may call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


def input_guards(inputs: Sequence[object], mode: FakeTensorMode | None) -> tuple[str, bool]:
    """The condition on the sizes of a graph's inputs, as an expression over ``L['t0']``, ``L['t1']`` and so on.

    Returns:
        The condition, and whether it is all that torch guards: a number that only decided a branch is no input of the graph.
    """
    environment: Any = mode.shape_env if mode is not None else None
    if environment is None:
        return "", True
    checked = [value for value in inputs if isinstance(value, (torch.Tensor, torch.SymInt))]
    known = {expression for value in checked for expression in _expressions_of(value)}
    guards = [guard for guard in environment.guards if environment.simplify(guard.expr).free_symbols <= known]
    condition = environment.produce_guards_expression(checked, guards=guards, ignore_static=True) or ""
    return condition, len(guards) == len(environment.guards)


def _expressions_of(value: torch.Tensor | torch.SymInt) -> Iterator[Any]:
    """The expressions (of sympy) of the symbolic sizes of a tensor, or of a size."""
    sizes = (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else (value,)
    return (size.node.expr for size in sizes if isinstance(size, torch.SymInt))


def pinned_sizes() -> dict[tuple[str, int], str]:
    """The sizes of inputs that were symbols and have become constants in the current compilation.

    Returns:
        Dynamo's name of a tensor and the dimension -> the program's line that needed the value, as torch writes it.
    """
    from torch._dynamo.source import TensorProperty, TensorPropertySource
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    environment: Any = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    found = {}
    for symbol, where in environment.replacements_slocs.items() if environment is not None else ():
        for source in environment.var_to_sources.get(symbol, ()):
            of_size = isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE
            if of_size and environment.replacements[symbol].is_number and where.maybe_user_loc:
                name = source.base.name
                found[str(name() if callable(name) else name), source.idx] = where.maybe_user_loc
    return found


def guard_names() -> dict[str, object]:
    """The functions that an expression of ``input_guards`` may call."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return {**SYMPY_INTERP, "max": max, "min": min, "abs": abs, "round": round}


def new_symbols(hints: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, Any]]:
    """A new fake mode with one free symbol (of sympy) for each name, with its value in the example inputs."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv()
    symbols = {
        name: environment.create_symbol(
            hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
        )
        for name, hint in hints.items()
    }
    return FakeTensorMode(shape_env=environment), symbols


def symbolic_size(mode: FakeTensorMode, expression: Any, hint: int) -> int | torch.SymInt:
    """A size that is an expression (of sympy) over symbols of ``mode``."""
    environment: Any = mode.shape_env
    size: int | torch.SymInt = environment.create_symintnode(expression, hint=hint)
    return size


def expression_of(size: torch.SymInt) -> Any:
    """The expression (of sympy) as it was made, although torch may have made a number of its symbols since."""
    return size.node._expr  # noqa: SLF001 - `expr` has the numbers in place of the symbols


def size_expression(size: torch.SymInt) -> Any:
    """The expression (of sympy) as torch knows it now."""
    return size.node.expr


def computed_size(graph: fx.Graph, expression: Any, known: Mapping[Any, fx.Node]) -> int | fx.Node:
    """Add the computation of a size to the end of a graph.

    Args:
        graph: the graph.
        expression: the size, an expression (of sympy).
        known: nodes by the expression of their value, among them the expression itself or each of its symbols.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    if expression in known:
        return known[expression]
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in known.items()}
    found = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    return found.node if isinstance(found, fx.Proxy) else int(found)


def size_functions() -> dict[str, Any]:
    """The functions in the text of a symbolic size, such as ``CeilDiv``."""
    from torch.utils._sympy import functions

    return {name: getattr(functions, name) for name in functions.__all__}
