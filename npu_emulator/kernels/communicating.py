"""Operators that compute and communicate in one: two kernels, and between them an exchange with the group's other ranks.

The kernel of such an operator is a generator function. Once it yields what this rank gives, an object with the fields

- `group`: the name of the HCCL group;
- `given`: the tensors, which are the same on every rank in number, shapes and dtypes;
- `rows`: None, and every rank gets all; or two lists, of the rows that each rank gets from here and those that each one gives;
- `ranks`, `rank`: the size of the group and the rank in it that the arguments name, each None if they do not;
- `alike`: other arguments by name, in which no rank may differ.

It is sent an object with the group's `ranks`, this `rank`, and `parts`: the tensors that each rank gave, by rank. Then it returns
the results. Before the exchange it may not look at values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from npu_emulator.device import Exchanged
from npu_emulator.errors import EmulatorError, address_of
from npu_emulator.frames import said_line
from npu_emulator.kernels.arguments import Bound
from npu_emulator.kernels.generic import Kernel
from npu_emulator.kernels.metadata import Like, Likes, on_meta
from npu_emulator.kernels.recovery import refuse_unsafe
from npu_emulator.kernels.results import allocate, store_results

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch._ops import OpOverload

    from npu_emulator.launch import Launcher

__all__ = ["CommunicatingKernel"]

_WRONG_GROUP = 561002
"""ACLNN_ERR_INNER_TILING_ERROR: the device tiles such an operator by its group's size."""


class _GroupParts(NamedTuple):
    """What the ranks gave."""

    ranks: int
    rank: int
    parts: list[tuple[torch.Tensor, ...]]


class _ExchangePlan(NamedTuple):
    """One call's exchange, in rows: without `rows` all that a rank gives is one row, for each rank."""

    group: str
    ranks: int
    rank: int
    given: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    """The dtype and the shape of each tensor, rows left out."""
    sent: Sequence[int] | None
    taken: Sequence[int]
    what: str

    @property
    def widths(self) -> list[int]:
        """The bytes of a row, by tensor."""
        return [dtype.itemsize * math.prod(shape) for dtype, shape in self.given]

    def pack(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes to send."""
        rows = 1 if self.sent is None else sum(self.sent)
        parts = [
            tensor.contiguous().reshape(rows, math.prod(shape)).view(torch.uint8)
            for tensor, (_, shape) in zip(given, self.given, strict=True)
        ]
        return torch.cat(parts, 1).flatten()

    def unpack(self, received: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """The tensors of each rank."""
        found, widths = [], self.widths
        for rows, part in zip(self.taken, received.split([rows * sum(widths) for rows in self.taken]), strict=True):
            columns = part.view(rows, sum(widths)).split(widths, 1)
            lead = () if self.sent is None else (rows,)
            found.append(
                tuple(
                    column.clone(memory_format=torch.contiguous_format).view(dtype).view(*lead, *shape)
                    for column, (dtype, shape) in zip(columns, self.given, strict=True)
                )
            )
        return found


class CommunicatingKernel(Kernel):
    """One such operator on the emulated device."""

    def __init__(
        self, op: OpOverload, launcher: Launcher, generate: Callable[..., Any], alone: Callable[..., Any] | None = None
    ) -> None:
        """Prepare a kernel; `alone`, a plain function, gives results of the right shapes without a group."""
        super().__init__(op, launcher, alone)
        self._generate = generate
        self._results = f"{self.name} (results)"
        self._results_number = launcher.number(self._results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the two kernels and the exchange; return the outputs, which are not yet computed."""
        if self._launcher.checks_marks():
            refuse_unsafe(args, kwargs)
        if self._constraints is not None:
            self._constraints(*args, **kwargs)
        bound = Bound(args, kwargs, self._launcher.views.shared)
        if bound.mixed:
            self._refuse_mixed(bound)
        plan = self._plan(bound)
        likes = self._metadata.outputs(bound.key, args, kwargs)
        likes = (likes.each[0] if likes.single else likes.each) if type(likes) is Likes else likes
        sent = sum(plan.widths) * (1 if plan.sent is None else sum(plan.sent))
        send = torch.empty(sent, dtype=torch.uint8, device=f"npu:{bound.device}")
        receive = send.new_empty(sum(plan.widths) * sum(plan.taken))
        outputs = tree_map(lambda like: allocate(like, send.device), likes, is_leaf=lambda item: isinstance(item, Like))
        self._launch(bound, plan, send, receive, outputs)
        return outputs

    def _plan(self, bound: Bound) -> _ExchangePlan:
        """Ask the kernel, on meta tensors, what it will give, and compare with the group."""
        args, kwargs = tree_map(on_meta, (bound.args, bound.kwargs))
        asked = next(self._generate(*args, **kwargs))
        group = self._launcher.runtime.group(asked.group, bound.device)
        if group is None:
            raise self._wrong_group(f"no group of npu:{bound.device} has the name {asked.group!r}; ask its process group for "
                                    "the name (get_hccl_comm_name), which also connects its ranks")  # fmt: skip
        rank, ranks = group
        for said, name, true in (
            (asked.ranks, "a group of {} ranks", ranks),
            (asked.rank, "rank {} of the group", rank),
        ):
            if said is not None and said != true:
                raise self._wrong_group(
                    f"the arguments say {name.format(said)}, and this is {name.format(true)} ({asked.group})"
                )
        sent, taken = asked.rows or (None, [1] * ranks)
        given = tuple((tensor.dtype, tuple(tensor.shape[0 if sent is None else 1 :])) for tensor in asked.given)
        shown = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in given)
        alike = ", ".join(f"{name} {value}" for name, value in asked.alike.items())
        name = self.op._schema.name.rpartition("::")[2]
        what = f"{name} of {'' if sent is None else 'rows '}{shown}{f' ({alike})' if alike else ''}"
        return _ExchangePlan(asked.group, ranks, rank, given, sent, taken, what)

    def _wrong_group(self, cause: str) -> RuntimeError:
        return RuntimeError(
            f"{self.name}: {cause}. NPU function error: call {self.op._schema.name.rpartition('::')[2]} failed, error code is "
            f"{_WRONG_GROUP}{said_line()}\n{address_of(_WRONG_GROUP)}"
        )

    def _launch(
        self, bound: Bound, plan: _ExchangePlan, send: torch.Tensor, receive: torch.Tensor, outputs: Any
    ) -> None:
        """Put the three tasks on the current stream."""
        launcher, device = self._launcher, bound.device
        leaves = tree_leaves(outputs, is_leaf=lambda leaf: leaf is None)
        places = [launcher.views.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        seen, given = launcher.views.of(receive), launcher.views.of(send)
        running: list[Generator[Any, Any, Any]] = []

        def give() -> None:
            running[:] = [self._generate(*bound.args, **bound.kwargs)]
            given.copy_(plan.pack(next(running[0]).given))

        def take() -> None:
            try:
                running.pop().send(_GroupParts(plan.ranks, plan.rank, plan.unpack(seen)))
            except StopIteration as finished:
                store_results(tree_leaves(finished.value, is_leaf=lambda leaf: leaf is None), places)
            else:
                raise EmulatorError(f"the kernel of {self.name} yields twice; it may yield once, what this rank gives")

        targets = [place for place in places if place is not None]
        work = self._work_of(bound)
        launcher.launch(self.name, self._number, device, give, bound.reads, [given], fresh=True, work=work)
        row = sum(plan.widths)
        memory = Exchanged(
            send.data_ptr(),
            send.numel(),
            receive.data_ptr(),
            [row * rows for rows in plan.taken],
            None if plan.sent is None else [row * rows for rows in plan.sent],
        )
        code = launcher.runtime.exchange(launcher.stream_of(device), plan.group, device, plan.what, memory)
        if code != 0:
            raise EmulatorError(f"{self.name} could not be launched (error {code}): {launcher.runtime.recent_error()}")
        launcher.launch(self._results, self._results_number, device, take, [*bound.reads, seen], targets, fresh=True)
