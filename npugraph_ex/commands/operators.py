"""`npugraph-ex operators`: which NPU operators are covered, which of them a script needs, and whether records are right."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TextIO

from npu_emulator.result_alone import result_alone
from npugraph_ex._plurals import counted, noun
from npugraph_ex.commands import ranks, script
from npugraph_ex.commands.terminal import remark, show
from npugraph_ex.console.interrupts import interruptible
from npugraph_ex.console.progress import progress
from npugraph_ex.errors import UsageError, address_of

if TYPE_CHECKING:
    from npugraph_ex.operators import Operator

_VENDOR = ("npu::", "atb::")
_GIVE_ONE = f"How to give it one:\n{address_of('KernelMissingError')}"
_DESCRIPTION = """\
Without more, list the operators whose results are computed: name, dtypes, and the document that their formula is from. Of those
without a formula of this library, ATen's among them, the list says where the emulated device's kernel is from: torch's CPU kernel,
a composition, torch_npu, or nowhere. How many are covered comes last.

  npugraph-ex operators                     the list; --json for programs
  npugraph-ex operators --having addmm      the operators whose name has this text
  npugraph-ex operators script.py           run the script on the emulated device, and say which operators of npu and atb it
                                            calls, and which of them are missing. A missing one gives zeros, so that the
                                            script goes on; what it prints then means nothing. It ends at one whose
                                            shapes torch_npu does not know, either. Operators that the script
                                            defines are named, too, where the device cannot run them
  npugraph-ex operators --check my_ops.py   import a module and check the records that it adds: signature, metadata, each
                                            dtype against float64, torch's opcheck on the emulated device

exit status: 0 well, 1 an operator of npu or atb is missing, the script failed, or a record is wrong, 2 wrong use, 130 after Ctrl-C
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "operators", help="which operators are covered, which a script needs, whether records are right",
        description=_DESCRIPTION,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON value; a script's own output goes to stderr")
    parser.add_argument("--having", metavar="TEXT", default="", help="list only operators whose name has TEXT")
    parser.add_argument("--check", metavar="MODULE", help="check the records that a module, a name or a .py file, adds")
    parser.add_argument("script", nargs="?", help="a Python file that needs NPU operators")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")


def run(arguments: argparse.Namespace) -> int:
    """List, run a script or check a module.

    Raises:
        UsageError: a script and a module at once, or one that is not there.
    """
    if arguments.script is not None and arguments.check is not None:
        raise UsageError("operators takes a script, or --check and a module; leave one out")
    if arguments.script is not None:
        return _of_script(arguments)
    from npugraph_ex.testing.targets import start_target

    start_target("emulated" if arguments.check else "auto")
    if not arguments.check:
        return _listed(arguments)
    with result_alone(alone=arguments.json, whole_process=arguments.whole_process) as out:
        return _checked(arguments, out)


def _listed(arguments: argparse.Namespace) -> int:
    """List records, and on the emulated device all other operators with the origin of their kernels."""
    import npu_emulator
    from npugraph_ex.operators import OPERATORS

    known = {name: record for name, record in OPERATORS.items() if record.formula is not None}
    origins = npu_emulator.kernel_origins() if npu_emulator.is_active() else {}
    rows = [_row(name, known.get(name), origins.get(name, "")) for name in sorted({*known, *origins})]
    chosen = [row for row in rows if arguments.having in row["operator"]]
    if arguments.json:
        show(arguments, chosen, "")
        return 0
    width = max((len(row["operator"]) for row in chosen if row["covered"]), default=0)
    for row in chosen:
        if row["covered"]:
            dtypes = f"\n{'':<{width}}    {', '.join(row['dtypes'])}" if row["dtypes"] else ""
            sys.stdout.write(f"{row['operator']:<{width}}  {row['source']}{dtypes}\n")
    sys.stdout.write("".join(_counted(chosen)) or f"No operator's name has {arguments.having!r}.\n")
    return 0


def _row(name: str, record: Operator | None, origin: str) -> dict[str, Any]:
    """One operator: a record's source is its document, another one's the origin of its kernel."""
    dtypes = [_short(dtype) for dtype in record.dtypes] if record else []
    source = record.source if record else origin
    kind = "a record of this library" if record else origin
    return {"operator": name, "dtypes": dtypes, "source": source, "kernel": kind, "covered": kind != "no kernel"}


def _counted(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How many operators of each library are covered, from where, and the names of the others."""
    for library, found in itertools.groupby(rows, lambda row: str(row["operator"]).partition("::")[0]):
        listed = [*found]
        absent = [row["operator"].partition("::")[2] for row in listed if not row["covered"]]
        yield f"\n{library}: {len(listed) - len(absent)} of {counted(len(listed), 'operator')} covered\n"
        for kind, count in Counter(row["kernel"] for row in listed).most_common():
            yield f"  {count:>5}  {kind}\n"
        yield f"{textwrap.fill('not covered: ' + ', '.join(absent), 130)}\n" if absent else ""


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _of_script(arguments: argparse.Namespace) -> int:
    """Run the script with missing operators noted, and print what it called."""
    arguments.emulate, arguments.as_torchair = True, False
    script.give_files(arguments)
    missing, ran, without_kernel = Counter[str](), Counter[str](), set[str]()

    @contextmanager
    def noted() -> Iterator[None]:
        import npu_emulator
        from npugraph_ex._torch_private import operators_without_kernel

        before, ran_before = operators_without_kernel(), Counter(npu_emulator.kernel_counts())
        with npu_emulator.missing_kernels() as found:
            try:
                yield
            finally:
                missing.update(found)
                ran.update(_vendors(Counter(npu_emulator.kernel_counts()) - ran_before))
                without_kernel.update(operators_without_kernel() - before)

    exited: SystemExit | None = None
    alone = result_alone(alone=arguments.json, whole_process=arguments.whole_process)
    with interruptible() as stop, alone as out:
        try:
            status = script.run(arguments, "", around=noted, stop=stop)
        except SystemExit as error:  # the usual end of a script, after which there is as much to tell
            exited, status = error, int(error.code not in (None, 0))
        needed = [
            {"operator": name, "calls": count, "missing": name in missing}
            for name, count in sorted((ran + missing).items())
        ]
        with ranks.output(arguments, out) as shown:
            if arguments.json:
                found = {"operators": needed, "without_kernel": sorted(without_kernel), "script_failed": bool(status)}
                shown.write(json.dumps(found, indent=1) + "\n")
            else:
                shown.write("".join(_as_lines(needed, arguments.script, failed=bool(status))))
                for name in sorted(without_kernel):
                    shown.write(f"{name}, which the script defines, has no kernel. {_GIVE_ONE}\n")
    if exited is not None and status and not isinstance(exited.code, int):
        sys.stderr.write(f"{exited.code}\n")  # as Python does
    return status or int(bool(missing))


def _vendors(counts: dict[str, int]) -> dict[str, int]:
    """Operators that ran, as records name them: ``npu.npu_swiglu.default`` is ``npu::npu_swiglu``."""
    calls = {name: count for name, count in counts.items() if not name.endswith(" (results)")}
    found = {name.replace(".", "::", 1).removesuffix(".default"): count for name, count in calls.items()}
    return {name: count for name, count in found.items() if name.startswith(_VENDOR)}


def _as_lines(needed: list[dict[str, Any]], name: str, *, failed: bool) -> Iterator[str]:
    if not needed and failed:
        yield "\nThe script failed before it called an operator of npu or atb.\n"
        return
    if not needed:
        yield f"\n{name} calls no operator of npu or atb.\n"
        return
    width = max(len(row["operator"]) for row in needed)
    yield f"\noperators of npu and atb that {name} calls\n"
    for row in needed:
        yield f"  {row['operator']:<{width}}  {counted(row['calls'], 'time'):>12}{'  MISSING' if row['missing'] else ''}\n"
    absent = sum(row["missing"] for row in needed)
    verb = noun(1 if len(needed) == 1 else absent, "is", "are")
    yield f"{absent} of {counted(len(needed), 'operator')} {verb} missing.\n"
    if failed:
        yield "The script failed: what it calls behind that place is not in the list.\n"
    if absent:
        yield f"What the script did after the first missing one means nothing. {_GIVE_ONE}\n"


def _checked(arguments: argparse.Namespace, out: TextIO) -> int:
    """Check the records that a module adds; a line for each that is right, the faults of the others."""
    from npugraph_ex.operators import OPERATORS
    from npugraph_ex.testing.validation.loading import load_module
    from npugraph_ex_conformance.operator_checks import has_meta

    found: dict[str, Operator] = {}
    OPERATORS.listen(found.__setitem__)
    load_module(arguments.check)
    if not found:
        raise UsageError(
            f"{arguments.check} adds no record; decorate a formula with npugraph_ex.operators.Operator(...)"
        )
    steps = [(name, what, check) for name, record in found.items() for what, check in _checks(record)]
    faults: dict[str, list[str]] = {}
    ended = 0
    with (
        interruptible() as stop,
        progress(len(steps), quiet=arguments.quiet) as reached,
        warnings.catch_warnings(),
    ):
        # opcheck copies tensors, and torch_npu's copy of a storage warns of its own use of an old name.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        try:
            for name, what, check in steps:
                reached(ended, f"{name}: {what}")
                faults.setdefault(name, []).extend(check())
                stop.check()
                ended += 1
            reached(ended, "done")
        except KeyboardInterrupt:
            sys.stderr.write(f"npugraph-ex: stopped by {stop} after {ended} of {counted(len(steps), 'check')}\n")
    for name, record in found.items():
        if record.overload is not None and not has_meta(record.overload):
            remark(
                arguments,
                f'{name}: no fake function, so torch.compile cannot take it: torch.library.register_fake("{name}")',
            )
    whole = {name for name in faults if all(other != name for other, _, _ in steps[ended:])}
    lines = [
        line
        for name, wrong in faults.items()
        for line in (
            f"{name}: {'WRONG' if wrong else 'right' if name in whole else 'right so far'}",
            *(f"  {w}" for w in wrong),
        )
    ]
    with redirect_stdout(out):
        show(
            arguments,
            {name: {"faults": wrong, "complete": name in whole} for name, wrong in faults.items()},
            "\n".join(lines),
        )
    return stop.status if stop.number else int(any(faults.values()))


def _checks(record: Operator) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """The checks of a record by name. If one raises, the error is one more fault, and the other checks go on."""
    from npugraph_ex_conformance.operator_checks import checks

    def guarded(what: str, run: Callable[[], Iterable[str]]) -> Iterator[str]:
        try:
            yield from run()
        except Exception as error:  # noqa: BLE001 - the formula is the user's
            own = record.formula.__code__.co_filename if record.formula else ""
            lines = [f"{own}:{line.lineno}: " for line in extract_tb(error.__traceback__) if line.filename == own]
            said = " ".join(str(error).split())
            yield f"{what}: {lines[-1] if lines else ''}{type(error).__name__}{f': {said}' if said else ''}"

    try:
        found = checks(record)
    except Exception:  # noqa: BLE001 - raised again, and guarded, as a check
        found = {"examples": lambda: iter(checks(record))}
    for what, check in found.items():
        yield what, partial(guarded, what, check)
