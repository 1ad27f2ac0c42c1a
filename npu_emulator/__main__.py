"""`python -m npu_emulator`: run a program on the emulated device."""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib.util
import json
import re
import runpy
import sys
import traceback
import warnings
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from npu_emulator.activation import activate, current
from npu_emulator.chips import CHIPS, DEFAULT
from npu_emulator.costs import cost_table, costs
from npu_emulator.errors import EmulatorError, note_what_is_missing
from npu_emulator.remaining_threads import wait_for_remaining_threads
from npu_emulator.result_alone import result_alone
from npu_emulator.settings import Settings

_EPILOG = """\
examples:
  python -m npu_emulator train.py --epochs 1        any torch_npu program, unchanged
  python -m npu_emulator -m pytest tests            a module, as `python -m` would run it
  python -m npu_emulator --schedule lazy script.py  run queued work only when something waits for it
  python -m npu_emulator --soc Ascend910B4 serve.py  as it would find 32 GiB, 20 cube cores and their modelled times
  python -m npu_emulator --costs serve.py           what captured graphs hold, and how many of them the device takes
  python -m npu_emulator --kernel-log ran.jsonl serve.py   every kernel that ran: stream, replay, shapes, bytes, line
  python -m npu_emulator --null-kernels bench.py    launch everything, compute nothing: host cost alone

Each option is also an environment variable: --memory-gb 16 is NPU_EMULATOR_MEMORY_GB=16.
"""


class _LauncherParser(argparse.ArgumentParser):
    """A parser that names the nearest option for one that it does not know."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        near = difflib.get_close_matches(wrong[1], list(self._option_string_actions), n=1) if wrong else ()
        super().error(f"{message}; did you mean {near[0]!r}?" if near else message)


def command_line() -> argparse.ArgumentParser:
    """What the launcher takes."""
    parser = _LauncherParser(
        prog="python -m npu_emulator",
        description="Run a torch_npu program on an emulated Ascend NPU: no CANN, no hardware.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", type=_whole, metavar="N", help="how many NPUs to emulate (default 1)")
    parser.add_argument("--memory-gb", type=_whole, metavar="GIB", help="memory of each (default: the chip's)")
    parser.add_argument("--streams", type=_whole, metavar="N", help="how many streams each has (default: the chip's)")
    parser.add_argument(
        "--events", type=_whole, metavar="N", help="how many events each has (default: the chip's, or 65536)"
    )
    parser.add_argument(
        "--cube-cores", type=_whole, metavar="N", help="how many cube cores each has (default: the chip's)"
    )
    parser.add_argument(
        "--vector-cores", type=_whole, metavar="N", help="how many vector cores each has (default: the chip's)"
    )
    parser.add_argument(
        "--soc",
        metavar="NAME",
        help=f"which chip (default {DEFAULT.name}): its name for torch_npu, and its memory, streams, cores and modelled times "
        f"where they are public, as those of {', '.join(CHIPS)} are",
    )
    parser.add_argument("--schedule", metavar="S", help="fifo (default), lazy, random:SEED, pct:SEED:DEPTH")
    parser.add_argument(
        "--faults",
        metavar="LIST",
        help="ranks that fail on purpose: kill:DEVICE:N, delay:DEVICE:N:SECONDS, drop:DEVICE:N",
    )
    parser.add_argument("--null-kernels", action="store_true", default=None, help="run no kernel bodies")
    parser.add_argument(
        "--poison",
        action="store_true",
        default=None,
        help="fill fresh and freed memory with 0xFF (default under every schedule but fifo)",
    )
    parser.add_argument(
        "--check-memory", action="store_true", default=None, help="fail at reads of unwritten or freed memory"
    )
    parser.add_argument(
        "--costs", action="store_true", help="at the end, print what each captured graph costs and how many fit"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="with --costs: one JSON value on stdout; what the program prints goes to stderr",
    )
    parser.add_argument("--kernel-log", metavar="FILE", help="write what ran, in order, as JSON lines")
    parser.add_argument(
        "--as-measured",
        metavar="FILE",
        help="give the errors that a real device gave to `npugraph-ex fidelity --output FILE`",
    )
    parser.add_argument("--force", action="store_true", default=None, help="emulate although CANN or an NPU is present")
    parser.add_argument("--quiet", action="store_true", help="do not print the banner")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module name, not a file")
    parser.add_argument("program", help="script file, or module name after -m")
    further = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the program")
    further.required = False  # Python 3.11 would ask for them beside a missing program
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parse the emulator's own options, activate it, and run the program in this process."""
    parser = command_line()
    options = parser.parse_args(argv)
    if options.json and not options.costs:
        parser.error("--json is the form of --costs; add --costs")
    _refuse_what_is_not_there(parser, options.program, module=options.module)
    settings = {field.name: getattr(options, field.name) for field in fields(Settings)}
    try:
        Settings.from_environment(**settings)
    except EmulatorError as error:
        parser.error(_with_options(str(error), [name for name, value in settings.items() if value is not None]))
    try:
        activate(quiet=options.quiet, **settings)
    except EmulatorError as error:
        sys.exit(f"npu_emulator: {error}\n{error.address}")
    # Every object so far comes from imports and stays. Exclude all of them from later garbage collections: each capture
    # begins with one, and the last one, at the program's end, would take a second.
    gc.freeze()
    with result_alone(alone=options.json, whole_process=True) as out:
        try:
            _run(options.program, options.arguments, module=options.module)
        except SyntaxError as error:
            if error.filename != options.program:
                raise
            sys.exit("".join(traceback.format_exception_only(error)).rstrip())  # Python's own message, without frames
        except RuntimeError as error:
            note_what_is_missing(error)
            raise
        finally:
            if options.costs:
                wait_for_remaining_threads()  # which may capture graphs, too
                emulator = current()
                of = (emulator.runtime.resources(), emulator.settings)
                if options.json:
                    out.write(f"{json.dumps(costs(*of), indent=1)}\n")
                else:
                    sys.stderr.write(f"{cost_table(*of)}\n")


def _with_options(message: str, given: list[str]) -> str:
    """A message about a setting, with the option that gave it in place of the variable."""
    for name in given:
        message = message.replace(f"NPU_EMULATOR_{name.upper()} must", f"--{name.replace('_', '-')} must")
    return message


def _whole(text: str) -> int:
    """A whole number of the command line."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a whole number; it is {text!r}") from None


def _refuse_what_is_not_there(parser: argparse.ArgumentParser, program: str, *, module: bool) -> None:
    path = Path(program)
    if not module and not path.is_file() and not (path / "__main__.py").is_file():
        parser.error(f"there is no file {program!r} (a module needs -m before its name)")
    # Only the first part of a dotted name, because a search for the rest would import it, and perhaps torch, before the
    # device exists.
    first = program.partition(".")[0]
    sys.path.insert(0, "")
    if module and importlib.util.find_spec(first) is None:
        parser.error(f"there is no module named {first!r} (a file needs no -m)")
    del sys.path[0]


def _run(program: str, arguments: list[str], *, module: bool) -> None:
    sys.argv = [program, *arguments]
    if module:
        sys.path.insert(0, "")
        # torch has imported `torch.distributed.run` already, without effects that a second execution could meet.
        warnings.filterwarnings("ignore", rf"'{re.escape(program)}' found in sys\.modules", RuntimeWarning)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
