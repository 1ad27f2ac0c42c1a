"""`npugraph-ex`: look at the environment, run a script, read the options. Only parsing and printing live here."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from npugraph_ex._version import __version__
from npugraph_ex.config import OPTION_TABLE
from npugraph_ex.errors import NpuGraphExError
from npugraph_ex.observe import environment

_SWITCH = "NPUGRAPH_EX"

_EPILOG = """\
examples:
  npugraph-ex env                               what is installed, which device, what is wrong and how to mend it
  npugraph-ex run --emulate script.py --steps 3 run a torch_npu program on an emulated NPU; no CANN, no hardware
  npugraph-ex run --as-torchair old_script.py   run a script that says `import torchair` on this library
  npugraph-ex explain --emulate script.py       the same, then what was compiled: inputs, passes, fusions, captures
  npugraph-ex options                           every option of torch.compile(..., options={...})

in a program:
  import torch, torch_npu, npugraph_ex
  fast = torch.compile(model, backend="npugraph_ex", options={"capture_limit": 16})

NPUGRAPH_EX=bundled gives the name npugraph_ex back to the backend that torch_npu brings.
exit status: 0 well, 1 something is wrong (the message says what), 2 a wrong command line; `run` passes the script's on.
"""


def main(argv: Sequence[str] | None = None, *, choice: str | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The arguments; those of the process if None.
        choice: The value of NPUGRAPH_EX that the console script took out of the environment, so that this code loads.
    """
    arguments = _parser().parse_args(argv)
    said = choice if choice is not None else os.environ.get(_SWITCH, "")
    try:
        if arguments.command == "env":
            return _env(as_json=arguments.json, emulate=arguments.emulate, choice=said)
        if arguments.command == "options":
            return _options()
        if arguments.command == "explain":
            return _explain(arguments, said)
        return _run(arguments, said)
    except NpuGraphExError as error:
        sys.stderr.write(f"npugraph-ex: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npugraph-ex",
        description="A torch.compile backend for Ascend NPUs whose rewrites are checked, on an NPU or on any laptop.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"npugraph-ex {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    env = commands.add_parser("env", help="what is installed, which device, what is wrong and how to mend it")
    env.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    env.add_argument("--emulate", action="store_true", help="look at the emulated device even beside a real one")
    run = commands.add_parser("run", help="run a script as `python script.py` would")
    explain = commands.add_parser("explain", help="run a script, then say what was compiled and why it is as it is")
    explain.add_argument("--json", action="store_true", help="one JSON object; the script's own output goes to stderr")
    for runs in (run, explain):
        runs.add_argument("--emulate", action="store_true", help="on an emulated NPU")
        runs.add_argument("--as-torchair", action="store_true", help="make `import torchair` mean this library")
        runs.add_argument("script", help="the Python file to run")
        runs.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    commands.add_parser("options", help="the table of compile options")
    return parser


def _env(*, as_json: bool, emulate: bool, choice: str) -> int:
    found = environment.inspect(emulate=emulate, choice=choice)
    if as_json:
        sys.stdout.write(found.as_json() + "\n")
        return 0 if found.works else 1
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Python", found.python)
    for package, version in found.packages.items():
        table.add_row(package, version or "not installed")
    table.add_row("CANN", found.cann or "not found")
    table.add_row("NPU devices", ", ".join(found.npus) or "none")
    table.add_row("C++ compiler", found.compiler or "not found (the emulated device needs one)")
    table.add_row("device", f"{found.device}{f' ({found.device_name})' if found.device_name else ''}")
    table.add_row(_SWITCH, found.choice or "not set: this library")
    table.add_row("import npugraph_ex", found.import_name or "unknown: the imports fail")
    table.add_row('backend="npugraph_ex"', found.backend_string or "unknown: the imports fail")
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(table)
    for problem in found.problems:
        console.print(f"\n{'problem' if problem.fatal else 'note'}: {problem.what}", markup=False)
        console.print(f"  mend it: {problem.remedy}", markup=False)
    console.print("\n" + ("This environment works." if found.works else "This environment does not work yet."))
    return 0 if found.works else 1


def _options() -> int:
    """Print the option table."""
    table = Table("option", "default", "allowed", "meaning", "TorchAir", title="options of backend='npugraph_ex'")
    for row in OPTION_TABLE.values():
        limit = "" if row.honoured is None else f" (this version: {', '.join(repr(value) for value in row.honoured)})"
        path = f"{row.torchair}{' (inverted)' if row.inverted else ''}"
        table.add_row(row.name, repr(row.default), row.kind.allowed + limit, row.meaning, path)
    Console(width=None if sys.stdout.isatty() else 200).print(table, markup=False)
    return 0


def _explain(arguments: argparse.Namespace, choice: str) -> int:
    """Run a script and print what this backend made of it, even when the script fails."""
    if choice == "bundled":
        raise NpuGraphExError(f"explain tells of this library, and {_SWITCH}=bundled asks for torch_npu's; unset it")
    out = sys.stdout

    def report() -> None:
        from npugraph_ex.frontend.explain import Watch

        found = Watch(from_start=True).explanation()
        out.write(f"{found.to_json()}\n" if arguments.json else f"\n{found}\n")

    with redirect_stdout(sys.stderr if arguments.json else out):
        return _run(arguments, choice, at_end=report)


def _run(arguments: argparse.Namespace, choice: str, *, at_end: Callable[[], None] | None = None) -> int:
    """Become the script: its argv, its directory first on the path, `__main__` as its name."""
    script: str = arguments.script
    if not Path(script).is_file():
        raise NpuGraphExError(f"there is no file {script!r} to run")
    if choice:
        os.environ[_SWITCH] = choice
    if choice == "bundled":
        if arguments.as_torchair:
            raise NpuGraphExError(
                f"--as-torchair asks for this library and {_SWITCH}=bundled for torch_npu's; choose one"
            )
        _start_afresh(arguments)
    if arguments.as_torchair:
        from npugraph_ex.compat import use_as_torchair

        use_as_torchair()
    if arguments.emulate:
        import npu_emulator

        try:
            npu_emulator.activate()
        except npu_emulator.EmulatorError as error:
            raise NpuGraphExError(str(error)) from error
    sys.argv = [script, *arguments.arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        loaded = runpy.run_path(script, run_name="__main__")  # what is reported at the end must still be alive then
    finally:
        if at_end is not None:
            at_end()
    del loaded
    return 0


def _start_afresh(arguments: argparse.Namespace) -> NoReturn:
    """Run the script in a new interpreter, because this one has already loaded the library that is not wanted."""
    launcher = ["-m", "npu_emulator"] if arguments.emulate else []
    command = [sys.executable, *launcher, arguments.script, *arguments.arguments]
    os.execv(sys.executable, command)  # noqa: S606 - the user's own script, as they asked


if __name__ == "__main__":
    sys.exit(main())
