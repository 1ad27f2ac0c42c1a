"""Switching the emulator on: load the runtime under CANN's names, import torch, give every operator a kernel."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_emulator.build import LIBRARIES, libraries
from npu_emulator.device import Runtime
from npu_emulator.errors import ActivationError
from npu_emulator.kernels.registry import Registry, installed_kernels
from npu_emulator.settings import Settings

if TYPE_CHECKING:
    from npu_emulator.launch import Launcher

__all__ = ["Emulator", "activate", "current", "registry"]

registry = Registry()


@dataclass(frozen=True)
class Emulator:
    """The emulated device of this process."""

    settings: Settings
    runtime: Runtime
    launcher: Launcher


_current: Emulator | None = None


def current() -> Emulator:
    """Return the active emulator, or raise ActivationError."""
    if _current is None:
        raise ActivationError("the emulator is not active; call npu_emulator.activate() before torch is imported")
    return _current


def is_active() -> bool:
    """Tell whether this process runs on the emulated device."""
    return _current is not None


def activate(*, quiet: bool = False, **settings: Any) -> Emulator:  # noqa: ANN401 - the fields of Settings
    """Make this process see an emulated Ascend NPU. Call it before torch is imported; a second call returns the first's result.

    Args:
        quiet: do not print the one-line banner.
        **settings: fields of `Settings`, each also an environment variable `NPU_EMULATOR_<FIELD>`.

    Raises:
        ActivationError: torch was imported already, or a real NPU or CANN is present and `force` is not set.
        BuildError: the runtime cannot be compiled here.
    """
    global _current  # noqa: PLW0603 - there is one device runtime in a process, as there is one CANN
    if _current is not None:
        return _current
    chosen = Settings.from_environment(**settings)
    _refuse_if_too_late()
    if not chosen.force:
        _refuse_if_real()
    paths = libraries()
    # Work queues of torch_npu's own would launch from a second thread, where the emulator could not stay deterministic.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    for path in paths:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    runtime = Runtime(paths[0])
    runtime.configure(chosen)
    launcher = _import_torch(runtime)
    from npu_emulator.kernels.install import Installer  # noqa: PLC0415 - imports torch

    installer = Installer(launcher)
    installer.install({**installed_kernels(), **registry.items()})
    registry.listen(installer.add)
    _current = Emulator(chosen, runtime, launcher)
    if not quiet:
        sys.stderr.write(f"npu_emulator: {chosen.devices} emulated {chosen.soc}, schedule {chosen.schedule}; no NPU is used\n")
    return _current


def _refuse_if_too_late() -> None:
    if "torch" in sys.modules:
        raise ActivationError(
            "npu_emulator.activate() came after `import torch`, which has already looked for an NPU. "
            "Call it first, or run the program with `python -m npu_emulator script.py`"
        )


def _refuse_if_real() -> None:
    """Never hide a real device."""
    devices = sorted(Path("/dev").glob("davinci[0-9]*"))
    reason = f"a real NPU is present ({devices[0]})" if devices else None
    if reason is None and _loadable(LIBRARIES[0]):
        reason = f"CANN is installed ({LIBRARIES[0]} can be loaded)"
    if reason is not None:
        raise ActivationError(
            f"{reason}, so the emulator stays off. To emulate all the same, set NPU_EMULATOR_FORCE=1 or call activate(force=True)"
        )


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _import_torch(runtime: Runtime) -> Launcher:
    """Import torch with torch_npu and start the device."""
    import torch  # noqa: PLC0415 - the libraries had to come first
    import torch_npu  # noqa: F401, PLC0415 - for those who switched torch's autoload off

    torch.npu.init()
    from npu_emulator.launch import Launcher  # noqa: PLC0415 - imports torch

    return Launcher(runtime)
