"""Runs a traced graph on the CPU in float64: the reference that every floating-point result is judged by.

Every floating-point tensor is float64 whatever dtype the graph gives it; integers are exact. npu operators compute
through ``npugraph_ex.reference``. A tensor that was quantised carries the value that it had before rounding, through
views and copies, because its judge needs it.

With ``noise``, each result that eager mode would round to dtype d is multiplied by 1 + u*xi, u the unit roundoff of d
and xi uniform in [-1, 1]. How far results move under that is how much eager mode's roundings are worth (stochastic
arithmetic: Vignes, 1993).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.reference import KERNELS, before_rounding
from npugraph_ex.testing.formats import FORMATS

RUNS_WITH_NOISE = 4
_MOVES_DATA = (
    "view",
    "transpose",
    "permute",
    "slice",
    "select",
    "expand",
    "squeeze",
    "unsqueeze",
    "clone",
    "alias",
    "t",
)
_WIDE = torch.float64


class ReferenceUnavailableError(NotImplementedError):
    """The float64 reference does not know an operator of the graph."""


@dataclass(frozen=True)
class Reference:
    """What the graph computes.

    Attributes:
        values: the outputs, then the inputs after the call; floating-point ones float64.
        quotients: for each of these, the value before it was quantised, or None.
    """

    values: tuple[Any, ...]
    quotients: tuple[torch.Tensor | None, ...]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu()
        return host.to(_WIDE) if host.dtype.is_floating_point else host
    return value


def _host_arguments(value: Any) -> Any:
    """An argument for the CPU in float64: devices and narrow floating-point dtypes are replaced."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return _WIDE
    return value


def only_moves(target: torch._ops.OpOverload) -> bool:
    """Whether an operator rounds nothing, because it only views or copies."""
    return target.is_view or target._schema.name.split("::")[1] in _MOVES_DATA


class _Interpreter(fx.Interpreter):
    """One run of the graph in float64."""

    def __init__(self, gm: fx.GraphModule, noise: torch.Generator | None, forced: Mapping[str, Any]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._noise = noise
        self._forced = forced
        self.quotients: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "call_function":
            return value
        self._follow_quotient(n, value)
        forced = self._forced.get(n.name)
        if forced is None:
            return value
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            return value.copy_(_widened(forced))  # what it wrote is seen through every alias
        # A copy, because the graph may write it.
        return pytree.tree_map(lambda leaf: _widened(leaf).clone(), forced)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        args, kwargs = pytree.tree_map(_host_arguments, (args, kwargs))
        if target.namespace == "npu":
            return self._npu(target, args, kwargs)
        try:
            return target(*args, **kwargs)
        except NotImplementedError as error:
            raise ReferenceUnavailableError(f"the float64 reference cannot run {target} on the CPU: {error}") from error

    def _npu(self, target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = KERNELS.get(target._schema.name)
        if kernel is None:
            raise ReferenceUnavailableError(
                f"npugraph_ex.reference.KERNELS has no {target._schema.name}; add it there."
            )
        return kernel(*args, **kwargs)

    def _follow_quotient(self, node: fx.Node, value: Any) -> None:
        """Keep the value before rounding of what ``node`` produced, if it was quantised."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.name in before_rounding:
            args, kwargs = pytree.tree_map(_host_arguments, self.fetch_args_kwargs_from_env(node))
            self.quotients[node] = before_rounding[target._schema.name](*args, **kwargs)
            return
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in self.quotients:
            return
        if target is operator.getitem:
            part = self.quotients[source][node.args[1]]  # type: ignore[index]
            if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
                self.quotients[node] = part
        elif isinstance(target, torch._ops.OpOverload) and target._schema.name.split("::")[1] in _MOVES_DATA:
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            self.quotients[node] = target(self.quotients[source], *args[1:], **kwargs)


class _NoisyInterpreter(_Interpreter):
    """One run in which results are moved as eager mode's roundings move them."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self._forced or not isinstance(n.target, torch._ops.OpOverload) or only_moves(n.target):
            return value
        pytree.tree_map(self._perturb, value, n.meta.get("val"))
        return value

    def _perturb(self, value: Any, fake: Any) -> None:
        shape = FORMATS.get(fake.dtype) if isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor) else None
        if shape is None or value.dtype != _WIDE or value.numel() == 0:
            return
        xi = torch.rand(value.shape, generator=self._noise, dtype=_WIDE) * 2 - 1
        value.add_(value * (shape.roundoff * xi) + shape.tiniest * xi / 2)


def _run(
    gm: fx.GraphModule, inputs: Sequence[Any], noise: torch.Generator | None, forced: Mapping[str, Any]
) -> Reference:
    arguments = _copies(inputs)
    interpreter = (_Interpreter if noise is None else _NoisyInterpreter)(gm, noise, forced)
    with torch.no_grad():
        outputs = pytree.tree_leaves(interpreter.run(*arguments), is_leaf=lambda leaf: leaf is None)
    (output,) = gm.graph.find_nodes(op="output")
    nodes = pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    quotients = [interpreter.quotients.get(node) if isinstance(node, fx.Node) else None for node in nodes]
    values = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in (*outputs, *arguments))
    return Reference(values, (*quotients, *[None] * len(arguments)))


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Float64 copies of the inputs, which share memory where the inputs do and have the same strides."""
    bases: dict[int, torch.Tensor] = {}
    copies: list[Any] = []
    for tensor in inputs:
        if not isinstance(tensor, torch.Tensor):
            copies.append(tensor)
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr() or id(tensor)
        if key not in bases:
            elements = storage.nbytes() // tensor.element_size()
            bases[key] = _widened(tensor.as_strided((elements,), (1,), 0)).clone()
        copies.append(bases[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return copies


def run_reference(gm: fx.GraphModule, inputs: Sequence[Any], *, forced: Mapping[str, Any] | None = None) -> Reference:
    """Run ``gm`` in float64.

    Args:
        gm: a graph of ATen and npu operators, as traced from the original program, with ``meta["val"]``.
        inputs: on any device, of the graph's own dtypes; not changed.
        forced: values to continue with in place of what a node computes, by node name: what a candidate quantised to,
            and what was computed before the part that is judged.

    Raises:
        ReferenceUnavailableError: the graph has an operator without a reference.
    """
    return _run(gm, inputs, None, forced or {})


@dataclass(frozen=True)
class Spread:
    """How far roundings move each value and each quotient of a ``Reference``; None for what is not floating point."""

    values: tuple[torch.Tensor | None, ...]
    quotients: tuple[torch.Tensor | None, ...]


def run_spread(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    reference: Reference,
    *,
    seed: int = 0,
    forced: Mapping[str, Any] | None = None,
) -> Spread:
    """Run ``gm`` several times with noise; see ``pooled`` for what becomes of the differences."""
    generator = torch.Generator().manual_seed(seed)
    runs = [_run(gm, inputs, generator, forced or {}) for _ in range(RUNS_WITH_NOISE)]
    return Spread(
        tuple(_spread(base, [run.values[i] for run in runs]) for i, base in enumerate(reference.values)),
        tuple(_spread(base, [run.quotients[i] for run in runs]) for i, base in enumerate(reference.quotients)),
    )


def _spread(base: Any, noisy: Sequence[Any]) -> torch.Tensor | None:
    if not isinstance(base, torch.Tensor) or base.dtype != _WIDE or base.numel() == 0:
        return None
    return pooled(base, torch.stack([(value - base).abs().nan_to_num(posinf=0.0) for value in noisy]).amax(0))


def pooled(base: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """``moved``, or what is usual in its row relative to the values, whichever is larger.

    A few random runs leave some elements unmoved by luck. Elements of one row went through the same roundings, so the
    row's root mean square of the relative movement is a fair lower bound for each of them.
    """
    relative = torch.where(base != 0, moved / base.abs(), 0.0).nan_to_num(posinf=0.0).clamp(max=1.0)
    usual = relative.square().mean(dim=-1, keepdim=True).sqrt() if base.dim() else relative
    return torch.maximum(moved, usual * base.abs().nan_to_num(posinf=0.0))
