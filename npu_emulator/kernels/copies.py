"""Copies between host and device, between devices, and scalar reads: the operators whose rules differ by direction."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from npu_emulator import requests
from npu_emulator.kernels.arguments import is_npu
from npu_emulator.kernels.formats import is_private
from npu_emulator.kernels.generic import Kernel
from npu_emulator.kernels.moves import Move
from npu_emulator.kernels.recovery import refuse_unsafe, refuse_unsafe_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_emulator.launch import Launcher

__all__ = ["copy_kernels"]


def copy_kernels(launcher: Launcher) -> dict[str, Callable[..., Any]]:
    """Return the kernels of `copy_` and its like, `_to_copy`, `clone` and `_local_scalar_dense` by operator name."""
    copies = _Copies(launcher)
    return {
        "aten::copy_": copies.copy_as_asked,
        "aten::_foreach_copy_": copies.copy_each_,
        "aten::_copy_from": copies.copy_from,
        "aten::_copy_from_and_resize": copies.copy_from_and_resize,
        "aten::_to_copy": copies.to_copy,
        "aten::clone": copies.clone,
        "aten::contiguous": copies.contiguous,
        "aten::_local_scalar_dense": copies.local_scalar,
        "aten::_pin_memory": copies.pin_memory,
    }


class _Copies:
    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._read = launcher.number("aten._local_scalar_dense.default")
        self._number = launcher.number("aten.copy_.default")
        self._copy_each = Kernel(torch.ops.aten._foreach_copy_.default, launcher)

    def copy_each_(
        self,
        destinations: list[torch.Tensor],
        sources: list[torch.Tensor],
        non_blocking: bool = False,  # noqa: FBT001, FBT002 - the operator's signature
    ) -> None:
        """Copy each into its destination: one task where all lie on the device, as many copies where some do not."""
        if all(map(is_npu, (*destinations, *sources))):
            if self._launcher.checks_marks():
                refuse_unsafe_copy(destinations, sources)
            self._copy_each(destinations, sources, non_blocking)
            return
        for destination, source in zip(destinations, sources, strict=True):
            destination.copy_(source, non_blocking)

    def copy_as_asked(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        non_blocking: bool = False,  # noqa: FBT001, FBT002 - the operator's signature
    ) -> torch.Tensor:
        """Copy as `copy_` does; an Ascend950 copies no private format but to the host."""
        if self._refuses_formats and is_npu(destination) and any(map(is_private, (destination, source))):
            raise RuntimeError(
                "copy_ of tensors in a private format is not supported on Ascend950, other than to the host; bring the tensor to "
                "the format ND first, with torch_npu.npu_format_cast(x, 2)"
            )
        return self.copy_(destination, source, non_blocking)

    @cached_property
    def _refuses_formats(self) -> bool:
        return bool(torch.npu.get_device_name().startswith("Ascend950"))

    def copy_(self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 - the operator's signature
        """Copy into `destination`, broadcasting and casting; the host waits for its own, unless `non_blocking`."""
        if self._launcher.checks_marks():
            refuse_unsafe_copy(destination, source)
        if not is_npu(destination):
            return self._to_host(destination, source, non_blocking=non_blocking)
        target = self._launcher.views.of(destination)
        index = destination.device.index
        reads = []
        if is_npu(source):
            origin = self._launcher.views.of(source)
            reads.append(origin)
            if source.device.index != index:
                return self._between_devices(destination, source, target, origin)
        else:
            # The host may change pageable memory as soon as this returns; pinned memory is read when the task runs.
            pinned = non_blocking and source.is_pinned()
            # Here torch_npu, or CANN for pageable memory, synchronises the stream, which a capture forbids.
            if not pinned:
                self._launcher.refuse_in_capture(index, "aten.copy_.default from the host")
            origin = source if pinned else source.clone()
            if pinned:
                reads.append(origin)  # two streams may also race for a pinned buffer
        self._launch(index, target, origin, reads)
        if not non_blocking and not is_npu(source):
            self._launcher.wait_for_copy(index)
        return destination

    def _launch(self, index: int, target: torch.Tensor, origin: torch.Tensor, reads: list[torch.Tensor]) -> None:
        """Launch the copy of one CPU view to another."""
        move = None if self._launcher.memory is None else Move(torch.ops.aten.copy_.default, (target, origin), {})
        self._launcher.launch(
            "aten.copy_.default", self._number, index, lambda: target.copy_(origin), reads, [target], move=move
        )

    def _between_devices(
        self, destination: torch.Tensor, source: torch.Tensor, target: torch.Tensor, origin: torch.Tensor
    ) -> torch.Tensor:
        """Copy after the earlier work of both devices' current streams and before their later work, as torch does."""
        here, there = (torch.npu.current_stream(tensor.device) for tensor in (destination, source))
        here.wait_stream(there)
        self._launch(destination.device.index, target, origin, [origin])
        there.wait_stream(here)
        return destination

    def _to_host(self, destination: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        origin = self._launcher.views.of(source)
        index = source.device.index
        asynchronous = non_blocking and destination.is_pinned()
        if not asynchronous:
            self._launcher.wait(index, "a copy to the host")
        self._launcher.launch(
            "aten.copy_.default",
            self._number,
            index,
            lambda: destination.copy_(origin),
            [origin],
            [destination] if asynchronous else [],
        )
        if not asynchronous:
            self._launcher.wait(index, "a copy to the host")
        return destination

    def copy_from(self, source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002
        """Copy with the operands in the other order."""
        return self.copy_(destination, source, non_blocking)

    def copy_from_and_resize(self, source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        """Give `destination` the shape of `source`, then copy."""
        if destination.size() != source.size():
            destination.resize_(source.size())
        return self.copy_(destination, source)

    def to_copy(  # noqa: PLR0913 - the operator's signature
        self,
        source: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """Copy to another dtype, device or memory format."""
        like = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
        shape = torch.ops.aten._to_copy.default(like, dtype=dtype, layout=layout, memory_format=memory_format)  # noqa: SLF001
        target = device or source.device
        # torch uses pinned memory if a copy to the host must not wait.
        pinned = pin_memory or (non_blocking and is_npu(source) and target.type == "cpu")
        if pinned:
            out = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=target, pin_memory=True)
        else:
            out = requests.allocate(shape.size(), shape.stride(), shape.dtype, target)
        return self.copy_(out, source, non_blocking)

    def clone(self, source: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
        """Copy into new memory of the same device."""
        return self.to_copy(source, memory_format=memory_format)

    def contiguous(
        self, source: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        """Return the tensor itself if its strides are right, else a copy."""
        if source.is_contiguous(memory_format=memory_format):
            return source
        return self.to_copy(source, memory_format=memory_format)

    def local_scalar(self, source: torch.Tensor) -> Any:
        """Read one element on the host, waiting for the stream."""
        if self._launcher.checks_marks():
            refuse_unsafe(source)
        index = source.device.index
        self._launcher.wait(index, "item()")
        seen = self._launcher.views.of(source)
        found: list[Any] = []
        self._launcher.launch(
            "aten._local_scalar_dense.default", self._read, index, lambda: found.append(seen.item()), [seen], []
        )
        self._launcher.wait(index, "item()")
        return found[0] if found else seen.item()  # with null kernels nothing was read

    def pin_memory(self, source: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """Copy a host tensor to page-locked memory of the runtime, which can recognise it later."""
        del device
        out = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, pin_memory=True)
        return out.copy_(source)
