"""The functional collectives of torch.distributed between emulated processes on one machine, with gloo underneath.

Each is a kernel like any other: a task on the caller's stream, which may be captured and replayed. It communicates with the
other processes when it runs. A group with the backend HCCL gets a second group of the same processes on gloo at its first
collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from npu_emulator.kernels.generic import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

    from npu_emulator.launch import Launcher

__all__ = ["collective_kernels"]

_NAMESPACE = "_c10d_functional"
_twins: dict[str, tuple[Any, Any]] = {}
"""By a group's name: the group, and the group of the same processes on gloo."""


def collective_kernels(launcher: Launcher) -> dict[str, Callable[..., Any]]:
    """Return the kernels by operator name; none if torch was built without torch.distributed."""
    if not torch.distributed.is_available():
        return {}
    started = _Started()
    packets: dict[str, Any] = {name: getattr(torch.ops._c10d_functional, name, None) for name in _COMPUTE}  # noqa: SLF001 - the operators' namespace
    kernels: dict[str, Callable[..., Any]] = {
        f"{_NAMESPACE}::{name}": _Collective(packet.default, launcher, _COMPUTE[name], started)
        for name, packet in packets.items()
        if packet is not None  # an older torch has fewer
    }
    send, receive = _Send(launcher), _Receive(launcher, started)
    peers: dict[str, Callable[..., Any]] = {
        "isend": send,
        "irecv": receive,
        "batch_p2p_ops": _batch(send, receive),
        "wait_tensor": started.wait,
    }
    return {**kernels, **{f"{_NAMESPACE}::{name}": kernel for name, kernel in peers.items()}}


class _Started:
    """Collectives without a wait so far: a wait on another stream has to come after them."""

    def __init__(self) -> None:
        self._events: dict[int, tuple[int, torch.npu.Event]] = {}

    def note(self, results: object) -> None:
        """Note that the current stream's last work computes these tensors."""
        stream = torch.npu.current_stream()
        event = torch.npu.Event()
        event.record(stream)
        for tensor in tree_leaves(results):
            self._events[tensor.data_ptr()] = stream.npu_stream, event

    def wait(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the current stream wait for the collective that computes a tensor, and return that tensor."""
        stream, event = self._events.pop(tensor.data_ptr(), (None, None))
        here = torch.npu.current_stream()
        if event is not None and stream != here.npu_stream:
            here.wait_event(event)
        return tensor


class _Collective(Kernel):
    """A kernel that communicates with other processes."""

    def __init__(self, op: OpOverload, launcher: Launcher, compute: Callable[..., Any], started: _Started) -> None:
        super().__init__(op, launcher, compute)
        self._started = started

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the collective; its result is valid after a wait."""
        results = super().__call__(*args, **kwargs)
        self._started.note(results)
        return results


# -- what each computes, on CPU tensors ---------------------------------------------------------------------------------


def _on_host(group: Any) -> Any:
    """A group of the same processes that can send CPU tensors; `group` is an object or a name."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
    try:
        group._get_backend(torch.device("cpu"))  # noqa: SLF001 - there is no public way to ask
    except RuntimeError:
        known, twin = _twins.get(group.group_name, (None, None))
        if known is not group:
            ranks = dist.get_process_group_ranks(group)
            twin = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            _twins[group.group_name] = group, twin
        return twin
    return group


def _all_reduce_(tensor: torch.Tensor, reduce_op: str, group_name: Any) -> torch.Tensor:
    import torch.distributed as dist

    group = _on_host(group_name)
    operation = "sum" if reduce_op.lower() == "avg" else reduce_op.lower()  # gloo has no mean
    whole = tensor.contiguous()
    dist.all_reduce(whole, getattr(dist.ReduceOp, operation.upper()), group)
    if reduce_op.lower() == "avg":
        whole.div_(group.size())
    return tensor if whole is tensor else tensor.copy_(whole)


def _all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: Any) -> torch.Tensor:
    return _all_reduce_(tensor.clone(memory_format=torch.contiguous_format), reduce_op, group_name)


def _broadcast_(tensor: torch.Tensor, src: int, group_name: Any) -> torch.Tensor:
    import torch.distributed as dist

    whole = tensor.contiguous()
    dist.broadcast(whole, group_src=src, group=_on_host(group_name))
    return tensor if whole is tensor else tensor.copy_(whole)


def _broadcast(tensor: torch.Tensor, src: int, group_name: Any) -> torch.Tensor:
    return _broadcast_(tensor.clone(memory_format=torch.contiguous_format), src, group_name)


def _all_gather(tensor: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    import torch.distributed as dist

    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group_size)]
    dist.all_gather(parts, tensor.contiguous(), _on_host(group_name))
    return torch.cat(parts)


def _reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_size: int, group_name: Any) -> torch.Tensor:
    mine: int = _on_host(group_name).rank()
    return _all_reduce(tensor, reduce_op, group_name).chunk(group_size)[mine]


def _all_to_all(
    tensor: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: Any
) -> torch.Tensor:
    import torch.distributed as dist

    result: torch.Tensor = tensor.new_empty((sum(output_split_sizes), *tensor.size()[1:]))
    dist.all_to_all_single(
        result, tensor.contiguous(), list(output_split_sizes), list(input_split_sizes), _on_host(group_name)
    )
    return result


class _Send:
    """`isend`: the peer may receive later, so a copy is sent."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._number = launcher.number("_c10d_functional.isend")
        self._underway: list[tuple[Any, torch.Tensor]] = []

    def __call__(self, tensor: torch.Tensor, dst: int, tag: int, group_name: Any) -> torch.Tensor:
        """Send a tensor to the process of rank `dst`; return a token, which needs no wait."""
        view = self._launcher.view(tensor)

        def body() -> None:
            import torch.distributed as dist

            copy = view.clone(memory_format=torch.contiguous_format)
            self._underway = [(work, kept) for work, kept in self._underway if not work.is_completed()]
            peer = _rank_in(group_name, dst)
            self._underway.append((dist.isend(copy, group=_on_host(group_name), tag=tag, group_dst=peer), copy))

        self._launcher.launch("_c10d_functional.isend", self._number, tensor.device.index, body, [view], [])
        return tensor.new_empty(0)


class _Receive:
    """`irecv`: fills its argument and returns it, although its schema does not say so."""

    def __init__(self, launcher: Launcher, started: _Started) -> None:
        self._launcher = launcher
        self._number = launcher.number("_c10d_functional.irecv")
        self._started = started

    def __call__(self, tensor: torch.Tensor, src: int, tag: int, group_name: Any) -> torch.Tensor:
        """Receive from the process of rank `src`."""
        view = self._launcher.view(tensor)

        def body() -> None:
            import torch.distributed as dist

            whole = torch.empty_like(view, memory_format=torch.contiguous_format)
            dist.recv(whole, group=_on_host(group_name), tag=tag, group_src=_rank_in(group_name, src))
            view.copy_(whole)

        self._launcher.launch("_c10d_functional.irecv", self._number, tensor.device.index, body, [], [view])
        self._started.note(tensor)
        return tensor


def _batch(send: _Send, receive: _Receive) -> Callable[..., list[torch.Tensor]]:
    """`batch_p2p_ops`: several of both. Sends never wait for their peer, so peers may list them in any order."""

    def run(
        op_list: list[str], peer_list: list[int], tag_list: list[int], tensors: list[torch.Tensor], group_name: Any
    ) -> list[torch.Tensor]:
        results: dict[int, torch.Tensor] = {}
        for kind, kernel in (("isend", send), ("irecv", receive)):
            for position, name in enumerate(op_list):
                if name == kind:
                    results[position] = kernel(tensors[position], peer_list[position], tag_list[position], group_name)
        return [results[position] for position in range(len(op_list))]

    return run


def _rank_in(group: Any, rank: int) -> int:
    """A peer's rank in the group; the operators name peers by their rank among all processes."""
    import torch.distributed as dist

    return int(dist.get_group_rank(_on_host(group), rank))


def _each(one: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """The form of a collective that takes several tensors."""

    def several(tensors: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
        return [one(tensor, *how) for tensor in tensors]

    return several


def _out(one: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The form of a collective that writes into an argument."""

    def into(*args: Any, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(one(*args))

    return into


_COMPUTE: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_,
    "all_reduce_coalesced": _each(_all_reduce),
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _out(_all_gather),
    "all_gather_into_tensor_coalesced": _each(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _out(_reduce_scatter),
    "reduce_scatter_tensor_coalesced": _each(_reduce_scatter),
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "broadcast_": _broadcast_,
}
