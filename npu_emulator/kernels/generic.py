"""The kernel of almost every operator: metadata at the call, values as a task on the stream.

Shapes come from the operator's meta kernel, memory from torch_npu's own allocator, and values from the operator's CPU
kernel (or a reference function) on CPU tensors that share the device's memory.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from npu_emulator import requests
from npu_emulator.errors import DimensionError
from npu_emulator.kernels.arguments import Bound
from npu_emulator.kernels.declared import as_declared
from npu_emulator.kernels.floats_only import floats_only
from npu_emulator.kernels.formats import as_it_lies
from npu_emulator.kernels.metadata import Given, Like, Likes, MetadataCache, on_meta
from npu_emulator.kernels.moves import Move, is_mover
from npu_emulator.kernels.recovery import refuse_unsafe
from npu_emulator.kernels.refusals import refusing
from npu_emulator.kernels.registry import BY_PROGRAMS, CONSTRAINTS, WORK
from npu_emulator.kernels.results import PureBody, allocate, plain_afterwards, store_results
from npu_emulator.kernels.row_reads import RowReads, reads_rows
from npu_emulator.kernels.widening import WRITTEN_IN_TRAINING, widened

if TYPE_CHECKING:
    from collections.abc import Callable

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
"""In-place operators that do not read the overwritten elements."""
_IGNORING = frozenset(
    f"aten::{name}{ending}" for name in ("addbmm", "addmm", "addmv", "addr", "baddbmm") for ending in ("", "_")
)
"""Operators that ignore the values of their first argument where its factor `beta` is zero."""
_INDEXING = frozenset({"aten::index", "aten::_unsafe_index"})
"""Operators whose tag says that their shape depends on values. That is true only for masks, whose elements have to be counted."""
_TAKING_HOST_TENSORS = frozenset(
    [
        "aten::index",
        "aten::_unsafe_index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index_put",
        "aten::_foreach_addcdiv.Tensor",
        "aten::_foreach_addcdiv_.Tensor",
        "aten::_foreach_addcmul.Tensor",
        "aten::_foreach_addcmul_.Tensor",
        "aten::tensor_split",
    ]
)
"""ATen operators that take indices, factors, sections or lengths on the host together with tensors of the device."""
_KEEPING_SHAPE = frozenset({"aten::arange", "aten::linspace", "aten::logspace", "aten::range"})
"""Operators that keep the shape of an `out` with as many elements as the result."""
_NUMBERS = (bool, int, float, complex)
_MASKS = frozenset({torch.bool, torch.uint8})
_DEVICES = [torch.device("npu", index) for index in range(16)]


def _index(bound: Bound) -> int:
    """Return the device of the arguments, else the current one."""
    return bound.device if bound.device >= 0 else torch.npu.current_device()


def _has_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of the indices of an indexing operator is a mask."""
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    return any(index is not None and index.dtype in _MASKS for index in indices)


def _not_numbers(op: OpOverload) -> frozenset[int]:
    """The positions of tensor arguments that may arrive as numbers although the operator refuses numbers.

    torch's dispatcher passes a number to a Python kernel if another operator passed it as a tensor, as the scalar overload
    does (`x.bitwise_or_(6)`). Most operators accept it, for example `add`.
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
    """The arguments with a scalar tensor for each number at these positions: float64 beside float64, else of the default type."""
    if not any(isinstance(args[place], _NUMBERS) for place in places if place < len(args)):
        return args
    exact = any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in args)
    return tuple(
        torch.tensor(value, dtype=torch.float64 if exact and isinstance(value, float) else None)
        if place in places and isinstance(value, _NUMBERS)
        else value
        for place, value in enumerate(args)
    )


_UNDECLARED = frozenset({"npu", "atb"})
"""Operators of torch_npu, whose schemas leave writes out."""


class Kernel:
    """One operator overload on the emulated device.

    `compute` has the operator's signature, takes CPU tensors and returns CPU tensors; by default it is the operator itself,
    whose CPU kernel then computes. An operator that writes to an argument writes to the shared memory directly.
    """

    def __init__(self, op: OpOverload, launcher: Launcher, compute: Callable[..., Any] | None = None) -> None:
        """Prepare a kernel; `compute` defaults to the operator's own CPU kernel."""
        self.op = op
        self.name = str(op)
        self.compute = widened(op) if compute is None else refusing(op, compute)
        self._brought = compute is not None
        self._is_of_program = compute in BY_PROGRAMS
        self._declares_writes = op.namespace not in _UNDECLARED
        self._writes = tuple(getattr(compute, "writes", ()))
        self._reads_as_it_lies = op.namespace != "aten"
        self._constraints: Callable[..., None] | None = getattr(compute, CONSTRAINTS, None) or floats_only(op)
        self._work: Callable[..., tuple[float, float]] | None = getattr(compute, WORK, None)
        self._reader = Move if is_mover(op) else RowReads if reads_rows(op) else None
        self._launcher = launcher
        self._number = launcher.number(self.name)
        self._metadata = MetadataCache(op, compute)
        schema = op._schema  # the public access to a schema
        self._written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        names, trained = [item.name for item in schema.arguments], WRITTEN_IN_TRAINING.get(schema.name, ())
        self._trained = [(names.index(name), name) for name in trained]
        self._training = names.index("training") if trained else 0
        # An out variant resizes its output if the shape of the result is known or the function resizes it.
        self._is_out_variant = any(argument.is_out for argument in schema.arguments)
        self._overwritten = [place for place in self._written if place[1] == "out" or schema.arguments[place[0]].is_out]
        # Batch norm and the like write to an argument and return other tensors; most writers return the written argument.
        self._returns_written = all(value.alias_info is not None for value in schema.returns)
        self._takes_host = not schema.name.startswith("aten::") or not _TAKING_HOST_TENSORS.isdisjoint(
            (schema.name, op.name())
        )
        self._keeps_shape = schema.name in _KEEPING_SHAPE
        # A CPU kernel may resize what it writes or turn it, but a view that launches share must stay as it is.
        turns = torch.Tag.inplace_view in op.tags or "resize" in schema.name
        keeps = op.namespace == "aten" and not self._is_out_variant and not turns
        self._view_written = launcher.views.shared if keeps else launcher.views.of
        self._indexes = schema.name in _INDEXING
        self._only_overwrites = schema.name in _OVERWRITERS
        self._may_ignore = schema.name in _IGNORING
        self._not_numbers = _not_numbers(op)
        self._returns = len(schema.returns)
        tensors_only = all(str(value.type) in {"Tensor", "Tensor[]", "List[Tensor]"} for value in schema.returns)
        self._reads_host = bool(_HOST_DEPENDENT & set(op.tags)) or not tensors_only

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the operator and return its (not yet computed) outputs."""
        args, kwargs = self.checked(args, kwargs)
        if self._not_numbers:
            args = _without_numbers(args, self._not_numbers)
        if self._written and self._returns_written:
            return self._launch_writing(args, kwargs)
        bound = Bound(args, kwargs, self._launcher.views.shared)
        if bound.mixed:
            self._refuse_mixed(bound)
        if self._may_ignore and not bound.kwargs.get("beta", 1):
            bound.ignore_first()
        if self._reads_host and not (self._indexes and not _has_mask(args, kwargs)) and not self._knows(args, kwargs):
            return self._run_on_host(bound, args, kwargs)
        try:
            likes = self._metadata.outputs(bound.key, args, kwargs)
        except (RuntimeError, IndexError) as error:  # NotImplementedError: no meta kernel, or one that needs values
            if isinstance(error, IndexError) and not self._brought:
                raise DimensionError(str(error)) from None
            if torch.npu.is_current_stream_capturing():
                raise
            return self._run_on_host(bound, args, kwargs)
        return self._launch_pure(bound, args, kwargs, likes)

    def _knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG002 - for subclasses
        """Tell whether the host knows the numbers among the results without waiting for the device."""
        return False

    def checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the device reads them, and raise for what it refuses before the launch."""
        if self._launcher.checks_marks():
            refuse_unsafe(args, kwargs)
        if self._reads_as_it_lies:
            args, kwargs = as_it_lies(self.name, args, kwargs, writes=bool(self._written or self._writes))
        if self._constraints is not None:
            self._constraints(*args, **kwargs)
        return args, kwargs

    def _bind(self, bound: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:  # noqa: ARG002 - for subclasses
        """Return the function that computes this launch."""
        return self.compute

    def _work_of(self, bound: Bound) -> Callable[[], tuple[float, float]] | None:
        """Return the function that counts the operations of this launch, if its kernel has one."""
        return None if self._work is None else partial(self._work, *bound.args, **bound.kwargs)

    def _move_of(self, bound: Bound) -> Move | RowReads | None:
        """Return the call for a check of memory, if it only moves elements or reads rows."""
        if self._reader is None or self._launcher.memory is None:
            return None
        return self._reader(self.op, bound.args, bound.kwargs)

    def _refuse_mixed(self, bound: Bound) -> None:
        """Raise torch's error on hardware, where a kernel cannot access the host's memory."""
        if not self._takes_host:
            raise RuntimeError(
                f"Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input tensor "
                f"device is correct. Found at least two devices, npu:{bound.device} and cpu! ({self.name}; move the tensor "
                "with .npu() first)"
            )

    # -- pure operators -------------------------------------------------------------------------------------------------

    def _launch_pure(self, bound: Bound, args: Any, kwargs: Any, likes: Any) -> Any:
        index = _index(bound)
        device = _DEVICES[index]
        if type(likes) is Likes:
            view = self._launcher.views.of_output
            each = likes.each
            made = [requests.allocate(like.size, like.stride, like.dtype, device) for like in each]
            targets = [view(output, like) for output, like in zip(made, each, strict=True)]
            compute, beside = self._bind(bound, args, kwargs), self._targets(bound)
            if self._is_of_program:
                compute = as_declared(self.name, compute, self._kept(bound), beside, targets)
            body = PureBody(compute, bound, targets, likes)
            work = self._work_of(bound)
            targets, fresh = [*targets, *beside], not beside
            move = self._move_of(bound)
            self._launcher.launch(
                self.name, self._number, index, body, bound.reads, targets, fresh=fresh, work=work, move=move
            )
            return made[0] if likes.single else tuple(made)
        outputs = tree_map(lambda like: allocate(like, device), likes, is_leaf=lambda item: isinstance(item, Like))
        # A masked output (an unwanted gradient) is None, and keeps its position.
        places = [
            self._launcher.views.shared(leaf) if isinstance(leaf, torch.Tensor) else None
            for leaf in tree_leaves(outputs)
        ]
        targets = [place for place in places if place is not None]
        compute = self._bind(bound, args, kwargs)

        def store() -> None:
            store_results(tree_leaves(compute(*bound.args, **bound.kwargs)), places)

        work = self._work_of(bound)
        move = self._move_of(bound) if self._reader is RowReads else None
        self._launcher.launch(
            self.name, self._number, index, store, bound.reads, targets, fresh=True, work=work, move=move
        )
        arguments = tree_leaves((args, kwargs))
        return tree_map(lambda value: arguments[value.leaf] if isinstance(value, Given) else value, outputs)

    # -- in-place and out variants --------------------------------------------------------------------------------------

    def _launch_writing(self, args: Any, kwargs: Any) -> Any:
        if self._is_out_variant and not self._resize_outputs(args, kwargs) and self._can_write_from_host():
            return self._write_from_host(args, kwargs)
        self._metadata.refuse_two_dtypes(args)
        bound = Bound(args, kwargs, self._view_written)
        if bound.mixed:
            self._refuse_mixed(bound)
        if self._may_ignore and not bound.kwargs.get("beta", 1):
            bound.ignore_first()
        index = _index(bound)
        if self._reads_host:
            self._launcher.wait(index, self.name, computes=True)
        compute = self._bind(bound, args, kwargs)
        targets = self._targets(bound)
        if self._is_of_program:
            compute = as_declared(self.name, compute, self._kept(bound), targets)
        self._launcher.launch(
            self.name,
            self._number,
            index,
            plain_afterwards(compute, bound, targets)
            if any(target.is_complex() for target in targets)
            else lambda: compute(*bound.args, **bound.kwargs),
            self._reads(bound, targets),
            targets,
            work=self._work_of(bound),
            move=self._move_of(bound),
        )
        if self._returns == 0:
            return None
        written = [argument_of(args, kwargs, *place) for place in self._written]
        return written[0] if self._returns == 1 else tuple(written[: self._returns])

    def _kept(self, bound: Bound) -> list[torch.Tensor]:
        """Return the arguments of which the schema may be asked whether they are written."""
        return bound.reads if self._declares_writes else []

    def _targets(self, bound: Bound) -> list[torch.Tensor]:
        """Return the arguments that are written, declared or not."""
        places = self._written
        if self._trained and argument_of(bound.args, bound.kwargs, self._training, "training"):
            places = [*places, *self._trained]
        return _tensors([argument_of(bound.args, bound.kwargs, *place) for place in places]) if places else []

    def _reads(self, bound: Bound, targets: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the device memory that is read: an out variant and a fill do not read what they overwrite."""
        if not self._only_overwrites:
            if not self._overwritten:
                return bound.reads
            targets = _tensors([argument_of(bound.args, bound.kwargs, *place) for place in self._overwritten])
        return [seen for seen in bound.reads if all(seen is not target for target in targets)]

    def _resize_outputs(self, args: Any, kwargs: Any) -> bool:
        """Resize `out=` arguments to the shape of the result, as every out variant does; tell whether the shape is known."""
        if self._brought or self._returns == 0:  # what returns nothing tells no shapes
            self._resize_as_brought(args, kwargs)
            return True
        given = {**kwargs, "out": kwargs["out"].new_empty(0)} if self._keeps_shape else kwargs
        try:
            likes = self._metadata.outputs(None, args, given)
        except NotImplementedError:
            return False  # no meta kernel
        except RuntimeError:  # a meta kernel in Python may be stricter than the kernels, which decide
            if torch.npu.is_current_stream_capturing():
                raise
            return False
        outs = [argument_of(args, kwargs, *place) for place in self._written]
        wanted = likes.each if type(likes) is Likes else tree_leaves(likes, is_leaf=lambda item: isinstance(item, Like))
        for out, like in zip(tree_leaves(outs), wanted, strict=False):
            if not isinstance(like, Like) or (self._keeps_shape and out.numel() == math.prod(like.size)):
                continue
            if tuple(out.size()) != like.size:
                if any(out is value for value in args):  # the in-place form of an operator that has none of its own
                    raise RuntimeError(
                        f"output with shape {list(out.size())} doesn't match the broadcast shape {list(like.size)} ({self.name})"
                    )
                out.resize_(like.size)
        return True

    def _resize_as_brought(self, args: Any, kwargs: Any) -> None:
        """Resize `out=` arguments as the registered function does with meta tensors; not at all if it cannot run on those."""
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
        """Run an out variant with unknown shapes: compute first, then resize and fill the arguments."""
        outs = [argument_of(args, kwargs, *place) for place in self._written]
        names = [name for _, name in self._written]
        results = {name: torch.empty(0, dtype=out.dtype) for name, out in zip(names, outs, strict=True)}
        given = {name: value for name, value in kwargs.items() if name not in results}
        bound = Bound(args, given, self._launcher.views.of)
        index = _index(bound)
        self._launcher.wait(index, self.name, computes=True)
        compute = self._bind(bound, args, kwargs)

        def body() -> None:
            compute(*bound.args, **bound.kwargs, **results)

        self._launcher.launch(self.name, self._number, index, body, bound.reads, [])
        self._launcher.wait(index, self.name, computes=True)
        for out, result in zip(outs, results.values(), strict=True):
            out.resize_(result.size()).copy_(result)
        return outs[0] if self._returns == 1 else tuple(outs[: self._returns])

    # -- operators whose result the host has to read ---------------------------------------------------------------------

    def _run_on_host(self, bound: Bound, args: Any, kwargs: Any) -> Any:
        """Wait for the inputs, compute, and copy the results to new device memory."""
        index = _index(bound)
        self._launcher.wait(index, self.name, computes=True)
        results: Any = None
        compute = self._bind(bound, args, kwargs)

        def body() -> None:
            nonlocal results
            results = compute(*bound.args, **bound.kwargs)

        move = self._move_of(bound)
        self._launcher.launch(
            self.name, self._number, index, body, bound.reads, [], work=self._work_of(bound), move=move
        )
        self._launcher.wait(index, self.name, computes=True)
        moved = move if isinstance(move, Move) else None
        return tree_map(lambda value: self._to_device(self._narrowed(value, bound), index, moved), results)

    def _narrowed(self, value: Any, bound: Bound) -> Any:
        """Round a result that the CPU has in float32 only because it lacks a kernel for the arguments' small floats."""
        if self._brought or not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        given = {tensor.dtype for tensor in bound.reads if tensor.is_floating_point()}
        return value.to(given.pop()) if len(given) == 1 and given <= {torch.float16, torch.bfloat16} else value

    def _to_device(self, value: Any, index: int, move: Move | None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        out = requests.allocate(value.size(), value.stride(), value.dtype, _DEVICES[index])
        target = self._launcher.views.of(out)
        results = f"{self.name} (results)"  # counted by itself: it is no call of the operator
        number = self._launcher.number(results)
        self._launcher.launch(results, number, index, lambda: target.copy_(value), [], [target], move=move)
        return out


def argument_of(args: Any, kwargs: Any, position: int, name: str) -> Any:
    """Return one argument of a call, passed by position or by name."""
    return args[position] if position < len(args) else kwargs.get(name)


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found.extend(_tensors(value))
    return found
