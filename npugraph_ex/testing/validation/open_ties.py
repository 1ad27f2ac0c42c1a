"""Whether a replacement is right whichever of several equal elements its operators take first.

A device may break ties in any way, and in another one for other sizes. So where the pattern says which element comes first, as
``argmax`` does, and the replacement does not, as by ``topk``, what one device computes proves nothing: its operators also run
with their input turned around, which takes the other one of two equal elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.testing.oracle.checking import check_optimised
from npugraph_ex.testing.validation.alone import Bench
from npugraph_ex.testing.validation.kinds import leaves_ties, node_leaves_ties
from npugraph_ex.testing.validation.turns import Turn


def wrong_in_another_order(bench: Bench, turns: Iterable[Turn]) -> str:
    """What is wrong where the other one of equal elements comes first, and in which setting; empty if nothing is.

    Args:
        bench: what computes the pattern alone.
        turns: those with few distinct values are tried.
    """
    if leaves_ties(bench.pattern):
        return ""
    for turn in turns:
        found = bench.program_and_graphs(turn) if turn.kind == "few" else None
        if found is None:
            continue
        _, case, graphs = found
        nodes = [node for node in graphs.optimised.graph.nodes if node_leaves_ties(node) and _has_dimension(node)]
        if not nodes or not graphs.outcome_of(case).ok:
            continue  # what is wrong in any order is told by others
        failures = check_optimised(
            case, graphs.traced, _FromBehind(graphs.optimised, nodes).run, graphs.report
        ).failures
        if failures:
            return (
                f"torch does not say which of several equal elements {nodes[0].target} takes first, and its results depend on "
                f"it: with another one of them, for {turn.setting}, {failures[0]}"
            )
    return ""


def _has_dimension(node: fx.Node) -> bool:
    """Whether the operator orders the elements along one dimension of its first argument, which has dimensions."""
    names = {argument.name for argument in _torch_private.schema(node.target).arguments}  # type: ignore[arg-type]
    return "dim" in names and bool(node.args[0].meta["val"].dim())  # type: ignore[union-attr]


class _FromBehind(fx.Interpreter):
    """Runs a graph; some nodes read their input from behind."""

    def __init__(self, gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        super().__init__(gm)
        self._nodes = frozenset(nodes)

    def run_node(self, n: fx.Node) -> Any:
        """As it stands, or from behind."""
        if n not in self._nodes:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return _from_behind(cast("torch._ops.OpOverload", n.target), *args, **kwargs)


def _from_behind(operator: torch._ops.OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Results as the operator's own, in the same layout; among equal elements the last ones come first."""
    _, *arguments = _torch_private.schema(operator).arguments
    given = dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    dim: int = given.get("dim", next(cast("int", one.default_value) for one in arguments if one.name == "dim"))
    own, turned = (operator(one, *args, **kwargs) for one in (x, x.flip(dim)))
    if isinstance(own, torch.Tensor):
        return own.copy_(x.shape[dim] - 1 - turned)
    for result, other in zip(own, (turned[0], x.shape[dim] - 1 - turned[1]), strict=True):
        result.copy_(other)
    return own
