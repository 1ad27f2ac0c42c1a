"""Every command, given wrong input of each kind: status 2, no traceback, and words that say what came and what is allowed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_emulator import __main__ as launcher
from npugraph_ex import cli
from npugraph_ex._plurals import counted, noun
from npugraph_ex.commands import alarms, mutants

WRONG: list[tuple[list[str], tuple[str, ...]]] = [
    # No command, or none of that name.
    ([], ("usage: npugraph-ex", "npugraph-ex explain")),
    (["--"], ("usage: npugraph-ex",)),
    (["rnu"], ("'rnu'", "explain")),
    (["cache"], ("action",)),
    (["cache", "sl"], ("'sl'", "clear")),
    # Words that are missing, or too many.
    (["run"], ("required: script\n",)),
    (["explain"], ("required: script\n",)),
    (["timeline"], ("required: script\n",)),
    (["validate"], ("required: MODULE",)),
    (["upstream"], ("required: PATH",)),
    (["fidelity", "-k", "nonesuch"], ("'nonesuch'", "device.")),
    (["fidelity", "--target", "gpu"], ("--target", "'gpu'")),
    (["fidelity", "--as-measured", "absent"], ("'absent'",)),
    (["campaign"], ("name what to run", "--list")),
    (["campaign", "nonesuch=3"], ("'nonesuch'", "integers")),
    (["campaign", "integers"], ("no end", "integers=10000")),
    (["campaign", "integers=0"], ("'integers=0'", "at least 1")),
    (["diff", "one"], ("required: second",)),
    (["cache", "show"], ("required: name",)),
    (["options", "extra"], ("extra",)),
    (["env", "--nonesuch"], ("--nonesuch",)),
    (["run", "--nonesuch", "x.py"], ("--nonesuch",)),
    # Files and folders that are not there.
    (["run", "absent.py"], ("'absent.py'",)),
    (["explain", "absent.py"], ("'absent.py'",)),
    (["timeline", "absent.py"], ("'absent.py'",)),
    (["diff", "absent", "gone"], ("absent",)),
    (["validate", "absent.py"], ("absent.py",)),
    (["upstream", "absent"], ("absent", "op-plugin")),
    (["validate", "absent_module"], ("absent_module",)),
    (["cache", "--dir", "absent", "ls"], ("'absent'",)),
    (["conformance", "--xfails-file", "absent"], ("'absent'",)),
    (["conformance", "--resume", "--report-dir", "absent"], ("absent", "without --resume")),
    # Numbers.
    (["conformance", "--jobs", "0"], ("--jobs", "at least 1", "'0'")),
    (["conformance", "--jobs", "two"], ("--jobs", "whole number", "'two'")),
    (["campaign", "events=1", "--workers", "0"], ("--workers", "at least 1", "'0'")),
    (["campaign", "events=1", "--seed", "x"], ("--seed", "whole number", "'x'")),
    (["campaign", "events=1", "--memory", "0"], ("--memory", "at least 1", "'0'")),
    (["campaign", "events=1", "--limit", "0"], ("--limit", "at least 1", "'0'")),
    (["campaign", "events=1", "--nice", "-1"], ("--nice", "at least 0", "'-1'")),
    (["upstream", ".", "--jobs", "0"], ("--jobs", "at least 1", "'0'")),
    (["upstream", ".", "--memory", "0"], ("--memory", "at least 1", "'0'")),
    (["upstream", ".", "--devices", "two"], ("--devices", "whole number", "'two'")),
    (["upstream", ".", "--limit", "soon"], ("--limit", "whole number", "'soon'")),
    (["conformance", "--seed", "1.5"], ("--seed", "whole number", "'1.5'")),
    (["conformance", "alarms", "--examples", "none"], ("--examples", "at least 1", "'none'")),
    (["conformance", "alarms", "--first", "-1"], ("--first", "at least 0", "'-1'")),
    (["conformance", "mutants", "--budget", "0"], ("--budget", "at least 1", "'0'")),
    (["validate", "json", "--max-examples", "0"], ("--max-examples", "at least 1", "'0'")),
    (["validate", "json", "--expect-matches", "x"], ("--expect-matches", "at least 0", "'x'")),
    (["validate", "json", "--seed", "x"], ("--seed", "whole number", "'x'")),
    (["diff", "a", "b", "--ulps", "x"], ("--ulps", "at least 0", "'x'")),
    (["explain", "--after", "soon", "x.py"], ("--after", "seconds above 0", "'soon'")),
    (["explain", "--after", "-1", "x.py"], ("--after", "seconds above 0", "'-1'")),
    # Values out of a list.
    (["conformance", "--profile", "big"], ("'big'", "nightly")),
    (["conformance", "--target", "gpu"], ("'gpu'", "emulated")),
    (["conformance", "mutants", "nonesuch"], ("nonesuch",)),
    (["validate", "json", "--target", "gpu"], ("'gpu'", "emulated")),
    (["validate", "json", "--dtype", "int8"], ("'int8'", "bfloat16")),
    (["bench", "nonsense"], ("'nonsense'", "compile")),
    # Options of the pytest that two commands start.
    (["conformance", "--nonesuch"], ("--nonesuch",)),
    (["bench", "streams", "--nonesuch"], ("--nonesuch",)),
    (["bench", "streams", "--compare", "absent.json"], ("npugraph-ex: --compare", "'absent.json'")),
]
_INTERNALS = re.compile(r"Traceback|INTERNALERROR|<function|<class|invalid _|invalid \w+ value|NoneType|, arguments\n")


@pytest.mark.parametrize(
    ("arguments", "words"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_input(
    arguments: list[str],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Status 2; what came and what is allowed are named; nothing of the program's inside is shown."""
    monkeypatch.chdir(tmp_path)
    try:
        status: object = cli.main(arguments)
    except SystemExit as ended:
        status = ended.code
    said = "".join(capfd.readouterr())
    assert status == 2, said
    assert all(word in said for word in words), said
    assert not _INTERNALS.search(said), said


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                yield from _parsers(own)


def test_every_option_with_a_type_is_tried_above() -> None:
    """A new number or choice gets a row: argparse's own words would show the name of a function."""
    tried = " ".join(word for arguments, _ in WRONG for word in arguments)
    for parser in (*_parsers(cli._parser()), mutants.parser(), alarms.parser()):
        for action in parser._actions:
            if action.option_strings and (action.choices or action.type not in {None, Path}):
                assert any(option in tried for option in action.option_strings), (parser.prog, action.option_strings)


def test_every_positional_and_value_has_a_name() -> None:
    """The help says FILE or N where argparse would repeat the option in capitals."""
    for parser in (*_parsers(cli._parser()), mutants.parser(), alarms.parser()):
        for action in parser._actions:
            if action.option_strings and action.nargs is None and not action.choices:
                assert action.metavar, (parser.prog, action.option_strings)


@pytest.mark.parametrize(("count", "said"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (1234, "1,234 nodes")])
def test_numbers_have_the_right_noun(count: int, said: str) -> None:
    """One is singular; nought is not."""
    assert counted(count, "node") == said


def test_nouns_may_have_a_plural_of_their_own() -> None:
    """Where an s is not enough."""
    assert [noun(count, "replay", "replays of it") for count in (1, 2)] == ["replay", "replays of it"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ("required: program\n",)),
        (["absent.py"], ("'absent.py'",)),
        (["--devices", "two", "x.py"], ("--devices", "whole number", "'two'")),
        (["--memory-gb", "1.5", "x.py"], ("--memory-gb", "whole number", "'1.5'")),
        (["-m", "absent_module"], ("'absent_module'",)),
    ],
)
def test_wrong_input_of_the_emulators_launcher(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """As above, for `python -m npu_emulator`."""
    with pytest.raises(SystemExit) as ended:
        launcher.main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(word in said for word in words), said
    assert not _INTERNALS.search(said), said
