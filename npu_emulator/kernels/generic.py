"""The kernel that serves almost every operator: metadata now, values as a task on the stream.

Shapes come from the operator's meta kernel, memory from torch_npu's own allocator, and values from the operator's CPU
kernel (or a reference function) on CPU tensors that share the device's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from npu_emulator.kernels.metadata import Like, MetadataCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    from npu_emulator.launch import Launcher

__all__ = ["Kernel", "device_index", "is_npu"]

_HOST_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_CPU = torch.device("cpu")


def is_npu(value: object) -> bool:
    """Tell whether a value is a tensor on the emulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def device_index(values: Any) -> int:  # noqa: ANN401 - any tree of arguments
    """Return the index of the device that the arguments live on, or that they ask for, or the current one."""
    for value in tree_leaves(values):
        if is_npu(value):
            return int(value.device.index)
        if isinstance(value, torch.device) and value.type == "npu" and value.index is not None:
            return value.index
    return torch.npu.current_device()


class Kernel:
    """One operator overload on the emulated device.

    `compute` has the operator's signature, takes CPU tensors and returns CPU tensors; by default it is the operator itself,
    whose CPU kernel then does the work. An operator that writes to an argument writes to the shared memory directly.
    """

    def __init__(self, op: OpOverload, launcher: Launcher, compute: Callable[..., Any] | None = None) -> None:
        """Prepare a kernel; `compute` defaults to the operator's own CPU kernel."""
        self.op = op
        self.name = str(op)
        self.compute = compute or op
        self._launcher = launcher
        self._number = launcher.number(self.name)
        self._metadata = MetadataCache(op)
        schema = op._schema  # noqa: SLF001 - the public door to a schema
        self._written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._is_out_variant = any(argument.is_out for argument in schema.arguments)
        # Batch norm and its like write to an argument and return something else; most writers return what they wrote.
        self._returns_written = all(value.alias_info is not None for value in schema.returns)
        self._returns = len(schema.returns)
        tensors_only = all(str(value.type) in {"Tensor", "Tensor[]", "List[Tensor]"} for value in schema.returns)
        self._reads_host = bool(_HOST_DEPENDENT & set(op.tags)) or not tensors_only

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the operator takes and returns
        """Launch the operator and return its (not yet computed) outputs."""
        if self._written and self._returns_written:
            return self._launch_writing(args, kwargs)
        if self._reads_host:
            return self._run_on_host(args, kwargs)
        try:
            likes = self._metadata.outputs(args, kwargs)
        except RuntimeError:  # NotImplementedError included: no meta kernel, or one that needs values
            if torch.npu.is_current_stream_capturing():
                raise
            return self._run_on_host(args, kwargs)
        return self._launch_pure(args, kwargs, likes)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:  # noqa: ARG002 - for subclasses
        """Return what computes this one launch."""
        return self.compute

    # -- pure operators -------------------------------------------------------------------------------------------------

    def _launch_pure(self, args: Any, kwargs: Any, likes: Any) -> Any:  # noqa: ANN401
        index = device_index((args, kwargs))
        device = torch.device("npu", index)
        if isinstance(likes, Like):
            outputs: Any = torch.empty_strided(likes.size, likes.stride, dtype=likes.dtype, device=device)
            targets = (self._launcher.view(outputs),)
        else:
            outputs = tree_map(lambda like: _allocate(like, device), likes, is_leaf=lambda item: isinstance(item, Like))
            targets = tuple([self._launcher.view(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)])
        cpu_args, cpu_kwargs = self._on_cpu(args), self._on_cpu(kwargs)
        compute = self._bind(args, kwargs)

        def body() -> None:
            results = compute(*cpu_args, **cpu_kwargs)
            _store([results] if isinstance(results, torch.Tensor) else tree_leaves(results), targets)

        self._launcher.launch(self.name, self._number, index, body)
        return outputs

    def _on_cpu(self, values: Any) -> Any:  # noqa: ANN401
        """Replace device tensors by CPU tensors on the same memory, and the device by the CPU."""
        view = self._launcher.view

        def convert(value: Any) -> Any:  # noqa: ANN401
            if isinstance(value, torch.Tensor):
                return view(value) if value.device.type == "npu" else value
            if isinstance(value, torch.device):
                return _CPU
            if isinstance(value, (list, tuple)):
                return [convert(item) for item in value]
            return value

        if isinstance(values, dict):
            return {name: convert(value) for name, value in values.items()}
        return tuple([convert(value) for value in values])

    # -- in-place and out variants --------------------------------------------------------------------------------------

    def _launch_writing(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        if self._is_out_variant:
            self._resize_outputs(args, kwargs)
        if self._reads_host:
            self._launcher.wait(device_index((args, kwargs)), self.name)
        cpu_args, cpu_kwargs = self._on_cpu(args), self._on_cpu(kwargs)
        compute = self._bind(args, kwargs)
        self._launcher.launch(
            self.name, self._number, device_index((args, kwargs)), lambda: compute(*cpu_args, **cpu_kwargs)
        )
        written = [args[position] if position < len(args) else kwargs[name] for position, name in self._written]
        if self._returns == 0:
            return None
        return written[0] if self._returns == 1 else tuple(written[: self._returns])

    def _resize_outputs(self, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Give `out=` arguments the shape of the result, as every out variant does."""
        try:
            self._metadata_of_out(args, kwargs)
        except NotImplementedError:
            return  # no meta kernel: the CPU kernel will complain if the shape is wrong

    def _metadata_of_out(self, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        likes = self._metadata.outputs(args, kwargs)
        outs = [args[position] if position < len(args) else kwargs[name] for position, name in self._written]
        for out, like in zip(tree_leaves(outs), tree_leaves(likes, is_leaf=lambda item: isinstance(item, Like)), strict=False):
            if isinstance(like, Like) and tuple(out.size()) != like.size:
                out.resize_(like.size)

    # -- operators whose result the host has to see ---------------------------------------------------------------------

    def _run_on_host(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Wait for the inputs, compute, and copy the results to new device memory."""
        index = device_index((args, kwargs))
        self._launcher.wait(index, self.name)
        device = torch.device("npu", index)
        results: Any = None
        cpu_args, cpu_kwargs = self._on_cpu(args), self._on_cpu(kwargs)
        compute = self._bind(args, kwargs)

        def body() -> None:
            nonlocal results
            results = compute(*cpu_args, **cpu_kwargs)

        self._launcher.launch(self.name, self._number, index, body)
        self._launcher.wait(index, self.name)
        return tree_map(lambda value: self._to_device(value, device), results)

    def _to_device(self, value: Any, device: torch.device) -> Any:  # noqa: ANN401
        if not isinstance(value, torch.Tensor):
            return value
        out = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        self._launcher.view(out).copy_(value)
        return out


def _store(results: list[Any], targets: tuple[torch.Tensor, ...]) -> None:
    """Write what the CPU computed to device memory.

    Some operators return fewer or smaller auxiliary outputs on the CPU than their meta kernel announces (batch norm's saved
    statistics in evaluation, embedding_bag's indices); nothing reads those.
    """
    for result, target in zip(results, targets, strict=False):
        if isinstance(result, torch.Tensor) and (result.size() == target.size() or target.numel() != 0 != result.numel()):
            target.copy_(result)


def _allocate(like: Any, device: torch.device) -> Any:  # noqa: ANN401
    if not isinstance(like, Like):
        return like
    return torch.empty_strided(like.size, like.stride, dtype=like.dtype, device=device)
