"""Examples about static kernels: random programs whose operators a stand-in for CANN's compiler compiles, or does not.

Values are those of eager mode whatever the compiler does. It gets each kernel that the graph launches, on its shapes, once a
process. A second process has what the first one built, if that was kept and is sound. At the end of each nothing is left installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import npu_emulator
import npugraph_ex
from npugraph_ex.aclgraph import _npu_private
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.inputs import make_inputs
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.generator.strategies import exact_programs
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.judge import same_values
from npugraph_ex_conformance.stand_in_cann import StandInCann, end_of_process

_FAILS_ITSELF, _WRONG_PACKAGES = ("fail", "nothing"), ("rubbish", "broken", "empty")
"""What a compiler does that makes no package; what packages are like that install nothing, which are kept as others are."""
_FAILS, _IN_A_FOLDER, _UNKEPT, _DEAD, _CHANGED = 30, 50, 30, 30, 30
"""Chances in percent: that the compiler fails; that CANN knows folders of kernels; that packages are not kept for the next process;
that a killed process has left files; that somebody changes a kept package."""
_CALLS = 4
_COPY = "aten_copy__default"
"""What captures copy besides is not known here: a view's result, an input that moves."""


def static_kernel_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    choices = Choices(Sampled(f"static kernels {seed}"))
    program, does = (
        exact_programs()(choices),
        choices.pick(_FAILS_ITSELF + _WRONG_PACKAGES) if choices.chance(_FAILS) else "behave",
    )
    in_a_folder = choices.chance(_IN_A_FOLDER)
    try:
        with _installation() as cann, mock.patch.object(_npu_private, "kernels_in_a_folder", return_value=in_a_folder):
            cann.does(does)
            return _two_processes(choices, program, cann, does)
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


@contextmanager
def _installation() -> Iterator[StandInCann]:
    """CANN with a compiler, and an empty cache."""
    with TemporaryDirectory() as folder:
        cann = StandInCann.at(Path(folder) / "cann" / "8.0")
        here = {"ASCEND_HOME_PATH": str(cann.home), "NPUGRAPH_EX_CACHE": str(Path(folder) / "cache")}
        with mock.patch.dict(os.environ, here):
            yield cann


def _cache() -> Path:
    return Path(os.environ["NPUGRAPH_EX_CACHE"]) / "static_kernels"


def _two_processes(choices: Choices, program: Program, cann: StandInCann, does: str) -> str:
    unkept, changed = choices.chance(_UNKEPT), choices.chance(_CHANGED)
    if choices.chance(_DEAD):
        dead = _cache() / "processes" / "1-dead"
        dead.mkdir(parents=True)
        (dead / "installed").write_text("long gone\n", encoding="utf-8")
    counts: list[tuple[int, int]] = []
    for _ in range(2):
        calls, installs = len(cann.calls()), len(cann.installs())
        options = {"static_kernel_compile": True, "disable_static_kernel_compile_cache": unkept}
        wrong = _difference(program, cann, options, is_second=bool(counts))
        counts.append((len(cann.calls()) - calls, len(cann.installs()) - installs))
        end_of_process()
        left = [str(path) for path in _cache().glob("processes/*")] + cann.packages()
        if wrong or left:
            return wrong or f"left at the end of the process: {left}"
        for package in _cache().glob("packages/*/*.run") if changed else ():
            package.write_bytes(package.read_bytes() + b"\n")
    built = counts[0][0]
    again = built if unkept or changed or does in _FAILS_ITSELF else 0
    installed = built if does == "behave" else 0
    wanted = [(built, installed), (again, installed)]
    return (
        "" if counts == wanted else f"calls of a compiler that does {does!r}, and installations: {counts}, not {wanted}"
    )


def _difference(program: Program, cann: StandInCann, options: Mapping[str, object], *, is_second: bool) -> str:
    function, earlier = program.function(), len(cann.calls())
    traced = tracing.trace(
        function, program.inputs, program.sizes[0], dynamic=program.dynamic, functional=program.functional
    )
    eager = traced if program.functional else function
    compiled = npugraph_ex.compile_fx(tracing.copy_of(traced), None, options)
    ran: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()
    for call in range(_CALLS):
        sides = []
        for side in (eager, compiled):
            inputs = make_inputs(program.inputs, sizes=program.sizes[call % len(program.sizes)], call=call)
            with npu_emulator.kernel_log() as log:
                outputs = side(*inputs)
            outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
            sides.append((*outputs, *inputs))
        ran |= {
            (one.name.replace(".", "_"), tuple(operand.shape for operand in one.reads)) for one in log if one.replay
        }
        if not all(map(same_values, *sides)):
            return f"call {call}: other values than eager mode"
    described = [kernel for of_call in cann.compiled()[earlier:] for kernel in of_call]
    other = {kernel for kernel in ran.symmetric_difference(described) if kernel[0] != _COPY and kernel[1]}
    if len(described) != len(set(described)) or (other and (described or not is_second)):
        return f"compiled were {described}, and {other} ran without, or were for nothing"
    return ""
