"""What the host has set and a kernel's CPU function would see: a device sees what was set at the launch, and no autocast at all.

Autograd and dispatch modes are the launcher's concern; inference mode, the default dtype and CPU autocast are this module's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HostState", "without_autocast"]

_CPU_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001 - no public guard of one key


def without_autocast(body: Callable[[], object]) -> None:
    """Run a kernel body; `torch.autocast("cpu")` around it is about the host's own tensors."""
    if not torch.is_autocast_enabled("cpu"):  # nearly always, and the guard costs as much as a small operator
        body()
        return
    with torch._C._ExcludeDispatchKeyGuard(_CPU_AUTOCAST):  # noqa: SLF001 - as above
        body()


class HostState:
    """The state at a launch, for a kernel that runs later."""

    __slots__ = ("_dtype", "_inference")

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._dtype = torch.get_default_dtype()

    def run(self, body: Callable[[], object]) -> None:
        """Run a kernel body as it would have run at the launch, below autograd."""
        now = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            # In this order: the inference mode also says which of autograd's keys count.
            with torch._C._InferenceMode(self._inference), torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - the public contexts are slow
                without_autocast(body)
        finally:
            torch.set_default_dtype(now)
