"""`npugraph-ex validate MODULE[:NAME]`: are the replacements that a module registers right?"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from npu_emulator.result_alone import result_alone
from npugraph_ex._plurals import counted
from npugraph_ex.commands.numbers import at_least, whole
from npugraph_ex.commands.suites import require
from npugraph_ex.commands.supervisor import supervise
from npugraph_ex.commands.terminal import completes
from npugraph_ex.console.interrupts import end_children, interruptible
from npugraph_ex.console.progress import progress
from npugraph_ex.errors import UsageError
from npugraph_ex.observe.logger import logger
from npugraph_ex.testing import crashes

_DTYPES = ("float16", "bfloat16", "float32")
VERDICTS = {
    "proven": "fused in N random programs, all of them right",
    "refuted": "a program comes out wrong; a script that shows it is written",
    "guard-too-weak": "right for some dtypes or sizes and wrong for others, and the guard allows both",
    "guard-too-strong": "the guard refuses every size and dtype that was tried",
    "never-for-its-example": "the matcher refuses it for its own example inputs, though not for all others",
    "never-matches": "the matcher refuses it everywhere; the reason is told",
    "not-judged": "it cannot be traced, run or judged here",
    "compiler-fault": "programs come out wrong without it, too: a fault of npugraph_ex to report",
    "differs-for-inf-or-nan": "(a remark) right for finite inputs, wrong with infinities or NaN among them",
    "differs-in-sign-of-zero": "(a remark) right, but zeros have another sign; 1/x and atan2 show it",
    "overlaps-with": "(a remark) another rule fuses the same operators; which one wins is told",
}
"""What each verdict says, the best first."""
_SAID = "\n".join(
    f"  {'proven on N' if name == 'proven' else name:<23} {meaning}" for name, meaning in VERDICTS.items()
)
_DESCRIPTION = f"""\
Find the replacements that MODULE registers with register_replacement, and find out of each whether it computes what it
replaces, wherever its guard (extra_check) lets it match. Random programs around the pattern run in eager mode,
optimised, and captured and replayed; a float64 reference judges the results.

MODULE is imported, with another name than __main__: what stands below `if __name__ == "__main__":` does not run, all else does.
Put what uses the fusions there.

MODULE may be the name of a form of lifting, such as lift_rotary, or `lifting` for all: then random spellings of it, and
near-misses, take the place of programs around a pattern.

verdicts:
{_SAID}

examples:
  npugraph-ex validate my_fusions.py
  npugraph-ex validate my_package.fusions:swiglu --dtype float16 --max-examples 500
  npugraph-ex validate my_fusions.py --json --quiet > verdicts.json
  npugraph-ex validate lift_rotary --max-examples 6

exit status: 0 nothing is wrong, 1 something is, 2 wrong use or nothing was validated (one line says why), 130 after Ctrl-C
(the table has what was validated before it)
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "validate", help="are the replacements that a module registers right?", description=_DESCRIPTION,
    )  # fmt: skip
    parser.add_argument(
        "module", metavar="MODULE[:NAME]",
        help="a module's name or a .py file; NAME is a search function in it, or a function that registers when called",
    )  # fmt: skip
    parser.add_argument("others", nargs="*", default=[], help=argparse.SUPPRESS)  # are refused, with what to do instead
    parser.add_argument(
        "--target", choices=("auto", "emulated", "npu"), default="auto",
        help="which device (default: auto, a real one where there is one)",
    )  # fmt: skip
    dtype = parser.add_argument(
        "--dtype",
        action="append",
        metavar="DTYPE",
        help="float16, bfloat16 or float32; may be repeated (default: all three)",
    )
    completes(dtype, lambda: _DTYPES)
    parser.add_argument(
        "--max-examples",
        type=at_least(1),
        default=60,
        metavar="N",
        help="random programs for each (default: 60); what is wrong in one of them is looked at in more",
    )
    parser.add_argument(
        "--expect-matches", type=at_least(0), default=1, metavar="N",
        help="fail unless each is fused in at least N of them (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="the same seed draws the same programs (default: 0)"
    )
    parser.add_argument(
        "--report-dir", default="npugraph_ex_validation", metavar="DIR",
        help="where counterexamples are written (default: npugraph_ex_validation)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Validate and print; 0 when nothing is wrong, 1 when something is, 130 after Ctrl-C.

    Raises:
        UsageError: nothing could be validated.
    """
    _refuse_several(arguments.module, arguments.others)
    require("validate draws its programs with", {"hypothesis": "hypothesis"}, "conformance")
    names = _dtypes(arguments.dtype)
    from npugraph_ex.testing import arguments as testing_arguments
    from npugraph_ex.testing import rule_places

    if arguments.module != "lifting" and not arguments.module.startswith("lift_"):
        rule_places.split(arguments.module)
    try:
        testing_arguments.check_folder("--report-dir", Path(arguments.report_dir))
    except ValueError as error:
        raise UsageError(str(error)) from error
    recorder = crashes.FlightRecorder()
    if arguments.whole_process and "torch" not in sys.modules:
        recorder = crashes.FlightRecorder.shared()
        status = supervise(recorder, quiet=arguments.quiet)
        if status is not None:
            return status
    # What the module prints goes to stderr: the table or the JSON object is all of the output.
    with result_alone(alone=True, whole_process=arguments.whole_process) as out:
        return _run(arguments, names, recorder, out)


def _run(arguments: argparse.Namespace, names: list[str] | None, recorder: crashes.FlightRecorder, out: TextIO) -> int:
    """Validate and print; a recorder notes what is computed."""
    from npugraph_ex.testing.targets import start_target

    quietly = _silent if arguments.quiet else nullcontext
    with quietly():
        target = start_target(arguments.target)  # imports torch, which takes seconds
    import torch

    dtypes = None if names is None else [getattr(torch, name) for name in names]
    from npugraph_ex.testing.validation import Validation
    from npugraph_ex.testing.validation.findings import report_table, to_json

    results: list[Validation] = []
    with (
        interruptible(on_signal=recorder.count_signal) as stop,
        progress(None, quiet=arguments.quiet) as reached,
        crashes.recording(recorder),
    ):

        def note(result: Validation) -> None:
            results.append(result)
            reached(len(results), f"{result.rule}: {result.verdict}")
            stop.check()

        def step(done: float, total: int, rule: str) -> None:
            reached(done, rule, total)
            stop.check()

        try:
            with quietly():
                _validate(arguments, target.device, dtypes=dtypes, on_result=note, on_progress=step)
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from error
        except KeyboardInterrupt:
            end_children()
    if arguments.json:
        out.write(to_json(results, complete=not stop.number) + "\n")
    elif results or not stop.number:
        out.write(f"{report_table(results)}\n\non {target.device}, seed {arguments.seed}\n")
    if stop.number:
        done = f"{counted(len(results), 'replacement')} {'was' if len(results) == 1 else 'were'} validated"
        sys.stderr.write(f"npugraph-ex: stopped by {stop}; {done} before it\n")
        return stop.status
    return 0 if all(result.ok for result in results) else 1


def _validate(arguments: argparse.Namespace, device: str, **how: Any) -> None:
    """Validate what is named: a module's replacements, or forms of lifting."""
    from npugraph_ex.testing.validation import validate_module
    from npugraph_ex_conformance.lifting_validation import forms_of, validate_forms

    how |= {"seed": arguments.seed, "max_examples": arguments.max_examples, "expect_matches": arguments.expect_matches}
    forms = forms_of(arguments.module)
    if forms:
        validate_forms(forms, target=device, report_dir=arguments.report_dir, **how)
    else:
        validate_module(arguments.module, report_dir=arguments.report_dir, **how)


def _refuse_several(module: str, others: list[str]) -> None:
    if others:
        raise UsageError(
            f"validate takes one module, whose rules are judged without those of another; {len(others) + 1} are named. Write a "
            f"command for each, as in `npugraph-ex validate {module}`"
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Keep warnings back, of the device, of torch and of this library's log; errors are said."""
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _dtypes(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        if name not in _DTYPES:
            raise UsageError(f"--dtype must be one of {', '.join(_DTYPES)}; it is {name!r}")
    return names
