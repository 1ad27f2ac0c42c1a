"""Operators without a kernel in torch_npu: on hardware its fallback computes them on the CPU, and says so.

The emulated device computes them as all others. The first call of each says in torch_npu's own words what would happen, and each
raises where `TORCH_NPU_FALLBACK_CPU_DISABLE` forbids it. The fallback copies tensors of the device to the host and back, so in a
capture it is refused as such copies are.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from npu_emulator.kernels.arguments import is_npu
from npu_emulator.kernels.registry import overload_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_emulator.launch import Launcher

__all__ = ["OnTheHost", "falling_back"]

_FORBIDS = "TORCH_NPU_FALLBACK_CPU_DISABLE"
_KEYS = ("PrivateUse1", "AutogradPrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_THROUGH_OUT = "CompositeExplicitAutogradNonFunctional"
"""torch's functional forms that allocate the result and call the out form."""


def falling_back() -> Callable[[str], str]:
    """Return the function that gives the operator for which torch_npu would fall back, or "", if this one is called.

    Call it before any kernel is overridden.
    """
    listed = torch._C._dispatch_get_registrations_for_dispatch_key  # noqa: SLF001 - no public list of kernels
    known = {name for key in _KEYS for name in listed(key)}
    through_out = set(listed(_THROUGH_OUT))

    def find(name: str) -> str:
        if name in known:
            return ""
        if name not in through_out:
            return name
        out = f"{name.partition('.')[0].removesuffix('_')}.out"
        return "" if out in known or overload_of(out) is None else out

    return find


class OnTheHost:
    """A kernel that on hardware is the CPU's."""

    def __init__(self, name: str, kernel: Callable[..., Any], launcher: Launcher) -> None:
        """Put the words before a kernel."""
        self._name = name
        self._kernel = kernel
        self._launcher = launcher
        self._said = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel; before the first time say that it is a fallback, or raise."""
        if not self._said:
            if os.environ.get(_FORBIDS) == "1":
                raise RuntimeError(
                    f"{self._name} has no kernel for the NPU, so it would run on the CPU, which {_FORBIDS}=1 forbids; "
                    "leave that variable out, or use another operator"
                )
            self._said = True
            warnings.warn(
                f"CAUTION: The operator '{self._name}' is not currently supported on the NPU backend and will fall back to run "
                "on the CPU. This may have performance implications. (function npu_cpu_fallback)",
                stacklevel=2,
            )
        device = next((leaf.device.index for leaf in tree_leaves((args, kwargs)) if is_npu(leaf)), None)
        if device is not None:
            self._launcher.refuse_in_capture(
                device, f"{self._name} runs on the CPU (npu_cpu_fallback), and its copy of the arguments", pinned=False
            )
        return self._kernel(*args, **kwargs)
