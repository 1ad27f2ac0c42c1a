"""A function of one tensor, element by element => the one operator that computes it: GELU in its three forms, SiLU.

Which function a spelling computes is found by its values, not by its operators: it runs in float64 on a few numbers, and so do the
candidates. What takes part are the operators between the result and the one tensor on which all of them depend.

::

    GELU           x / 2 * (1 + erf(x / sqrt(2)))
    GELU, tanh     x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    GELU, sigmoid  x * sigmoid(1.702 x)                     `npu_fast_gelu`
    SiLU           x * sigmoid(x)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Build, Proposal, Unlike
from npugraph_ex.lifting.trials import on_real_values
from npugraph_ex.operators import PreparedGraph

_aten = torch.ops.aten
_CURVES = frozenset({_aten.tanh.default, _aten.sigmoid.default, _aten.erf.default, _aten.exp.default})
"""Each activation has one of these."""
_ELEMENTWISE = _CURVES | {
    _aten.add.Tensor,
    _aten.add.Scalar,
    _aten.sub.Tensor,
    _aten.rsub.Scalar,
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.div.Tensor,
    _aten.div.Scalar,
    _aten.pow.Tensor_Scalar,
    _aten.square.default,
    _aten.neg.default,
    _aten.reciprocal.default,
    _aten._to_copy.default,  # noqa: SLF001 - the operator's name
    _aten.clone.default,
}
_MOST_OPERATORS = 16
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_POINTS = torch.linspace(-6, 6, 61, dtype=torch.float64)
_TOLERANCE = 1e-5
"""Of constants such as sqrt(2 / pi), which programs write with 6 digits or more."""


Function = Callable[[torch.Tensor], torch.Tensor]


def _calls(target: Any, **how: str) -> Build:
    """The call of one operator on x."""
    return lambda emit, x: (emit(target, x, **how),)


def _candidates() -> Iterator[tuple[Function, Build]]:
    """Each function, and the call that computes it; looked up late, because torch_npu defines an operator of them."""
    yield lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))), _calls(_aten.gelu.default)
    cubic = math.sqrt(2 / math.pi), 0.044715
    yield (
        lambda x: x / 2 * (1 + torch.tanh(cubic[0] * (x + cubic[1] * x**3))),
        _calls(_aten.gelu.default, approximate="tanh"),
    )
    yield lambda x: x * torch.sigmoid(1.702 * x), _calls(torch.ops.npu.npu_fast_gelu.default)
    yield lambda x: x * torch.sigmoid(x), _calls(_aten.silu.default)


def _cuts(node: fx.Node) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """``(x, nodes)``, nearest first: ``node`` depends on ``x`` alone, through these elementwise operators."""
    region: list[fx.Node] = []
    frontier = {node}
    while len(region) < _MOST_OPERATORS:
        latest = max(frontier)
        if not terms.calls(latest, *_ELEMENTWISE):
            return
        frontier.remove(latest)
        frontier.update(latest.all_input_nodes)
        region.append(latest)
        if len(frontier) == 1:
            yield next(iter(frontier)), tuple(reversed(region))
        elif not frontier:
            return


def _build(nodes: tuple[fx.Node, ...], x: fx.Node) -> Build | None:
    """The operator that computes what ``nodes`` make of ``x``; None where none does."""
    graph = fx.Graph()
    twins = {x: graph.placeholder("x")}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), twins.__getitem__)
        twins[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    graph.output(twins[nodes[-1]])
    with on_real_values():
        found = PreparedGraph(graph, wide=True).run(_POINTS)
        for function, build in _candidates():
            right = function(_POINTS)
            if bool(((found - right).abs() <= _TOLERANCE * right.abs().clamp(min=_TOLERANCE)).all()):
                return build
    return None


class _Activation:
    """The form."""

    name = "lift_activation"
    ends_with = frozenset({_aten.mul.Tensor, _aten.div.Tensor, _aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The activation that ends with ``node``."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.dtype not in _TAKEN:
            return None
        for x, nodes in _cuts(node):
            source = terms.tensor(x)
            if source is None or not same_numbers(source.shape, value.shape):
                return None
            if source.dtype != value.dtype or not any(terms.calls(one, *_CURVES) for one in nodes):
                continue
            build = _build(nodes, x)
            if build is not None:
                return Proposal((x,), (node,), (build,))
        return None


FORM = _Activation()
