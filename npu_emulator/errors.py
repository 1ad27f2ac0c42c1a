"""The emulator's exceptions. Each says in its message what was expected, what came, and what to do."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self  # the build of a wheel reads this module, and has no other packages

__all__ = [
    "ActivationError",
    "BuildError",
    "CallRefusedError",
    "DimensionError",
    "EmulatorError",
    "KernelMissingError",
    "MemoryFaultError",
    "RaceError",
    "add_note",
    "address_of",
    "note_what_is_missing",
    "without_address",
]

# torch_npu's message about a missing function that it loads by name. Functions that it links against are stubs with their own
# message.
_NOT_FOUND = re.compile(r"Failed to find function (\w+)")
# torch's, about an operator that no library has given a kernel. Of one with a kernel for the device, which the program called on
# tensors of the CPU, it says "[kernel]" there.
_NOT_RUN = re.compile(
    r"(?ms)Could not run '([\w:.]+)' with arguments from the 'CPU' backend.*^PrivateUse1: [^\n]* \[backend fallback\]$"
)


def address_of(name: str | int) -> str:
    """The line that ends a message: the command that prints cause and remedy of a class or a device code."""
    return f"help: npugraph-ex help {name}"


def without_address(said: object) -> str:
    """A message up to its address, to quote it inside of another."""
    return str(said).partition(f"\n{address_of('')}")[0]


class _HelpedError(Exception):
    """An error with an address, which a traceback shows as a note, and a message that quotes the error does not."""

    def __new__(cls, *args: object, **_: object) -> Self:
        error = super().__new__(cls, *args)
        if sys.version_info >= (3, 11) and not any(address_of("") in str(part) for part in args):
            error.add_note(error.address)
        return error

    if sys.version_info >= (3, 11):

        def add_note(self, note: str) -> None:
            """Add a line above the address."""
            super().add_note(note)
            self.__notes__.sort(key=self.address.__eq__)

    @property
    def address(self) -> str:
        """The command that prints cause and remedy; that of the nearest class of this module."""
        return address_of(next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__))


class EmulatorError(_HelpedError, RuntimeError):
    """An error of the emulator itself, rather than of the emulated device."""


class ActivationError(EmulatorError):
    """The emulator cannot be switched on in this process."""


class BuildError(EmulatorError):
    """The runtime could not be compiled on this machine."""


class KernelMissingError(EmulatorError, NotImplementedError):
    """An operator was launched for which the emulated device has no kernel."""


class CallRefusedError(_HelpedError, RuntimeError, ValueError):
    """A call of an operator whose arguments do not fit together, as an NPU refuses it.

    Attributes:
        code: the device's error code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class DimensionError(_HelpedError, IndexError, RuntimeError):
    """A dimension that a tensor does not have: an IndexError in torch, a RuntimeError from an NPU's operators."""


class RaceError(EmulatorError):
    """Two pieces of device work touch the same bytes, one of them writes, and nothing orders them."""


class MemoryFaultError(EmulatorError):
    """An operator read memory that nothing has written, or used memory that was freed."""


def add_note(error: BaseException, note: str) -> None:
    """Add a line to an exception: as a note, or before Python 3.11 in its message."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = ("\n".join([*map(str, error.args[:1]), note]), *error.args[1:])


def note_what_is_missing(error: BaseException) -> None:
    """Add a note to an error about what the emulated device lacks: a function that torch_npu looks for, a program's kernel."""
    function, kernel = (pattern.search(str(error)) for pattern in (_NOT_FOUND, _NOT_RUN))
    if function:
        add_note(
            error,
            f"npu_emulator: torch_npu looked for {function[1]}, which the emulated runtime does not have; "
            "what needs it runs only where CANN is installed",
        )
    elif kernel:
        add_note(
            error,
            f"npu_emulator: {kernel[1]} has no kernel for the NPU, nor one for the CPU, on which torch_npu falls back; "
            f"give it one with npu_emulator.register_kernel({kernel[1]!r}, function_of_cpu_tensors)\n"
            f"{address_of(KernelMissingError.__name__)}",
        )
