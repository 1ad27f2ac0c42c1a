"""Every exception this library raises on purpose, as one small tree.

A message says what was expected, what came, and what to do. Not for errors of torch or torch_npu: those pass through.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import Self

_PACKAGE = __name__.rpartition(".")[0]
_DOCUMENTED = (__name__, f"{_PACKAGE}.operators.", f"{_PACKAGE}.testing.")
"""Where classes of errors are that have a section in docs/reference/errors.md; those elsewhere have their base's."""


def address_of(name: str) -> str:
    """The line that ends a message: the command that prints cause and remedy of a class, or what an option does."""
    return f"help: npugraph-ex help {name}"


class AddressedError(Exception):
    """An error that names its section of docs/reference/errors.md; never raised by itself."""

    def __new__(cls, *args: object, **_: object) -> Self:
        """Add the address as a note: the traceback shows it, and a message that quotes this error does not.

        Not in ``__init__``: Dynamo cannot trace ``raise`` with an error that has one.
        """
        error = super().__new__(cls, *args)
        if sys.version_info >= (3, 11):
            error.add_note(error.address)
        return error

    if sys.version_info >= (3, 11):

        def add_note(self, note: str) -> None:
            """Add a line above the address."""
            super().add_note(note)
            self.__notes__.sort(key=self.address.__eq__)

    @property
    def address(self) -> str:
        """The command that prints cause and remedy, as docs/reference/errors.md has them."""
        documented = next(kind for kind in type(self).__mro__ if kind.__module__.startswith(_DOCUMENTED))
        return address_of(documented.__name__)


class AddressedWarning(UserWarning):
    """A warning whose text ends with its address; never given by itself."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{address_of(type(self).__name__)}"


class NpuGraphExError(AddressedError):
    """Root of the tree: `except NpuGraphExError` catches what this library raises on purpose."""


@contextmanager
def with_address() -> Iterator[None]:
    """End the message of an error with its address, where a caller shows the message alone, as Dynamo does of its backend's."""
    try:
        yield
    except NpuGraphExError as error:
        if error.address not in str(error):
            error.args = (f"{error}\n{error.address}",)
        raise


class UsageError(NpuGraphExError):
    """A command line asks for what is not there, or for two things that exclude each other."""


class OptionError(NpuGraphExError, ValueError):
    """A compile option is wrong; the base of the three ways in which it can be."""


class UnknownOptionError(OptionError):
    """No option has this name."""


class OptionValueError(OptionError):
    """The option exists and does not take this value."""


class OptionNotAvailableError(OptionError, NotImplementedError):
    """The option exists, the value is legal, and this version cannot do it yet; it is refused, not ignored."""


class ReplacementError(NpuGraphExError, ValueError):
    """A fusion rule cannot be registered: one of its functions or arguments is wrong."""


class GraphVerificationError(NpuGraphExError):
    """A pass left a graph that does not compute what it did before; names the pass and the node."""


class FusionCountError(NpuGraphExError):
    """A caller demanded at least so many fusions and fewer happened."""


class CaptureError(NpuGraphExError, RuntimeError):
    """A graph cannot be captured; names the operation that capture forbids and where it was written."""


class NestedCaptureError(NpuGraphExError, RuntimeError):
    """A compiled function was called inside a capture of the program's own, which cannot hold the replay of another graph."""


class BrokenPromiseError(NpuGraphExError, RuntimeError):
    """A registered operator gave or did something else than its schema and its fake function say; names it and its line."""


class HostArgumentError(NpuGraphExError, ValueError):
    """An operator cannot take new host arguments between replays, or is registered wrongly for it."""


class ScopeError(NpuGraphExError, ValueError):
    """A scope (core limit, deterministic level, stream) is wrong, not closed, or not possible where it stands."""


class SavedGraphError(NpuGraphExError, ValueError):
    """A saved compilation cannot be used: damaged, foreign, of another version, or called with other inputs."""


class SessionError(NpuGraphExError, RuntimeError):
    """A function cannot be a session, or a session was called in a way or at a time that it does not serve."""


class StaticKernelError(NpuGraphExError, RuntimeError):
    """Kernels for fixed shapes cannot be compiled or installed; never raised to a program, which runs without them."""


class StreamOrderError(NpuGraphExError, RuntimeError):
    """The results of a graph of several streams depend on an order that no event enforces."""


class StreamOrderWarning(AddressedWarning):
    """As `StreamOrderError`, where the program only asked to be warned."""


class CollectiveDeadlockWarning(AddressedWarning):
    """Collectives of a graph that may run at once do not fit onto the device together."""


class DeviceError(NpuGraphExError, RuntimeError):
    """No device, or not the device that was asked for."""


class NameRuleError(NpuGraphExError, ImportError):
    """The name `npugraph_ex` cannot mean what the environment variable NPUGRAPH_EX asks for."""
