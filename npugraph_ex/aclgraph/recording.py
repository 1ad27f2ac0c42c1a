"""Runs a graph under capture, node by node, so that an error can name the node; makes the task groups that replays update."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

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
        makers: the nodes that allocate the memory of results.
        in_bank: makes the allocations of a node in the bank of the results; None to make them with all others.

    Attributes:
        updates: the task groups made so far; None if replays update nothing.
        made: the addresses of the storages that the operators returned.
        results: those that the makers of results returned.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        plan: UpdatePlan | None,
        around: Callable[[GraphFunction], GraphFunction],
        makers: Container[fx.Node] = (),
        in_bank: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        super().__init__(gm)
        self.updates = Updates(plan) if plan is not None else None
        self.made: set[int] = set()
        self.results: set[int] = set()
        self._makers = makers if in_bank is not None else ()
        self._in_bank = in_bank or nullcontext
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
        is_maker = n in self._makers
        with self._in_bank() if is_maker else nullcontext():
            result = self._run_node(n)
        if n.op == "call_function":
            leaves = pytree.tree_leaves(result)
            made = {
                leaf.untyped_storage().data_ptr()
                for leaf in leaves
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "npu"
            }
            self.results |= made - self.made if is_maker else set()
            self.made |= made
        return result

    def _run_node(self, n: fx.Node) -> Any:
        """Run one node. A call that replays update becomes a task group."""
        names, entry = self._calls.get(n), registered(n.target)
        if self.updates is None or names is None or entry is None or not isinstance(n.target, OpOverload):
            return super().run_node(n)
        self._at = n
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.updates.capture(n.target, entry, names, args, kwargs)
