"""The kernel that serves almost every operator: metadata now, values as a task on the stream.

Shapes come from the operator's meta kernel, memory from torch_npu's own allocator, and values from the operator's CPU
kernel (or a reference function) on CPU tensors that share the device's memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from npu_emulator.kernels.arguments import Bound, bind
from npu_emulator.kernels.metadata import Given, Like, Likes, MetadataCache, on_meta
from npu_emulator.kernels.registry import CONSTRAINTS, WORK
from npu_emulator.kernels.widening import widened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

    from npu_emulator.launch import Launcher

__all__ = ["Kernel", "argument_of"]

_HOST_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_OVERWRITERS = frozenset(
    [
        "aten::fill_",
        "aten::zero_",
        "aten::random_",
        "aten::normal_",
        "aten::uniform_",
        "aten::bernoulli_",
        "aten::exponential_",
        "aten::log_normal_",
        "aten::cauchy_",
        "aten::geometric_",
        "aten::_foreach_zero_",
        "aten::_foreach_copy_",
    ]
)
"""In-place operators that do not look at what they overwrite."""
_INDEXING = frozenset({"aten::index", "aten::_unsafe_index"})
"""Tagged as if their shape always depended on values; it does for masks alone, whose elements have to be counted."""
_TAKING_HOST_TENSORS = frozenset(
    [
        "aten::index",
        "aten::_unsafe_index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index_put",
        "aten::tensor_split",
        "aten::_pack_padded_sequence",
        "aten::_pack_padded_sequence_backward",
    ]
)
"""ATen operators for which torch allows indices, sections or lengths on the host beside tensors of the device."""
_NUMBERS = (bool, int, float, complex)
_MASKS = frozenset({torch.bool, torch.uint8})
_DEVICES = [torch.device("npu", index) for index in range(16)]


def _index(bound: Bound) -> int:
    """Return the device that the arguments live on or ask for, else the current one."""
    return bound.device if bound.device >= 0 else torch.npu.current_device()


def _has_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of the indices of an indexing operator is a mask."""
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    return any(index is not None and index.dtype in _MASKS for index in indices)


def _not_numbers(op: OpOverload) -> frozenset[int]:
    """The positions of tensors that may come as numbers, which the operator refuses.

    torch's dispatcher gives a Python kernel a number where another operator passes one as a tensor, as the overload for a scalar
    does (`x.bitwise_or_(6)`). Most operators take it, as `add` does.
    """
    packet = op.overloadpacket
    takes_numbers = torch._C._should_allow_numbers_as_tensors  # noqa: SLF001 - torch's own list of those that take them
    if op.namespace != "aten" or takes_numbers(packet.__name__):
        return frozenset()
    if not any("scalar" in name.lower() for name in packet.overloads()):
        return frozenset()
    types = [str(argument.type) for argument in op._schema.arguments]
    return frozenset(position for position, kind in enumerate(types) if kind == "Tensor")


def _without_numbers(args: tuple[Any, ...], places: frozenset[int]) -> tuple[Any, ...]:
    """The arguments, with a scalar tensor for each number in one of the places: exact beside float64, else of the usual type."""
    if not any(isinstance(args[place], _NUMBERS) for place in places if place < len(args)):
        return args
    exact = any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in args)
    return tuple(
        torch.tensor(value, dtype=torch.float64 if exact and isinstance(value, float) else None)
        if place in places and isinstance(value, _NUMBERS)
        else value
        for place, value in enumerate(args)
    )


class Kernel:
    """One operator overload on the emulated device.

    `compute` has the operator's signature, takes CPU tensors and returns CPU tensors; by default it is the operator itself,
    whose CPU kernel then does the work. An operator that writes to an argument writes to the shared memory directly.
    """

    def __init__(self, op: OpOverload, launcher: Launcher, compute: Callable[..., Any] | None = None) -> None:
        """Prepare a kernel; `compute` defaults to the operator's own CPU kernel."""
        self.op = op
        self.name = str(op)
        self.compute = compute or widened(op)
        self._brought = compute is not None
        self._constraints: Callable[..., None] | None = getattr(compute, CONSTRAINTS, None)
        self._work: Callable[..., tuple[float, float]] | None = getattr(compute, WORK, None)
        self._launcher = launcher
        self._number = launcher.number(self.name)
        self._metadata = MetadataCache(op, compute)
        schema = op._schema  # the public door to a schema
        self._written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # An out variant resizes what it writes, where the shape of the result is known or the function resizes it.
        self._is_out_variant = any(argument.is_out for argument in schema.arguments)
        self._overwritten = [place for place in self._written if place[1] == "out" or schema.arguments[place[0]].is_out]
        # Batch norm and its like write to an argument and return something else; most writers return what they wrote.
        self._returns_written = all(value.alias_info is not None for value in schema.returns)
        self._takes_host = not schema.name.startswith("aten::") or schema.name in _TAKING_HOST_TENSORS
        self._indexes = schema.name in _INDEXING
        self._only_overwrites = schema.name in _OVERWRITERS
        self._not_numbers = _not_numbers(op)
        self._returns = len(schema.returns)
        tensors_only = all(str(value.type) in {"Tensor", "Tensor[]", "List[Tensor]"} for value in schema.returns)
        self._reads_host = bool(_HOST_DEPENDENT & set(op.tags)) or not tensors_only

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the operator and return its (not yet computed) outputs."""
        if self._constraints is not None:
            self._constraints(*args, **kwargs)
        if self._not_numbers:
            args = _without_numbers(args, self._not_numbers)
        if self._written and self._returns_written:
            return self._launch_writing(args, kwargs)
        bound = bind(args, kwargs, self._launcher.shared_view)
        if bound.mixed:
            self._refuse_mixed(bound)
        if self._reads_host and not (self._indexes and not _has_mask(args, kwargs)):
            return self._run_on_host(bound, args, kwargs)
        try:
            likes = self._metadata.outputs(bound.key, args, kwargs)
        except RuntimeError:  # NotImplementedError included: no meta kernel, or one that needs values
            if torch.npu.is_current_stream_capturing():
                raise
            return self._run_on_host(bound, args, kwargs)
        return self._launch_pure(bound, args, kwargs, likes)

    def _bind(self, bound: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:  # noqa: ARG002 - for subclasses
        """Return what computes this one launch."""
        return self.compute

    def _work_of(self, bound: Bound) -> Callable[[], tuple[float, float]] | None:
        """Return what gives the operations of this one launch, if its kernel tells them."""
        return None if self._work is None else partial(self._work, *bound.args, **bound.kwargs)

    def _refuse_mixed(self, bound: Bound) -> None:
        """Say what torch says on hardware, where a kernel cannot reach the host's memory."""
        if not self._takes_host:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, npu:{bound.device} and "
                f"cpu! ({self.name}; move the tensor with .npu() first)"
            )

    # -- pure operators -------------------------------------------------------------------------------------------------

    def _launch_pure(self, bound: Bound, args: Any, kwargs: Any, likes: Any) -> Any:
        index = _index(bound)
        device = _DEVICES[index]
        if type(likes) is Likes:
            view = self._launcher.output_view
            each = likes.each
            made = [torch.empty_strided(like.size, like.stride, dtype=like.dtype, device=device) for like in each]
            targets = [view(output, like) for output, like in zip(made, each, strict=True)]
            body = _PureBody(self._bind(bound, args, kwargs), bound, targets, likes)
            work = self._work_of(bound)
            if self._written:  # beside what it returns
                places = [argument_of(bound.args, bound.kwargs, *place) for place in self._written]
                targets = [*targets, *_tensors(places)]
            fresh = not self._written
            self._launcher.launch(self.name, self._number, index, body, bound.reads, targets, fresh=fresh, work=work)
            return made[0] if likes.single else tuple(made)
        outputs = tree_map(lambda like: _allocate(like, device), likes, is_leaf=lambda item: isinstance(item, Like))
        # A masked output (a gradient that nobody wants) is None, and keeps its place.
        places = [
            self._launcher.shared_view(leaf) if isinstance(leaf, torch.Tensor) else None
            for leaf in tree_leaves(outputs)
        ]
        targets = [place for place in places if place is not None]
        compute = self._bind(bound, args, kwargs)

        def store() -> None:
            _store(tree_leaves(compute(*bound.args, **bound.kwargs)), places)

        work = self._work_of(bound)
        self._launcher.launch(self.name, self._number, index, store, bound.reads, targets, fresh=True, work=work)
        arguments = tree_leaves((args, kwargs))
        return tree_map(lambda value: arguments[value.leaf] if isinstance(value, Given) else value, outputs)

    # -- in-place and out variants --------------------------------------------------------------------------------------

    def _launch_writing(self, args: Any, kwargs: Any) -> Any:
        if self._is_out_variant and not self._resize_outputs(args, kwargs) and self._can_write_from_host():
            return self._write_from_host(args, kwargs)
        # Fresh views: a CPU kernel may resize what it writes to, and a view shared between launches must stay as it is.
        bound = bind(args, kwargs, self._launcher.view)
        if bound.mixed:
            self._refuse_mixed(bound)
        index = _index(bound)
        if self._reads_host:
            self._launcher.wait(index, self.name)
        compute = self._bind(bound, args, kwargs)
        targets = _tensors([argument_of(bound.args, bound.kwargs, *place) for place in self._written])
        self._launcher.launch(
            self.name,
            self._number,
            index,
            lambda: compute(*bound.args, **bound.kwargs),
            self._reads(bound, targets),
            targets,
            work=self._work_of(bound),
        )
        if self._returns == 0:
            return None
        written = [argument_of(args, kwargs, *place) for place in self._written]
        return written[0] if self._returns == 1 else tuple(written[: self._returns])

    def _reads(self, bound: Bound, targets: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the device memory whose values matter: an out variant and a fill do not read what they overwrite."""
        if not self._only_overwrites:
            if not self._overwritten:
                return bound.reads
            targets = _tensors([argument_of(bound.args, bound.kwargs, *place) for place in self._overwritten])
        return [seen for seen in bound.reads if all(seen is not target for target in targets)]

    def _resize_outputs(self, args: Any, kwargs: Any) -> bool:
        """Give `out=` arguments the shape of the result, as every out variant does; tell whether the shape is known."""
        if self._brought:
            self._resize_as_brought(args, kwargs)
            return True
        try:
            likes = self._metadata.outputs(None, args, kwargs)
        except NotImplementedError:
            return False  # no meta kernel
        except RuntimeError:  # one in Python may be stricter than the kernels: these decide, and refuse
            if torch.npu.is_current_stream_capturing():
                raise
            return False
        outs = [argument_of(args, kwargs, *place) for place in self._written]
        wanted = likes.each if type(likes) is Likes else tree_leaves(likes, is_leaf=lambda item: isinstance(item, Like))
        for out, like in zip(tree_leaves(outs), wanted, strict=False):
            if isinstance(like, Like) and tuple(out.size()) != like.size:
                out.resize_(like.size)
        return True

    def _resize_as_brought(self, args: Any, kwargs: Any) -> None:
        """Give `out=` arguments the shapes that the brought function gives their meta twins; none, if it cannot run on those."""
        meta_args, meta_kwargs = tree_map(on_meta, args), tree_map(on_meta, kwargs)
        try:
            self.compute(*meta_args, **meta_kwargs)
        except Exception:  # noqa: BLE001 - a function that looks at values fills what it is given, as it is
            return
        for place in self._written:
            twins = tree_leaves(argument_of(meta_args, meta_kwargs, *place))
            for out, twin in zip(tree_leaves(argument_of(args, kwargs, *place)), twins, strict=True):
                if out.size() != twin.size():
                    out.resize_(twin.size())

    def _can_write_from_host(self) -> bool:
        plain = all(str(self.op._schema.arguments[position].type) == "Tensor" for position, _ in self._written)
        return plain and not torch.npu.is_current_stream_capturing()

    def _write_from_host(self, args: Any, kwargs: Any) -> Any:
        """Serve an out variant whose shapes nothing tells beforehand: compute first, then resize and fill what is given."""
        outs = [argument_of(args, kwargs, *place) for place in self._written]
        names = [name for _, name in self._written]
        results = {name: torch.empty(0, dtype=out.dtype) for name, out in zip(names, outs, strict=True)}
        given = {name: value for name, value in kwargs.items() if name not in results}
        bound = bind(args, given, self._launcher.view)
        index = _index(bound)
        self._launcher.wait(index, self.name)
        compute = self._bind(bound, args, kwargs)

        def body() -> None:
            compute(*bound.args, **bound.kwargs, **results)

        self._launcher.launch(self.name, self._number, index, body, bound.reads, [])
        self._launcher.wait(index, self.name)
        for out, result in zip(outs, results.values(), strict=True):
            out.resize_(result.size()).copy_(result)
        return outs[0] if self._returns == 1 else tuple(outs[: self._returns])

    # -- operators whose result the host has to see ---------------------------------------------------------------------

    def _run_on_host(self, bound: Bound, args: Any, kwargs: Any) -> Any:
        """Wait for the inputs, compute, and copy the results to new device memory."""
        index = _index(bound)
        self._launcher.wait(index, self.name)
        results: Any = None
        compute = self._bind(bound, args, kwargs)

        def body() -> None:
            nonlocal results
            results = compute(*bound.args, **bound.kwargs)

        self._launcher.launch(self.name, self._number, index, body, bound.reads, [], work=self._work_of(bound))
        self._launcher.wait(index, self.name)
        return tree_map(lambda value: self._to_device(value, index), results)

    def _to_device(self, value: Any, index: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_DEVICES[index])
        target = self._launcher.view(out)
        self._launcher.launch(self.name, self._number, index, lambda: target.copy_(value), [], [target])
        return out


class _PureBody:
    """What a pure operator does when its turn comes: compute on CPU tensors, store to device memory."""

    __slots__ = ("args", "compute", "kwargs", "likes", "targets")

    def __init__(
        self, compute: Callable[..., Any], bound: Bound, targets: Sequence[torch.Tensor], likes: Likes
    ) -> None:
        self.compute = compute
        self.args = bound.args
        self.kwargs = bound.kwargs
        self.targets = targets
        self.likes = likes

    def __call__(self) -> None:
        results = self.compute(*self.args, **self.kwargs)
        if isinstance(results, torch.Tensor):
            results = (results,)
        elif type(results) is not tuple:
            results = tree_leaves(results)
        if self.likes.confirmed:
            for target, result in zip(self.targets, results, strict=True):
                target.copy_(result)
        else:
            self.likes.confirmed = _store(results, self.targets)


def argument_of(args: Any, kwargs: Any, position: int, name: str) -> Any:
    """Return one argument of a call, given by place or by name."""
    return args[position] if position < len(args) else kwargs.get(name)


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found.extend(_tensors(value))
    return found


def _store(results: Sequence[Any], targets: Sequence[torch.Tensor | None]) -> bool:
    """Write what the CPU computed to device memory; tell whether each target got a result of its size.

    Some operators return fewer or smaller auxiliary outputs on the CPU than their meta kernel announces (batch norm's saved
    statistics in evaluation, embedding_bag's indices); nothing reads those.
    """
    fits = len(results) == len(targets)
    for result, target in zip(results, targets, strict=False):
        if not isinstance(result, torch.Tensor) or target is None:
            fits = False
        elif result.size() == target.size():
            target.copy_(result)
        else:
            fits = False
            if target.numel() != 0 != result.numel():
                target.copy_(result)
    return fits


def _allocate(like: Any, device: torch.device) -> Any:
    if not isinstance(like, Like):
        return like
    return torch.empty_strided(like.size, like.stride, dtype=like.dtype, device=device)
