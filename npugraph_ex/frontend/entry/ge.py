"""Mode "max-autotune": a Dynamo graph goes unchanged to TorchAir's GE engine.

If CANN cannot run it, one error says why. This library's passes and captures do not apply there.
TorchAir reads the same settings from its own configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

from npugraph_ex.config import CompilerConfig
from npugraph_ex.errors import OptionNotAvailableError
from npugraph_ex.observe.environment import cann_home

MODE = "max-autotune"


def why_not() -> str | None:
    """The reason why GE cannot run in this process, or None."""
    if cann_home() is None:
        return "CANN is not installed (ASCEND_HOME_PATH names no folder)"
    if not torch.npu.is_available():
        return "there is no NPU"
    if "emulated" in torch.npu.get_device_name():
        return "the device is emulated, and the emulator has no GE"
    taken = sys.modules.get("torchair")
    if taken is not None and taken.__name__.startswith("npugraph_ex."):
        return "`import torchair` means this library here (use_as_torchair, --as-torchair)"
    return None


def backend(
    config: CompilerConfig, decompositions: Mapping[Any, Callable[..., Any]]
) -> Callable[..., Callable[..., Any]]:
    """TorchAir's backend with the same settings.

    Raises:
        OptionNotAvailableError: GE cannot run here, or TorchAir cannot be imported.
    """
    reason = why_not()
    if reason is None:
        try:
            torchair: Any = import_module("torchair")
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"torchair cannot be imported: {error}"
    if reason is not None:
        raise OptionNotAvailableError(
            f"mode {MODE!r} passes the graph to TorchAir's GE engine, which cannot run here: {reason.rstrip('.')}. "
            "Leave the mode out to compile with this backend"
        )
    theirs = torchair.CompilerConfig()
    for path, value in config.as_torchair().items():
        section, _, name = path.rpartition(".")
        setattr(attrgetter(section)(theirs) if section else theirs, name, value)
    made: Callable[..., Callable[..., Any]] = torchair.get_npu_backend(
        compiler_config=theirs, custom_decompositions=dict(decompositions)
    )
    return made
