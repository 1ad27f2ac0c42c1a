"""`npugraph-ex run`, `explain`, `advise`, `timeline`: become a script, and say what went wrong, was compiled or ran when."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from npu_emulator.remaining_threads import remaining_threads, wait_for_remaining_threads
from npu_emulator.result_alone import result_alone
from npugraph_ex._plurals import noun
from npugraph_ex.commands import advise, ranks, timeline
from npugraph_ex.commands.numbers import seconds
from npugraph_ex.commands.output_files import output_file, unwritable
from npugraph_ex.commands.terminal import say_written
from npugraph_ex.console.interrupts import Interrupt, end_children, interruptible
from npugraph_ex.console.progress import as_in_a_file
from npugraph_ex.errors import NpuGraphExError, UsageError
from npugraph_ex.observe import NOTHING_COMPILED, environment

if TYPE_CHECKING:
    from npu_emulator.clock.timeline import Timeline
    from npu_emulator.pages import Facts
    from npugraph_ex.observe.explain import Explanation

_SWITCH = "NPUGRAPH_EX"
_EXPLAIN = """\
Run a script, then say on one screen what was compiled: how the graphs run, where they end, what was fused and what nearly, kernels
and modelled time, captures, and what to do next; with --full, in tables that have each input, pass, rule, capture and call.
A program that does not end by itself, such as a server, is explained when it is stopped: by Ctrl-C, by SIGTERM, or by --after.
With `torchrun ... -m npugraph_ex explain script.py` each rank has files of its own, FILE.rank1.html, and the first one prints.

examples:
  npugraph-ex explain --emulate script.py --steps 3
  npugraph-ex explain --emulate --full script.py | less
  npugraph-ex explain --emulate --html story.html script.py
  npugraph-ex explain --json server.py > graphs.json         Ctrl-C stops the server; then it is explained

exit status: the script's; 130 after Ctrl-C, 143 after SIGTERM, 0 when --after ended it
"""
_RUN = """\
Run a script as `python script.py` would: with its arguments, its folder first on the path, and its own tracebacks.

examples:
  npugraph-ex run --emulate script.py --steps 3     on an emulated NPU: no CANN, no hardware
  npugraph-ex run --as-torchair old_script.py       a script that says `import torchair`

exit status: the script's; 130 after Ctrl-C
"""
_LAUNCHER = {
    __file__,
    advise.__file__,
    timeline.__file__,
    contextmanager.__code__.co_filename,
    runpy.run_path.__code__.co_filename,
}
"""The files whose frames lie above the script's."""
_NOTHING = '{"graphs": [], "breaks": [], "peak_bytes": null, "function": "", "refused": [], "loaded": 0}'


def add_parsers(commands: Any) -> None:
    """Describe the command lines."""
    running = commands.add_parser("run", help="run a script as `python script.py` would", description=_RUN)
    explaining = commands.add_parser(
        "explain", help="run a script, then say what was compiled and why it is as it is", description=_EXPLAIN,
    )  # fmt: skip
    explaining.add_argument(
        "--full", action="store_true", help="all tables: each input, pass, rule, capture and changed call"
    )
    explaining.add_argument(
        "--html", type=output_file, metavar="FILE",
        help="also write all of it as a page, graphs side by side; with --emulate, with the modelled time of the streams",
    )  # fmt: skip
    explaining.add_argument(
        "--sarif", type=output_file, metavar="FILE", help="also write what the stream check found, as SARIF 2.1.0"
    )
    explaining.add_argument(
        "--after",
        type=seconds,
        metavar="SECONDS",
        help="stop the script so long after its first line, and explain what was compiled",
    )
    for parser in (running, explaining):
        parser.add_argument("--emulate", action="store_true", help="on an emulated NPU")
    for parser in (running, explaining, advise.add_parser(commands), timeline.add_parser(commands)):
        parser.add_argument("--as-torchair", action="store_true", help="make `import torchair` mean this library")
        parser.add_argument("script", help="the Python file to run")
        further = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
        further.required = False  # Python 3.11 would ask for them beside a missing script


def explain(arguments: argparse.Namespace, choice: str) -> int:
    """Run a script and print what this backend made of it, even when the script fails or is stopped."""
    if choice == "bundled":
        raise UsageError(f"explain tells of this library, and {_SWITCH}=bundled asks for torch_npu's; unset it")
    give_files(arguments, "sarif", "html")

    @contextmanager
    def explained() -> Iterator[None]:
        clock: Timeline | None = None
        try:
            if arguments.html is not None and arguments.emulate:
                with timeline.followed() as clock:
                    yield
            else:
                yield
        finally:
            with ranks.output(arguments, out) as shown:
                _report(arguments, shown, clock)

    with interruptible(after=arguments.after) as stop, _result_alone(arguments) as out:
        status = run(arguments, choice, around=explained, stop=stop)
    _leave_threads(stop, status)
    return status


def give_files(arguments: argparse.Namespace, *options: str) -> None:
    """Give each rank files of its own. Refuse what cannot be written now, not when a long run has ended, and the script itself."""
    script = arguments.script
    ranks.give_own_files(arguments, *options)
    named = [(f"--{option}", getattr(arguments, option)) for option in options]
    for option, file in [*named, (f"what rank {ranks.rank()} would print", ranks.unprinted(arguments))]:
        if file is None:
            continue
        if file.is_file() and Path(script).is_file() and file.samefile(script):
            raise UsageError(f"{option}: {str(file)!r} is the script itself; give another file")
        if why := unwritable(file):
            raise UsageError(f"{option}: {why}")


@contextmanager
def _refused(option: str, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option}: {file} cannot be written: {error.strerror}") from error


def _result_alone(arguments: argparse.Namespace) -> AbstractContextManager[TextIO]:
    return result_alone(alone=arguments.json, whole_process=arguments.whole_process)


def _leave_threads(stop: Interrupt, status: int) -> None:
    """End the process if threads of a script that was stopped would keep it alive."""
    if stop.number:
        end_children()
        if remaining_threads():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _report(arguments: argparse.Namespace, out: TextIO, clock: Timeline | None) -> None:
    if (
        "npugraph_ex.frontend.entry.backend" not in sys.modules and arguments.html is None and arguments.sarif is None
    ):  # then torch may not even import
        out.write(f"{_NOTHING}\n" if arguments.json else f"\n{NOTHING_COMPILED}\n")
        return
    from npugraph_ex.frontend.entry.explain import Watch

    found = Watch(from_start=True).explanation()
    try:  # the files first: a reader of the text, such as `head`, may end before the text does
        _write_files(arguments, found, clock)
    finally:
        if arguments.json:
            out.write(f"{found.to_json()}\n")
        else:
            again = "" if arguments.quiet else _again(arguments)
            _print(found if arguments.full else found.summary(again, ranks.started(arguments)), out)


def _print(shown: Explanation | Facts | str, out: TextIO) -> None:
    """Text; tables on a terminal in its width, which breaks other lines itself, so that they can be copied whole."""
    if not out.isatty() or as_in_a_file() or not hasattr(shown, "__rich_console__"):
        out.write(f"\n{shown}\n")
        return
    from rich.console import Console

    Console(file=out, highlight=False).print(shown)


def _again(arguments: argparse.Namespace) -> str:
    """The command line that runs the script again so."""
    options = ["--emulate"] * arguments.emulate + ["--as-torchair"] * arguments.as_torchair
    return shlex.join([*options, arguments.script, *arguments.arguments])


def _write_files(arguments: argparse.Namespace, found: Explanation, clock: Timeline | None) -> None:
    if arguments.html is not None:
        from npu_emulator.clock.picture import sections

        story = found.page(title=f"{Path(arguments.script).name} explained", further=sections(clock) if clock else ())
        _write("--html", arguments.html, story.html())
        say_written(arguments, arguments.html)
    if arguments.sarif is not None:
        _write("--sarif", arguments.sarif, found.streams.to_sarif())
        say_written(arguments, arguments.sarif)


def _write(option: str, file: Path, text: str) -> None:
    with _refused(option, file):
        file.write_text(text, encoding="utf-8")


def draw(arguments: argparse.Namespace, choice: str) -> int:
    """Run a script and draw what its streams do."""
    if choice == "bundled":
        raise UsageError(f"timeline follows this process, and {_SWITCH}=bundled needs another; unset it")
    if arguments.devices is not None:
        raise UsageError(timeline.RANKS)
    give_files(arguments)
    folder: Path = arguments.output
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    with _refused("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for one in missing:  # a script that does not run leaves no empty folder
        one.rmdir()
    return _watched(arguments, choice, lambda out, _: timeline.drawn(arguments, out))


def give_advice(arguments: argparse.Namespace, choice: str) -> int:
    """Run a script and say what could be fused in its models."""
    if choice == "bundled":
        raise UsageError(f"advise watches this library, and {_SWITCH}=bundled asks for torch_npu's; unset it")
    give_files(arguments, "html", "discover")
    found: Path | None = arguments.discover
    if found is not None and found.is_file() and found.stat().st_size:
        raise UsageError(
            f"--discover: {str(found)!r} is there already, and its rules may have been edited; give another name or remove it"
        )
    return _watched(arguments, choice, partial(advise.advised, arguments))


def _watched(
    arguments: argparse.Namespace, choice: str, around: Callable[[TextIO, Interrupt], AbstractContextManager[None]]
) -> int:
    """Run a script in a block that tells something at its end."""
    with interruptible() as stop, _result_alone(arguments) as out:
        status = run(arguments, choice, around=lambda: around(out, stop), stop=stop)
    _leave_threads(stop, status)
    return status


def run(
    arguments: argparse.Namespace,
    choice: str,
    *,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    stop: Interrupt | None = None,
) -> int:
    """Become the script: its argv, its directory first on the path, `__main__` as its name.

    Args:
        arguments: the command line.
        choice: the value of NPUGRAPH_EX.
        around: makes the block in which the script runs.
        stop: what asks the script to stop; None where only Ctrl-C does, as in Python.

    Returns:
        0 where the script ends by itself, 1 after an error that is shown with its traceback, 130 after Ctrl-C; `sys.exit`
        passes through.

    Raises:
        UsageError: no such script, or flags that contradict each other.
    """
    script: str = arguments.script
    if not Path(script).is_file():
        raise UsageError(f"there is no file {script!r} to run")
    broken = _syntax_error(script)
    if broken is not None:  # nothing has begun, of which something could be told afterwards
        traceback.print_exception(broken)
        return 1
    misplaced = _misplaced(arguments)
    if misplaced and not arguments.quiet and ranks.prints():
        _warn_of_misplaced(misplaced, arguments)
    _prepare(arguments, choice)
    sys.argv = [script, *arguments.arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    loaded, status = None, 0
    with ExitStack() as block:
        try:
            try:
                block.enter_context(around())  # it may import torch, and fail as the script's own import would
                if stop is not None:
                    stop.begin()
                loaded = runpy.run_path(script, run_name="__main__")  # what is reported must still be alive at the end
            except SystemExit:
                wait_for_remaining_threads()
                raise
            except Exception as error:  # noqa: BLE001 - whatever the script raises is shown as `python script.py` shows it
                _show_failure(error, emulate=arguments.emulate, hints="--emulate" not in misplaced)
                status = 1
            wait_for_remaining_threads()  # what they do belongs to the report, too
        except KeyboardInterrupt as interrupt:
            stop = stop or Interrupt()
            stop.number = stop.number or signal.SIGINT  # the script may have raised it without a signal
            sys.stderr.write(f"\nnpugraph-ex: {script} was stopped by {stop}{_where(interrupt, script)}\n")
            return stop.status
    del loaded
    return status


def _misplaced(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The command's own options that stand behind the script, which does not name them and so hardly takes them.

    Returns:
        the words of each, with the value that the user gave.
    """
    text = Path(arguments.script).read_text(encoding="utf-8", errors="replace")
    taken = arguments.parser._option_string_actions  # noqa: SLF001 - argparse has no public way
    found: dict[str, list[str]] = {}
    for word, following in pairwise([*arguments.arguments, "-"]):
        option, joined, _ = word.partition("=")
        if option not in taken or option in {"-h", "--help"} or option in text or option in found:
            continue
        if taken[option].nargs == 0:
            found[option] = [option]
        else:
            value = str(taken[option].metavar) if following.startswith("-") else following
            found[option] = [word] if joined else [word, value]
    return found


def _warn_of_misplaced(misplaced: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    options, how_many, script = " ".join(misplaced), len(misplaced), arguments.script
    words = shlex.join(word for given in misplaced.values() for word in given)
    sys.stderr.write(
        f"npugraph-ex: {options} {noun(how_many, 'stands', 'stand')} behind {script} and {noun(how_many, 'belongs', 'belong')} "
        f"to it; for {arguments.command}, write `{ranks.started(arguments)} {arguments.command} {words} {script}`\n"
    )


def _show_failure(error: Exception, *, emulate: bool, hints: bool) -> None:
    """Show a script's error as `python script.py` does, and what may help where no device is emulated."""
    if emulate:
        from npu_emulator.errors import note_what_is_missing

        note_what_is_missing(error)
    _show(error)
    hint = environment.hint(error) if hints and not emulate else ""
    sys.stderr.write(f"\nnpugraph-ex: {hint}\n" if hint else "")


def _syntax_error(script: str) -> SyntaxError | None:
    """What the script's text is no Python for; None where it can begin."""
    source = Path(script).read_bytes()
    if b"\0" in source:
        return None  # compiled already, or an archive: runpy takes these as well
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are given when the script runs
        try:
            compile(source, script, "exec", dont_inherit=True)
        except SyntaxError as error:
            return error.with_traceback(None)
    return None


def _where(interrupt: KeyboardInterrupt, script: str) -> str:
    """The line of the script at which it was interrupted."""
    frames = traceback.extract_tb(interrupt.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == script), None)
    return f" at line {line}" if line is not None else ""


def _show(error: BaseException) -> None:
    """Print what went wrong as `python script.py` would: without the frames that are this command's.

    Not by `sys.excepthook`: torch_npu's would print a line of its own when the process ends, after the JSON of `explain`.
    """
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename in _LAUNCHER:
        inner = inner.tb_next
    traceback.print_exception(error.with_traceback(inner))


def _prepare(arguments: argparse.Namespace, choice: str) -> None:
    """Settle what the names mean and which device there is, before the script imports anything."""
    if choice not in {"", "bundled", "library"}:
        raise UsageError(
            f"{_SWITCH} is {choice!r}; it takes 'bundled' (torch_npu's own backend) or 'library' (this one, the default)"
        )
    if choice:
        os.environ[_SWITCH] = choice
    if choice == "bundled":
        if arguments.as_torchair:
            raise UsageError(f"--as-torchair asks for this library and {_SWITCH}=bundled for torch_npu's; choose one")
        _start_afresh(arguments)
    if arguments.as_torchair:
        from npugraph_ex.compat import use_as_torchair

        use_as_torchair()
    if arguments.emulate:
        import npu_emulator

        try:
            npu_emulator.activate(quiet=arguments.quiet)
        except npu_emulator.EmulatorError as error:
            raise NpuGraphExError(f"{error}\n{error.address}") from error


def _start_afresh(arguments: argparse.Namespace) -> NoReturn:
    """Run the script in a new interpreter, because this one has already loaded the library that is not wanted."""
    launcher = ["-m", "npu_emulator"] if arguments.emulate else []
    command = [sys.executable, *launcher, arguments.script, *arguments.arguments]
    os.execv(sys.executable, command)  # noqa: S606 - the user's own script, as they asked


COMMANDS: dict[str, Callable[[argparse.Namespace, str], int]] = {
    "run": run, "explain": explain, "advise": give_advice, "timeline": draw,
}  # fmt: skip
"""What each command does, by name: it takes the command line and the value of NPUGRAPH_EX."""
