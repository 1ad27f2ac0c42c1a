"""Makes `dist.all_reduce(x)` and the like fail outside compiled code on a group of HCCL, immediately and on every rank.

HCCL is not emulated. Without this module torch_npu would fail only on the rank that names the communicator, and the others
would wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.errors import KernelMissingError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["eager_collective_kernels"]


def eager_collective_kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels by operator name; none if torch was built without torch.distributed."""
    if not torch.distributed.is_available():
        return {}
    listed = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")  # noqa: SLF001 - no public list of kernels
    return {name: _Eager(name) for name in listed if name.startswith("c10d::")}


class _Eager:
    """A collective on tensors of the device: raises for a group of HCCL, else calls the original."""

    def __init__(self, name: str) -> None:
        self._name = name.removeprefix("c10d::").strip("_")
        packet = getattr(torch.ops.c10d, name.removeprefix("c10d::"))
        names = [argument.name for argument in packet.default._schema.arguments]
        self._group = names.index("process_group")
        self._original = torch.library.get_kernel(packet.default, "PrivateUse1")

    def __call__(self, keys: torch.DispatchKeySet, *args: Any) -> Any:
        """Run the collective, or raise an error that names an alternative."""
        group = torch.distributed.ProcessGroup.unbox(args[self._group])
        if group._get_backend(torch.device("npu")).name() == "hccl":  # noqa: SLF001 - there is no public way to ask
            raise KernelMissingError(
                f"HCCL is not emulated, and {self._name} was called on the group {group.group_name!r} of backend hccl "
                "outside compiled code; compile the function that calls it, "
                "or call its form of torch.distributed._functional_collectives, which works here on any group"
            )
        return self._original.call_boxed(keys, *args)
