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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Change, Emit, Proposal, Unlike
from npugraph_ex.lifting.trials import on_real_values
from npugraph_ex.operators import PreparedGraph

_aten = torch.ops.aten
_CALLS = frozenset({_aten.silu.default, _aten.gelu.default})
_CURVES = frozenset(
    {_aten.tanh.default, _aten.sigmoid.default, _aten.erf.default, _aten.erfc.default, _aten.exp.default}
)
"""The spelling of each activation has one of these."""
ELEMENTWISE = (
    _CURVES
    | _CALLS
    | {
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
)
_MOST_OPERATORS = 16
_TAKEN = (torch.float16, torch.bfloat16, torch.float32)
_POINTS = torch.linspace(-6, 6, 61, dtype=torch.float64)
_TOLERANCE = 1e-5
"""Of constants such as sqrt(2 / pi), which programs write with 6 digits or more."""
_NEAR = 2.0**-7
"""How far a function is at most that differs in a constant; GELU by an error function and by a sigmoid are 0.02 apart."""


@dataclass(frozen=True)
class Activation:
    """The call that computes ``function`` of one tensor: ``operator(x, **how)``; in a program, ``written``."""

    operator: Any
    written: str
    function: str
    how: Mapping[str, str] = field(default_factory=dict)

    def build(self, emit: Emit, x: fx.Node) -> tuple[fx.Node, ...]:
        """The call."""
        return (emit(self.operator, x, **self.how),)


@dataclass(frozen=True)
class Gated:
    """``activation(gate) * up``, whichever of the factors were multiplied first; ``activated`` are those of the activation."""

    activation: Activation
    activated: terms.Product
    gate: fx.Node
    up: fx.Node


def _candidates() -> Iterator[tuple[Callable[[torch.Tensor], torch.Tensor], Activation]]:
    """Each function, and the call that computes it; looked up late, because torch_npu defines an operator of them."""
    yield (
        lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
        Activation(_aten.gelu.default, "torch.nn.functional.gelu(x)", "x / 2 * (1 + erf(x / sqrt(2)))"),
    )
    cubic = math.sqrt(2 / math.pi), 0.044715
    yield (
        lambda x: x / 2 * (1 + torch.tanh(cubic[0] * (x + cubic[1] * x**3))),
        Activation(
            _aten.gelu.default,
            "torch.nn.functional.gelu(x, approximate='tanh')",
            "x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))",
            {"approximate": "tanh"},
        ),
    )
    yield (
        lambda x: x * torch.sigmoid(1.702 * x),
        Activation(torch.ops.npu.npu_fast_gelu.default, "torch_npu.npu_fast_gelu(x)", "x * sigmoid(1.702 * x)"),
    )
    yield (
        lambda x: x * torch.sigmoid(x),
        Activation(_aten.silu.default, "torch.nn.functional.silu(x)", "x * sigmoid(x)"),
    )


def _cuts(product: terms.Product) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """``(x, nodes)``, nearest first: the product depends on ``x`` alone, through these elementwise operators."""
    region: list[fx.Node] = []
    frontier = {*product.factors, *product.divisors}
    while len(region) < _MOST_OPERATORS:
        if len(frontier) == 1:
            yield next(iter(frontier)), tuple(reversed(region))
        elif not frontier:
            return
        latest = max(frontier)
        if not terms.calls(latest, *ELEMENTWISE):
            return
        frontier.remove(latest)
        frontier.update(latest.all_input_nodes)
        region.append(latest)


@dataclass(frozen=True)
class _Fit:
    """How well an activation computes a function: whether it is the same, and how far it is at most on the points."""

    activation: Activation
    same: bool
    distance: float


def _fit(product: terms.Product, nodes: tuple[fx.Node, ...], x: fx.Node) -> _Fit:
    """The activation that is nearest to the product of factors that ``nodes`` make of ``x``."""
    graph = fx.Graph()
    twins = {x: graph.placeholder("x")}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), twins.__getitem__)
        twins[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    whole: Any = product.scale
    for operator, operands in ((_aten.mul.Tensor, product.factors), (_aten.div.Tensor, product.divisors)):
        for one in operands:
            whole = graph.call_function(
                operator, (twins[one], whole) if operator is _aten.mul.Tensor else (whole, twins[one])
            )
    graph.output(whole)
    with on_real_values():
        found = PreparedGraph(graph, wide=True).run(_POINTS)
        fits = []
        for function, activation in _candidates():
            right = function(_POINTS)
            far = (found - right).abs().nan_to_num(math.inf)
            same = bool((far <= _TOLERANCE * right.abs().clamp(min=_TOLERANCE)).all())
            fits.append(_Fit(activation, same, float(far.max())))
        return min(fits, key=lambda fit: (not fit.same, fit.distance))


def gated(node: fx.Node) -> Gated | None:
    """A product of an activation and of another factor; None where ``node`` is none."""
    parts = terms.product(node) if terms.calls(node, *terms.MULTIPLYING) else terms.Product(1.0, ())
    for position, up in enumerate(parts.factors):
        rest = replace(parts, factors=(*parts.factors[:position], *parts.factors[position + 1 :]))
        for gate, nodes in _cuts(rest):
            curved = any(terms.calls(one, *_CURVES, *_CALLS) for one in nodes)
            found = _fit(rest, nodes, gate) if curved else None
            if found is not None and found.same:
                return Gated(found.activation, rest, gate, up)
    return None


class _ActivationForm:
    """The form."""

    name = "lift_activation"
    ends_with = frozenset({_aten.mul.Tensor, _aten.div.Tensor, _aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The activation that ends with ``node``."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.dtype not in _TAKEN:
            return None
        whole, refusal = terms.Product(1.0, (node,)), None
        for x, nodes in _cuts(whole):
            source = terms.tensor(x)
            if source is None or not same_numbers(source.shape, value.shape):
                break
            if source.dtype != value.dtype or not any(terms.calls(one, *_CURVES) for one in nodes):
                continue
            found = _fit(whole, nodes, x)
            if found.same:
                return Proposal((x,), (node,), (found.activation.build,))
            refusal = refusal or (_nearly(node, x, found) if found.distance <= _NEAR else None)
        return _of_a_factor(node) or refusal or _of_a_symbol(node)


def _of_a_symbol(node: fx.Node) -> Unlike | None:
    """Why a function stays one of whose constants is an input, as Dynamo makes one of `math.pi` with ``dynamic=True``."""
    waiting, region, sources, numbers = [node], set[fx.Node](), set[fx.Node](), set[fx.Node]()
    while waiting and len(region) <= _MOST_OPERATORS:
        one = waiting.pop()
        value = terms.tensor(one)
        if value is not None and not value.dim():
            numbers.add(one)
        elif terms.calls(one, *ELEMENTWISE):
            waiting += [before for before in one.all_input_nodes if before not in region]
            region.add(one)
        else:
            sources.add(one)
    curved = any(terms.calls(one, *_CURVES) for one in region)
    if not curved or len(sources) != 1 or not numbers or not all(map(terms.is_symbol, numbers)):
        return None
    factors = map(terms.core, terms.product(node).factors)
    if not sources.intersection(factors) or any(terms.before_a_cast_back(user) is node for user in node.users):
        return None
    return Unlike(
        node, f"a constant {terms.IS_A_SYMBOL}", lines="torch.compile(..., dynamic=None)   # constants stay numbers"
    )


def _nearly(node: fx.Node, x: fx.Node, found: _Fit) -> Unlike | None:
    """Why a function that is nearly an activation is not lifted; None if a user casts its result back."""
    if any(terms.before_a_cast_back(user) is node for user in node.users):
        return None
    call, written = found.activation, found.activation.written
    reason = (
        f"a constant is another one: between -6 and 6 its values are up to {found.distance:.1g} from {written}, "
        f"which is {call.function}"
    )
    change = Change(
        Proposal((x,), (node,), ()), written.partition("(")[0], lambda one: call.operator(one, **call.how),
        "call that, if its values do, too", f"y = {written}",
    )  # fmt: skip
    return Unlike(node, reason, change)


def _of_a_factor(node: fx.Node) -> Proposal | None:
    """The activation of one factor, where the program multiplied a part of it with the other one first."""
    found, dtype = gated(node), node.meta["val"].dtype
    if found is None or any(terms.product(one) == found.activated for one in node.all_input_nodes):
        return None
    inputs = (found.gate, found.up)
    if any(one.meta["val"].dtype != dtype for one in inputs):
        return None

    def build(emit: Emit, gate: fx.Node, up: fx.Node) -> tuple[fx.Node, ...]:
        return (emit(_aten.mul.Tensor, *found.activation.build(emit, gate), up),)

    return Proposal(inputs, (node,), (build,))


FORM = _ActivationForm()
