"""What all commands share on a terminal: examples in the help, `--json` and `--quiet`."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, NoReturn

_JSON = "one JSON value instead of text"
DEVICES = {"--emulate": "--target", "--target": "--emulate"}
"""How commands that run a script are asked for the emulated device, with what those that run their own programs take; and back."""
_QUIET = "print the result alone: no progress and no remarks"


class Parser(argparse.ArgumentParser):
    """A parser whose errors end with the nearest right name; `parser` of what it parses is the innermost command's."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """As argparse's own."""
        super().__init__(*args, **settings)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and end with status 2."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:  # Python 3.12 left out the quotes around the names that may be chosen
            word, names = wrong[1], re.findall(r"[^\s,']+", wrong[2])
        else:
            option = re.search(r"unrecognized arguments:.*? (--[^\s=]+)", message)
            word, names = option[1] if option else "", list(options_of(self))
        near = [] if word in names else difflib.get_close_matches(word, names, n=1)
        hint = self._device_hint(message) or (near and f"did you mean {near[0]!r}?")
        super().error(f"{message}; {hint}" if hint else message)

    def _device_hint(self, message: str) -> str:
        """What to write for an option of other commands that asks for the device; empty for any other message."""
        typed = re.search(r"unrecognized arguments:.*? (--emulate|--target)\b", message)
        if typed is None:
            return ""
        own = DEVICES[typed[1]]
        if own in options_of(self):
            return f"write {'--target emulated' if own == '--target' else own} for the emulated device"
        return f"leave {typed[1]} out: `{self.prog}` needs no device, or starts the emulated one by itself"


def refuse_before_the_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """End with the command line that works, where options of a command stand before its name."""
    commands = parts_of(parser)
    place = next((place for place, word in enumerate(argv) if word in commands), len(argv))
    before, command, behind = argv[:place], argv[place : place + 1] or ["COMMAND"], argv[place + 1 :]
    taken = {
        option for name in commands if name in command or place == len(argv) for option in options_of(commands[name])
    }
    wrong = next((option for word in before if (option := word.partition("=")[0]) in taken), None)
    if wrong is not None and wrong not in options_of(parser):
        parser.error(f"{wrong} goes behind the command: {parser.prog} {shlex.join([*command, *before, *behind])}")


def options_of(parser: argparse.ArgumentParser) -> Iterable[str]:
    """The names of a parser's options; argparse has no public way to ask for them."""
    return parser._option_string_actions  # noqa: SLF001


def parts_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by name; argparse has no public way to ask for them."""
    return {
        name: part
        for action in parser._actions  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
        for name, part in action.choices.items()
    }


def parsers_in(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser itself, those of its commands, and those of their parts."""
    yield parser
    for part in parts_of(parser).values():
        yield from parsers_in(part)


def completes(action: argparse.Action, names: Callable[[], Iterable[str]]) -> None:
    """Let a shell complete an argument with these names, which are looked up when it asks."""
    action.completer = lambda **_: names()  # type: ignore[attr-defined] # argcomplete looks there


def listed(examples: str) -> str:
    """Command lines, one a line, as the end of a help has them."""
    return "examples:\n" + "\n".join(f"  npugraph-ex {line}" for line in examples.splitlines())


def furnish(
    parser: argparse.ArgumentParser, *, examples: str = "", result: bool = True, default: object = False
) -> argparse.ArgumentParser:
    """Give a command what all have.

    Args:
        parser: the command's, or that of a part of it.
        examples: command lines and what they do, one a line; for a command whose description has none.
        result: whether it prints a result of its own, so that `--json` makes sense.
        default: what the options are where the command line does not say.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    if examples:
        parser.epilog = listed(examples)
    # A part of a command leaves what was said before its name; so both places are good.
    for part in parts_of(parser).values():
        furnish(part, result=result, default=argparse.SUPPRESS)
    taken = options_of(parser)
    if result and "--json" not in taken:
        parser.add_argument("--json", action="store_true", default=default, help=_JSON)
    if "--quiet" not in taken:
        parser.add_argument("--quiet", action="store_true", default=default, help=_QUIET)
    return parser


def show(arguments: argparse.Namespace, found: Any, text: str) -> None:
    """Print a result: the data as JSON, dataclasses by their fields, or the text, as the command line asks."""
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=1, default=_plain) + "\n")
    elif text:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def remark(arguments: argparse.Namespace, text: str) -> None:
    """Say what is no part of the result: on stdout before it, on stderr beside JSON, nowhere with `--quiet`."""
    if not arguments.quiet:
        (sys.stderr if arguments.json else sys.stdout).write(f"{text}\n")


def say_written(arguments: argparse.Namespace, file: object, more: str = "") -> None:
    """Say on stderr which file was written, as an option asked; nothing with `--quiet`."""
    if not arguments.quiet:
        sys.stderr.write(f"written: {file}{more}\n")
