"""Runs a graph under capture, node by node, so that an error can name the node; makes the task groups that replays update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from npugraph_ex.aclgraph.capture_spans import AvoidSpans, Span, span_of
from npugraph_ex.aclgraph.host_arguments import registered
from npugraph_ex.aclgraph.host_updates import UpdatePlan
from npugraph_ex.aclgraph.operator_contracts import ContractInterpreter
from npugraph_ex.aclgraph.scopes import GraphFunction
from npugraph_ex.aclgraph.updates import Updates


class Recording(ContractInterpreter):
    """One run of a graph under capture.

    Args:
        gm: the graph.
        plan: the calls whose host arguments replays update.
        around: prepares streams and scopes for the run, see `scopes.around`.
        avoid: addresses where no result may lie; None if there are none.

    Attributes:
        updates: the task groups made so far; None if replays update nothing.
        written: the addresses of everything that the operators returned, with the nodes that returned it.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        plan: UpdatePlan | None,
        around: Callable[[GraphFunction], GraphFunction],
        avoid: AvoidSpans | None = None,
    ) -> None:
        super().__init__(gm)
        self.updates = Updates(plan) if plan is not None else None
        self.written: dict[Span, list[fx.Node]] = {}
        self._avoid = avoid
        self._calls = plan.calls if plan is not None else {}
        self._around = around

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph and return its outputs."""
        try:
            return self._around(partial(self.run, enable_io_processing=False))(*inputs)
        finally:
            self.env.clear()  # otherwise this object would count as a reference to the results

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and note where its result lies."""
        occupied = self._avoid.occupy(n) if self._avoid is not None else []
        result = self._run_node(n)
        occupied.clear()
        if n.op == "call_function":
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "npu":
                    self.written.setdefault(span_of(leaf.untyped_storage()), []).append(n)
        return result

    def _run_node(self, n: fx.Node) -> Any:
        """Run one node. A call that replays update becomes a task group."""
        names, entry = self._calls.get(n), registered(n.target)
        if self.updates is None or names is None or entry is None or not isinstance(n.target, OpOverload):
            return super().run_node(n)
        self._at = n
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.updates.capture(n.target, entry, names, args, kwargs)
