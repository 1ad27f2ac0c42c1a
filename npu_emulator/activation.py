"""Activates the emulator: loads the runtime under CANN's names, imports torch, gives every operator a kernel."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_emulator.build import libraries
from npu_emulator.children import announce, announced, is_ours
from npu_emulator.compilation import LIBRARIES
from npu_emulator.device import Runtime
from npu_emulator.dynamo import leave_us_alone
from npu_emulator.errors import ActivationError
from npu_emulator.garbage_collection import without_collector
from npu_emulator.kernels.registry import Registry
from npu_emulator.measured import read
from npu_emulator.pyacl import offer_pyacl
from npu_emulator.schedules import is_searching, parse, report_misfit
from npu_emulator.settings import Settings
from npu_emulator.warnings_filter import without_cann_warnings, without_padding_warning
from npu_emulator.working_folder import leave_unsearched

if TYPE_CHECKING:
    from npu_emulator.kernels.install import Installer
    from npu_emulator.launch import Launcher
    from npu_emulator.recorder import Recorder

__all__ = ["Emulator", "activate", "current", "is_active", "registry", "resume_in_child"]

registry = Registry()


@dataclass(frozen=True)
class Emulator:
    """The emulated device of this process."""

    settings: Settings
    runtime: Runtime
    launcher: Launcher
    recorder: Recorder
    installer: Installer


_current: Emulator | None = None
_starting: tuple[Settings, Runtime] | None = None
"""The settings of `activate` while its import of torch runs, which ends in `resume_in_child`."""


def current() -> Emulator:
    """Return the active emulator, or raise ActivationError."""
    if _current is None:
        raise ActivationError("the emulator is not active; call npu_emulator.activate() before torch is imported")
    return _current


def is_active() -> bool:
    """Tell whether this process runs on the emulated device."""
    return _current is not None


def activate(*, quiet: bool = False, **settings: Any) -> Emulator:
    """Make this process, and the processes it starts, see an emulated Ascend NPU.

    Call it before torch is imported; a second call returns the first's result.

    Args:
        quiet: do not print the one-line banner.
        **settings: fields of `Settings`, each also an environment variable `NPU_EMULATOR_<FIELD>`.

    Raises:
        ActivationError: torch was imported already, or a real NPU or CANN is present and `force` is not set.
        BuildError: the runtime cannot be compiled here.
    """
    global _starting  # noqa: PLW0603 - as _current
    if _current is not None:
        return _current
    chosen = Settings.from_environment(**settings)
    if chosen.as_measured:  # children may have another working folder
        chosen = replace(chosen, as_measured=str(Path(chosen.as_measured).resolve()))
    _refuse_if_too_late()
    if not chosen.force:
        _refuse_if_real()
    paths = libraries()
    announce(chosen, paths[0].parent)
    _starting = (chosen, _load(paths, chosen))
    with without_collector(), without_cann_warnings():
        import torch  # noqa: F401 - ends in resume_in_child if torch's autoload is on

        emulator = _current or _start(*_starting)
    if not quiet:
        sys.stderr.write(
            f"npu_emulator: {chosen.devices} emulated {chosen.soc}, schedule {chosen.schedule}; no NPU is used\n"
        )
        if chosen.as_measured:
            sys.stderr.write(f"npu_emulator: {read(chosen.as_measured).describe(chosen.as_measured)}\n")
    return emulator


def resume_in_child() -> None:
    """Give a child of an emulated process the same device; called at the end of its `import torch`."""
    if _current is None and _starting is not None:
        _start(*_starting)
    elif _current is None:
        chosen = Settings.from_environment()
        if chosen.kernel_log:
            chosen = replace(chosen, kernel_log=f"{chosen.kernel_log}.{os.getpid()}")
        with without_collector():
            _start(chosen, _load(announced() or libraries(), chosen))


def _load(paths: list[Path], chosen: Settings) -> Runtime:
    """Load the runtime under CANN's names."""
    # torch_npu's own work queue would launch from a second thread, and the emulator would not be deterministic.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    # MKL selects kernels by the alignment of addresses, and these round differently; the device's products do not.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    for path in paths:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    leave_unsearched()
    runtime = Runtime(paths[0])
    runtime.configure(chosen)
    return runtime


def _start(chosen: Settings, runtime: Runtime) -> Emulator:
    """Give every operator a kernel, once torch is imported."""
    global _current  # noqa: PLW0603 - there is one device runtime in a process, as there is one CANN
    with without_cann_warnings():
        import torch
        import torch_npu  # noqa: F401 - for those who switched torch's autoload off
    from npu_emulator.extensions import install_loader
    from npu_emulator.kernels.formats import keep_formats
    from npu_emulator.kernels.install import Installer
    from npu_emulator.launch import Launcher
    from npu_emulator.recorder import Recorder, write_until_exit
    from npu_emulator.rendezvous import watch_rendezvous

    leave_us_alone()
    launcher = Launcher(runtime)
    installer = Installer(launcher)
    _current = Emulator(chosen, runtime, launcher, Recorder(launcher), installer)
    if chosen.kernel_log:
        write_until_exit(_current.recorder, Path(chosen.kernel_log))
    if parse(chosen.schedule).choices:
        atexit.register(report_misfit, runtime, chosen.schedule)
    registry.take_offers()
    installer.install(registry)
    registry.listen(installer.add)
    keep_formats()
    watch_rendezvous(runtime)
    offer_pyacl(runtime)
    install_loader(installer, registry, runtime.folder)
    torch.npu._lazy_call(lambda: _settle(chosen, launcher))  # noqa: SLF001 - torch_npu's own way to say "when the device starts"
    return _current


def _settle(chosen: Settings, launcher: Launcher) -> None:
    """Finish the steps that need a started device."""
    import torch
    import torch_npu

    # torch_npu selects formats by the chip's name at its start. From now on only people read the name, so it says that the
    # device is emulated.
    launcher.runtime.name_says_emulated()
    with without_padding_warning():
        torch.empty(1, device="npu")
    torch_npu._C._npu_emptyCache()  # noqa: SLF001 - a program finds the device without reserved memory; the public one asks for a started device
    if not torch_npu._C._npu_is_support_inf_nan():  # noqa: SLF001 - the public one asks for a started device
        from npu_emulator.kernels.overflow import OverflowStatus

        launcher.overflow = OverflowStatus()
    poison = is_searching(chosen.schedule) if chosen.poison is None else chosen.poison
    if poison or chosen.check_memory:
        from npu_emulator.memory import start_watching

        start_watching(launcher, poison=poison, check=chosen.check_memory, stop_at_first=True)


def _refuse_if_too_late() -> None:
    if "torch" in sys.modules:
        raise ActivationError(
            "npu_emulator.activate() came after `import torch`, which has already looked for an NPU. "
            "Call it first, or run the program with `python -m npu_emulator script.py`"
        )
    # An import that failed leaves this behind, and a second import then fails with other words.
    if "torch._C" in sys.modules:
        raise ActivationError(
            "npu_emulator.activate() came after an `import torch` that failed, and a process imports torch once. Start the "
            "process again, in a notebook the kernel, and call it first, or run the program with "
            "`python -m npu_emulator script.py`"
        )


def _refuse_if_real() -> None:
    """Raise ActivationError if there is a real device or CANN, unless `force` is set."""
    devices = sorted(Path("/dev").glob("davinci[0-9]*"))
    reason = f"a real NPU is present ({devices[0]})" if devices else None
    if reason is None and _loadable(LIBRARIES[0]):
        reason = f"CANN is installed ({LIBRARIES[0]} can be loaded)"
    if reason is not None:
        raise ActivationError(
            f"{reason}, so the emulator stays off. To emulate all the same, set NPU_EMULATOR_FORCE=1 or call activate(force=True)"
        )


def _loadable(library: str) -> bool:
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if folder and (Path(folder) / library).exists():
            return not is_ours(Path(folder))  # the parent process was emulated
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
