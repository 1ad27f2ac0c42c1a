"""New host arguments for captured kernels: recorded at capture, launched again when they change.

At capture each call of a registered operator becomes a task group. Before a replay with other values the call is made
again inside an update of its group, which replaces the captured kernel and runs nothing. The update waits for the replays
that were queued before it and the next replay waits for the update, so that no replay sees the values of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex._torch_private import schema, unobserved_execution
from npugraph_ex.aclgraph import _npu_private
from npugraph_ex.aclgraph.host_arguments import HostArguments, relaunched, workspace_operator
from npugraph_ex.aclgraph.host_updates import UpdatePlan
from npugraph_ex.graph.memory.aliases import named_arguments


class _Task:
    """One captured call that can be made again with other host arguments."""

    def __init__(self, call: OpOverload, given: dict[str, Any], host: dict[str, Any], handle: object) -> None:
        self._call, self._given, self._host, self._handle = call, given, host, handle

    def differs(self, host: dict[str, Any]) -> bool:
        """Whether the captured kernel has other values than ``host``."""
        return any(not _equal(value, host[name]) for name, value in self._host.items())

    def update(self, host: dict[str, Any], stream: torch.npu.Stream) -> None:
        """Make the call again, on the current stream, so that the captured kernel gets new values."""
        torch.npu.graph_task_update_begin(stream, self._handle)
        try:
            self._call(**self._given, **host)
        finally:
            torch.npu.graph_task_update_end(stream)
        self._host = {name: _kept(value) for name, value in host.items()}


def _equal(old: Any, new: Any) -> bool:
    return torch.equal(old, new) if isinstance(old, torch.Tensor) else bool(old == new)


def _kept(value: Any) -> Any:
    """A copy of the value, because a caller may write to a tensor later."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class Updates:
    """The task groups of one captured graph. No other graph shares them.

    Args:
        plan: the calls that become task groups.
    """

    def __init__(self, plan: UpdatePlan) -> None:
        self._plan = plan
        self._tasks: list[_Task] = []

    def capture(
        self,
        target: OpOverload,
        entry: HostArguments,
        names: Sequence[str],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make a call of the plan on the current stream, which is being captured, as a task group; return its results.

        Args:
            target: the operator.
            entry: the operator's registration.
            names: its arguments that vary.
            args: the call's positional arguments.
            kwargs: the call's named arguments.
        """
        call, given, results = _relaunchable(target, entry, args, kwargs)
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        with unobserved_execution() if results is not None else nullcontext():
            returned = call(**given)
        handle = torch.npu.graph_task_group_end(stream)
        self._tasks.append(_Task(call, _without(given, names), {name: _kept(given[name]) for name in names}, handle))
        return returned if results is None else results

    def apply(self, inputs: Sequence[Any], stream: torch.npu.Stream) -> None:
        """Give the captured kernels the host arguments among ``inputs``, for the next replay on the current stream.

        Args:
            inputs: the graph's inputs.
            stream: launches the updates; not the current stream.
        """
        values = self._plan.values(*inputs)
        changed = [(task, host) for task, host in zip(self._tasks, values, strict=True) if task.differs(host)]
        if not changed:
            return
        current = torch.npu.current_stream()
        stream.wait_stream(current)
        with torch.npu.stream(stream):
            for task, host in changed:
                task.update(host, stream)
        current.wait_stream(stream)


def _without(given: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The arguments that stay the same in each update.

    Later kernels of the graph may reuse memory that the call has read, so only addresses are kept. The workspace is kept as
    long as the graph lives.
    """
    return {
        name: value
        if name == "workspace"
        else pytree.tree_map_only(torch.Tensor, _npu_private.without_ownership, value)
        for name, value in given.items()
        if name not in names
    }


def _relaunchable(
    target: OpOverload, entry: HostArguments, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[OpOverload, dict[str, Any], Any]:
    """The call's form that writes only into its arguments, its arguments by name, and the results if their memory is new."""
    given = named_arguments(target, args, kwargs)
    call = relaunched(target, entry)
    if call is target:
        return call, given, None
    workspace = workspace_operator(entry)
    if workspace is not None:
        given["workspace"] = workspace(*args, **kwargs)
    results = _allocate(target, args, kwargs)
    taken = {argument.name for argument in schema(target).arguments}
    outs = [argument for argument in schema(call).arguments if argument.name not in taken | {"workspace"}]
    leaves = pytree.tree_leaves(results)
    if len(outs) == 1 and str(outs[0].type) == "List[Tensor]":
        given[outs[0].name] = leaves
    else:
        given.update((argument.name, leaf) for argument, leaf in zip(outs, leaves, strict=True))
    return call, given, results


def _allocate(target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Memory for the results of a functional call."""
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        results = target(*fakes[0], **fakes[1])
    return pytree.tree_map_only(
        torch.Tensor,
        lambda fake: torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device),
        results,
    )
