"""npu_emulator: an Ascend NPU in software, for the real torch_npu wheel.

`python -m npu_emulator script.py` runs any torch_npu program on a machine without CANN and without an NPU. Programs that
start themselves call `npu_emulator.activate()` before they import torch. Nothing here imports torch until then.

PYTEST_DONT_REWRITE: this package may be imported before pytest, which would warn that it cannot rewrite it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from npu_emulator.activation import Emulator, activate, current, is_active, registry
from npu_emulator.chips import with_figures
from npu_emulator.clock.ranks import merge_timelines
from npu_emulator.errors import (
    ActivationError,
    BuildError,
    EmulatorError,
    KernelMissingError,
    MemoryFaultError,
    RaceError,
)
from npu_emulator.faults import parse_faults
from npu_emulator.schedules import exhaust, is_searching, same_values, switched
from npu_emulator.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from npu_emulator.clock.timeline import Timeline
    from npu_emulator.device import Resources
    from npu_emulator.launch import Observer
    from npu_emulator.memory.report import MemoryFault
    from npu_emulator.races.detector import Detector
    from npu_emulator.races.report import Race
    from npu_emulator.recorder import KernelLog

_Kernel = TypeVar("_Kernel", bound="Callable[..., Any]")

__all__ = [
    "ActivationError",
    "BuildError",
    "Emulator",
    "EmulatorError",
    "KernelMissingError",
    "MemoryFaultError",
    "RaceError",
    "Settings",
    "activate",
    "check_memory",
    "current",
    "detect_races",
    "every_order",
    "inject_faults",
    "is_active",
    "kernel_counts",
    "kernel_log",
    "kernel_origins",
    "launch_count",
    "merge_timelines",
    "missing_kernels",
    "null_kernels",
    "register_kernel",
    "resources",
    "schedule",
    "timeline",
]


@overload
def register_kernel(name: str) -> Callable[[_Kernel], _Kernel]: ...
@overload
def register_kernel(name: str, kernel: _Kernel) -> _Kernel: ...
def register_kernel(name: str, kernel: Any = None) -> Any:
    """Give an operator a kernel on the emulated device, before or after activation; return the kernel.

    Without `kernel` it is a decorator: `@register_kernel("mine::scale")`.

    Args:
        name: `namespace::operator` or `namespace::operator.overload`.
        kernel: a function with the operator's signature that takes CPU tensors and returns CPU tensors. Output shapes come
            from the operator's meta (fake) implementation, or from calling this function with meta tensors if it has none.
            Where it returns something else than that, the launch raises `EmulatorError`; another floating-point dtype is rounded.
    """
    if kernel is None:
        return partial(register_kernel, name)
    registry.add(name, kernel)
    return kernel


def kernel_counts() -> dict[str, int]:
    """Return how many kernels the device has run so far, by operator; each replay counts its kernels again."""
    return current().launcher.counts()


def kernel_origins() -> dict[str, str]:
    """Return where the kernel of each operator of ATen, npu and atb is from, in words; "no kernel" where there is none."""
    from npu_emulator.kernels.origins import all_origins

    return all_origins(current().installer.origins)


def launch_count() -> int:
    """Return how many kernels the host has launched so far; a replay launches none."""
    return current().launcher.launches


@contextmanager
def null_kernels() -> Iterator[None]:
    """Run no kernel bodies inside the block, so that only the host's cost remains. Results are then meaningless."""
    runtime = current().runtime
    before = runtime.null_kernels()
    runtime.set_null_kernels(1)
    try:
        yield
    finally:
        runtime.set_null_kernels(before)


@contextmanager
def schedule(text: str, *, poison: bool | None = None) -> Iterator[None]:
    """Run queued work inside the block under another schedule, for instance `lazy` or `random:7`; see `schedules`.

    Blocks nest: each restores the outer schedule.

    Args:
        text: the schedule.
        poison: fill memory with 0xFF bytes when it is allocated and when it is freed, so that work in a wrong order finds no
            old right values. None: the setting `poison`, by default on under every schedule except fifo. An outer block that
            watches memory decides for this one too.
    """
    emulator = current()
    wanted = emulator.settings.poison if poison is None else poison
    with switched(emulator.runtime, text), _poisoning(emulator, is_searching(text) if wanted is None else wanted):
        yield


def every_order(program: Callable[[], Any], *, limit: int = 10_000) -> Iterator[tuple[str, Any]]:
    """Run a small program under every legal order of its device work; yield (schedule string, result) for each.

    Memory is poisoned (see `schedule`), and the race detector runs too.

    Args:
        program: launches work and waits for it; called once for each order, so it must start from the same state.
        limit: raise EmulatorError after so many runs.

    Raises:
        RaceError: after the last order, if all orders gave the same result but the program has a race.
    """
    if not callable(program):
        raise TypeError(f"every_order takes a function without arguments, which launches the work; got {program!r}")
    emulator = current()
    with _poisoning(emulator, emulator.settings.poison is not False), detect_races() as races:
        results: list[Any] = []
        for text, result in exhaust(emulator.runtime, program, limit):
            if not results or (len(results) == 1 and not same_values(result, results[0])):
                results.append(result)
            yield text, result
    if races and len(results) == 1:
        raise RaceError(f"every order gave the same result, by luck: the program has a race\n{races[0]}")


@contextmanager
def _poisoning(emulator: Emulator, wanted: bool) -> Iterator[None]:  # noqa: FBT001
    """Poison memory inside the block if `wanted`, unless something already watches memory."""
    from npu_emulator.memory import poisoning

    with poisoning(emulator.launcher) if wanted else nullcontext():
        yield


@contextmanager
def detect_races(*, stop_at_first: bool = False) -> Iterator[list[Race]]:
    """Look for data races between streams inside the block; yield the list that fills with them.

    Replays of graphs captured inside the block, or inside one around it, are checked; of another graph a warning tells.

    Args:
        stop_at_first: raise RaceError at the Python line that launches the second side of the first race; where another thread
            than the main one replays a graph, at its next launch or wait.
    """
    with _races_looked_for(stop_at_first=stop_at_first) as detector:
        yield detector.races


@contextmanager
def _races_looked_for(*, stop_at_first: bool, leaves: bool = False) -> Iterator[Detector]:
    """As `detect_races`; ``leaves``: a race that a block inside this one finds does not stop this one."""
    from npu_emulator.memory import logging_allocations
    from npu_emulator.races.detector import Detector

    emulator = current()
    around = [observer for observer in emulator.launcher.observers if isinstance(observer, Detector)]
    detector = Detector(emulator.runtime, stop_at_first=stop_at_first, leaves=leaves, around=around)
    with ExitStack() as stack:
        for outer in around:
            stack.enter_context(outer.around_another(detector))
        stack.enter_context(logging_allocations(emulator.runtime))
        stack.enter_context(_observed_by(emulator, detector))
        yield detector


@contextmanager
def _captures_noted() -> Iterator[None]:
    """Let the blocks of `detect_races` in this one know the graphs that were captured since it began."""
    from npu_emulator.races.detector import Detector

    emulator = current()
    with _observed_by(emulator, Detector(emulator.runtime, captures_only=True)):
        yield


@contextmanager
def check_memory(*, poison: bool = True, stop_at_first: bool = False) -> Iterator[list[MemoryFault]]:
    """Look for reads of unwritten memory and for replays over freed memory; yield the list that fills with them.

    Memory allocated before the block counts as written. Only graphs captured inside the block are checked. Where blocks nest,
    this is about the outer one, and a fault in the inner one is in both lists.

    Args:
        poison: also fill memory with 0xFF bytes (not a number; -1) when it is allocated and when it is freed.
        stop_at_first: raise MemoryFaultError: at once in eager work, at the next synchronisation in queued work.
    """
    from npu_emulator.memory import watching

    emulator = current()
    with watching(emulator.launcher, poison=poison, check=True, stop_at_first=stop_at_first) as faults:
        yield faults


def inject_faults(text: str) -> None:
    """Let collectives of this process fail on purpose, in place of faults that were set earlier; an empty text removes them.

    A program's own recovery can be tested with it: `inject_faults("drop:0:1")` drops the connection of device 0 at the next
    collective of this process. `NPU_EMULATOR_FAULTS` and `activate(faults=...)` set faults from the start.

    Args:
        text: `kill:DEVICE:N`, `delay:DEVICE:N:SECONDS` or `drop:DEVICE:N`, separated by commas; N counts from this call.

    Raises:
        EmulatorError: the text has another form, or names a device that is not there.
    """
    emulator = current()
    emulator.runtime.set_faults(parse_faults(text, emulator.settings.devices))


def resources() -> Resources:
    """Return the numbers of streams and events, in use and in all, and the resources of each captured graph."""
    return current().runtime.resources()


@contextmanager
def kernel_log(name: str = "*") -> Iterator[KernelLog]:
    """Log what the device runs inside the block, in order; yield the log, a sequence of `recorder.Ran`.

    Eager work, work inside replays (of graphs captured before the block too), copies and fills, each with its stream, launch,
    replay, tensors and Python line. It can be combined with `timeline`, `detect_races` and other logs.

    Args:
        name: log only names of this pattern, for instance `aten.mm*`, `npu.*` or `memcpy`.
    """
    from npu_emulator.recorder import listening

    with listening(current().recorder, name) as log:
        yield log


@contextmanager
def missing_kernels() -> Iterator[Counter[str]]:
    """Let a program continue without an operator's kernel; yield the calls of such operators, by name.

    Their results are zeros with torch_npu's shapes, and they write nothing. Use the rest of the run only to find the
    operators that a program needs.

    Raises:
        KernelMissingError: torch_npu does not give the shapes of a call.
    """
    from npu_emulator.kernels.missing import noting

    current()
    found: Counter[str] = Counter()
    with noting(found):
        yield found


@contextmanager
def timeline() -> Iterator[Timeline]:
    """Follow the block's work on a modelled clock; yield the timeline, whose `save` writes a Chrome trace.

    Times are a roofline model of the chip (see `npu_emulator.chips`), not measurements. Replays of graphs that were
    captured before the block are seen too.

    Raises:
        EmulatorError: the chip's figures are not public.
    """
    from npu_emulator.clock.products import counting_products
    from npu_emulator.clock.roofline import Roofline
    from npu_emulator.clock.timeline import Timeline

    emulator = current()
    model = Roofline(with_figures(emulator.settings.soc), registry.first_factors)
    with counting_products(emulator.launcher) as products:
        found = Timeline(emulator.launcher, model, products)
        with _observed_by(emulator, found):
            yield found


@contextmanager
def _observed_by(emulator: Emulator, observer: Observer) -> Iterator[None]:
    """Show an observer the block's launches and the runtime's log, beside those that observe already."""
    launcher = emulator.launcher
    launcher.show_log()  # what ran before the block is of no concern here
    if not launcher.observers:
        emulator.runtime.set_tracing(on=True)
    launcher.observers.append(observer)
    try:
        yield
        launcher.show_log()
    finally:
        launcher.observers.remove(observer)
        if not launcher.observers:
            emulator.runtime.set_tracing(on=False)
