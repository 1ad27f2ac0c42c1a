"""`npugraph-ex`: look at the environment, run a script, read the options. Only parsing and printing live here."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence

from npugraph_ex._version import __version__
from npugraph_ex.commands import (
    bench,
    cache,
    campaign,
    conformance,
    diff,
    fidelity,
    operators,
    options,
    remedies,
    script,
    terminal,
    upstream,
    validate,
)
from npugraph_ex.console.interrupts import Interrupt
from npugraph_ex.console.progress import progress
from npugraph_ex.errors import NpuGraphExError, UsageError, address_of
from npugraph_ex.observe import environment, private_names

_SWITCH = "NPUGRAPH_EX"
_WANTED, _UNKNOWN = " (the emulated device needs one)", "unknown: the imports fail"

_COMMANDS = {
    "bench": bench,
    "cache": cache,
    "campaign": campaign,
    "conformance": conformance,
    "diff": diff,
    "fidelity": fidelity,
    "help": remedies,
    "operators": operators,
    "options": options,
    "upstream": upstream,
    "validate": validate,
}

_EXAMPLES = {
    "cache": "cache ls\ncache show --json Model.decode\ncache --dir compiled clear Model.decode",
    "env": "env\nenv --emulate --json\nenv --emulate --canary",
    "options": "options\noptions lift\noptions --json",
}
"""Of the commands whose description has none."""
_NO_MORE = {address_of(kind.__name__) for kind in (NpuGraphExError, UsageError)}
"""Addresses whose sections say no more than the message."""

_EPILOG = """\
examples:
  npugraph-ex env                               what is installed, which device, what is wrong and how to mend it
  npugraph-ex run --emulate script.py           run a torch_npu program on an emulated NPU; no CANN, no hardware
  npugraph-ex run --as-torchair old_script.py   run a script that says `import torchair` on this library
  npugraph-ex explain --emulate script.py       run it so, then what was compiled: inputs, passes, fusions, captures
  npugraph-ex advise --emulate script.py        what could be fused in its models, what that wins, what to change
  npugraph-ex timeline script.py                draw what the streams of a program do, on a modelled clock
  npugraph-ex validate my_fusions.py            are the replacements that it registers right? exit status 1 if not
  npugraph-ex cache ls                          saved compilations; `cache show NAME`, `cache clear [PREFIX]`
  npugraph-ex conformance --profile full        random programs, streams, models: do eager, fused and replayed agree?
  npugraph-ex campaign integers=200000          very many examples, on all cores or on a Ray cluster; can be resumed
  npugraph-ex fidelity --target npu             does a real NPU obey the rules of the emulated one? one file of answers
  npugraph-ex bench call device                 what a call costs beside the floor and the bundled backend; tables
  npugraph-ex upstream op-plugin -k rms_norm    the tests of op-plugin or torch_npu on the emulated NPU: what fails, and why
  npugraph-ex diff dump_a dump_b                the first node whose values differ between two dumps, with ULPs
  npugraph-ex operators script.py               which NPU operators it needs, and which of them the emulated NPU lacks
  npugraph-ex help CaptureError                 what causes an error or a device code, and what to do
  npugraph-ex options                           every option of torch.compile(..., options={...})

in a program:
  import torch, torch_npu, npugraph_ex
  fast = torch.compile(model, backend="npugraph_ex", options={"capture_limit": 16})

NPUGRAPH_EX=bundled gives the name npugraph_ex back to the backend that torch_npu brings.
Every command takes --quiet (no progress, no remarks) and, but for `run`, --json (data for programs on stdout; all else on stderr).
Ctrl-C ends each of them at once: it prints and keeps what it found so far.
exit status: 0 well, 1 something is wrong (the message says what), 2 wrong use or nothing ran, 130 after Ctrl-C; `run`,
`explain`, `advise` and `timeline` pass the script's on.
"""


def main(argv: Sequence[str] | None = None, *, choice: str | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The arguments; those of the process if None.
        choice: The value of NPUGRAPH_EX that the console script took out of the environment, so that this code loads.
    """
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next, and wants no more of this process
        import argcomplete

        argcomplete.autocomplete(parser)
    terminal.refuse_before_the_command(parser, sys.argv[1:] if argv is None else argv)
    arguments, further = parser.parse_known_args(argv)
    if further and not (getattr(arguments, "takes_further", False) and terminal.DEVICES.keys().isdisjoint(further)):
        arguments.parser.error(f"unrecognized arguments: {' '.join(further)}")
    arguments.further = further
    arguments.whole_process = argv is None  # else a caller goes on when the command has ended
    if arguments.command is None:
        parser.print_help()
        return 2
    said = choice if choice is not None else os.environ.get(_SWITCH, "")
    try:
        if arguments.command == "env":
            if arguments.canary:
                return _canary(as_json=arguments.json, emulate=arguments.emulate)
            return _env(arguments, choice=said)
        if arguments.command in script.COMMANDS:
            return script.COMMANDS[arguments.command](arguments, said)
        run: Callable[[argparse.Namespace], int] = _COMMANDS[arguments.command].run
        return run(arguments)
    except OSError as error:
        return _unwritten(error)
    except NpuGraphExError as error:
        address = "" if error.address in _NO_MORE else f"\n{error.address}"
        sys.stderr.write(f"npugraph-ex: {error}{address}\n")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt as interrupt:
        stop = Interrupt(next((number for number in interrupt.args if isinstance(number, int)), 0))
        sys.stderr.write(f"npugraph-ex: stopped by {stop}\n")
        return stop.status


def _unwritten(error: OSError) -> int:
    """The status after stdout took no more: its reader, such as `head`, has enough, or the disk is full."""
    if error.errno not in {errno.EPIPE, errno.ENOSPC}:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes once more at its end
    if error.errno == errno.EPIPE:
        return 141
    sys.stderr.write(f"npugraph-ex: the output cannot be written: {error.strerror}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(
        prog="npugraph-ex",
        description="A torch.compile backend for Ascend NPUs whose rewrites are checked, on an NPU or on any laptop.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"npugraph-ex {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    env = commands.add_parser(
        "env", help="what is installed, which device, what is wrong and how to mend it",
        description="What is installed, which device programs find, which commands run a program here, and what is wrong, with its "
        "remedy. Exit status 1 if nothing can compile here.",
    )  # fmt: skip
    env.add_argument("--emulate", action="store_true", help="look at the emulated device even beside a real one")
    env.add_argument(
        "--canary", action="store_true",
        help="which private names of torch and torch_npu this project uses, and which of them the installed releases lack; "
        "exit status 1 if one is gone. With --emulate on a machine without CANN",
    )  # fmt: skip
    script.add_parsers(commands)
    for command in _COMMANDS.values():
        command.add_parser(commands)
    for name, command_parser in commands.choices.items():
        terminal.furnish(command_parser, examples=_EXAMPLES.get(name, ""), result=name != "run")
    return parser


def _canary(*, as_json: bool, emulate: bool) -> int:
    if emulate:
        import npu_emulator

        npu_emulator.activate(quiet=True)
    try:
        import torch
        import torch_npu
    except (ImportError, RuntimeError) as error:  # the second is torch's, where torch_npu's import fails
        advice = "" if emulate else "; without CANN, add --emulate"
        raise NpuGraphExError(
            f"the names come from torch and torch_npu, which cannot be imported here: {error.__cause__ or error}{advice}"
        ) from error
    names = private_names.used()
    gone = private_names.missing(names)
    if as_json:
        sys.stdout.write(
            json.dumps({"torch": torch.__version__, "torch_npu": torch_npu.__version__, "used": names, "missing": gone})
            + "\n"
        )
    else:
        for name, files in gone.items():
            sys.stdout.write(f"gone: {name}, used by {', '.join(files)}\n")
        sys.stdout.write(
            f"{len(names)} private names of torch {torch.__version__} and torch_npu {torch_npu.__version__} are used; "
            f"{f'{len(gone)} of them are gone' if gone else 'all are there'}\n"
        )
    return 1 if gone else 0


def _env(arguments: argparse.Namespace, *, choice: str) -> int:
    emulate: bool = arguments.emulate
    with progress(1 if emulate else 2, quiet=arguments.quiet) as reached:
        found = environment.inspect(
            emulate=emulate, choice=choice, on_probe=lambda done, way: reached(done, f"does `{way}` work?")
        )
    if arguments.json:
        sys.stdout.write(found.as_json() + "\n")
        return 0 if found.works else 1
    rows = [
        ("Python", found.python),
        *((package, version or "not installed") for package, version in found.packages.items()),
        ("tested torch/torch_npu", ", ".join(f"{torch}/{npu}" for torch, npu in found.tested.items())),
        ("CANN", found.cann or "not found"),
        ("NPU devices", ", ".join(found.npus) or "none"),
        ("emulated device", "came with the wheel" if found.shipped else "compiled on first use"),
        ("C++ compiler", found.compiler or f"not found{', nor needed' if found.shipped else _WANTED}"),
        ("device", f"{found.device}{f' ({found.device_name})' if found.device_name else ''}"),
        (_SWITCH, found.choice or "not set: this library"),
        ("import npugraph_ex", found.import_name or _UNKNOWN),
        ('backend="npugraph_ex"', found.backend_string or _UNKNOWN),
    ]
    # No table of rich's: it breaks paths and commands at the edge of the terminal, and nobody can copy them.
    width = max(len(name) for name, _ in rows)
    said = [f"{name:<{width}}  {value}" for name, value in rows]
    for problem in found.problems:
        said += ["", f"{'problem' if problem.fatal else 'note'}: {problem.what}", f"  mend it: {problem.remedy}"]
    said.append("")
    said += [f"{'works:         ' if works else 'does not work: '}{way}" for way, works in found.commands.items()]
    sys.stdout.write("\n".join(said) + "\n")
    return 0 if found.works else 1


if __name__ == "__main__":
    sys.exit(main())
