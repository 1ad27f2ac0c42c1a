"""Runs a graph under capture, node by node, so that what the device refuses can be named, and groups what replays update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from npugraph_ex.aclgraph.footprint import Elsewhere, Span, span_of
from npugraph_ex.aclgraph.host_arguments import registered
from npugraph_ex.aclgraph.host_updates import UpdatePlan
from npugraph_ex.aclgraph.promises import CheckedRun
from npugraph_ex.aclgraph.scopes import Runner
from npugraph_ex.aclgraph.updates import Updates


class Recording(CheckedRun):
    """One run of a graph under capture.

    Args:
        gm: the graph.
        plan: the calls that take host arguments anew at each replay.
        around: what has to happen around the run, see `scopes.around`.
        elsewhere: where results may not lie; None where they may lie anywhere.

    Attributes:
        updates: the task groups made so far; None where nothing is updated.
        written: where everything that its operators returned lies, and which nodes returned it.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        plan: UpdatePlan | None,
        around: Callable[[Runner], Runner],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        super().__init__(gm)
        self.updates = Updates(plan) if plan is not None else None
        self.written: dict[Span, list[fx.Node]] = {}
        self._elsewhere = elsewhere
        self._calls = plan.calls if plan is not None else {}
        self._around = around

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph and return its outputs."""
        try:
            return self._around(partial(self.run, enable_io_processing=False))(*inputs)
        finally:
            self.env.clear()  # or this object would count as a holder of the results

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and note where its result lies."""
        held = self._elsewhere.make_room(n) if self._elsewhere is not None else []
        result = self._run_node(n)
        held.clear()
        if n.op == "call_function":
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "npu":
                    self.written.setdefault(span_of(leaf.untyped_storage()), []).append(n)
        return result

    def _run_node(self, n: fx.Node) -> Any:
        """Run one node; a call that is updated becomes a task group."""
        names, entry = self._calls.get(n), registered(n.target)
        if self.updates is None or names is None or entry is None or not isinstance(n.target, OpOverload):
            return super().run_node(n)
        self._at = n
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.updates.capture(n.target, entry, names, args, kwargs)
