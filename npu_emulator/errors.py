"""The emulator's exceptions. Each says in its message what was expected, what came, and what to do."""

from __future__ import annotations

__all__ = ["ActivationError", "BuildError", "EmulatorError", "KernelMissingError", "MemoryFaultError", "RaceError"]


class EmulatorError(RuntimeError):
    """Anything that the emulator itself, rather than the emulated device, reports."""


class ActivationError(EmulatorError):
    """The emulator cannot be switched on in this process."""


class BuildError(EmulatorError):
    """The runtime could not be compiled on this machine."""


class KernelMissingError(EmulatorError, NotImplementedError):
    """An operator was launched for which the emulated device has no kernel."""


class RaceError(EmulatorError):
    """Two pieces of device work touch the same bytes, one of them writing, and nothing orders them."""


class MemoryFaultError(EmulatorError):
    """An operator read memory that nothing has written, or used memory that was freed."""
