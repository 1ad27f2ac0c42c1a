"""Every command, given wrong input of each kind: status 2, no traceback, and words that say what came and what is allowed."""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import sys
from pathlib import Path

import json_page
import pytest
from rich.console import Console

from npu_emulator import __main__ as launcher
from npu_emulator.clock.summary import Lane, Share, Summary
from npugraph_ex import cli
from npugraph_ex._plurals import counted, noun
from npugraph_ex.commands import alarms, campaign, mutants, script
from npugraph_ex.commands.output_files import output_file
from npugraph_ex.commands.remedies import sections
from npugraph_ex.commands.terminal import Parser, options_of, parsers_in
from npugraph_ex.console.progress import progress
from npugraph_ex.errors import UsageError
from npugraph_ex.frontend.entry.advice import Advice
from npugraph_ex.graph.launches import Launched
from npugraph_ex.observe.compare import Comparison, Difference
from npugraph_ex.observe.environment import Environment
from npugraph_ex.observe.explain import Explanation, GraphExplanation
from npugraph_ex.report.captures import CaptureRecord
from npugraph_ex.report.findings import Finding, Location
from npugraph_ex.report.graphs import CallRecord, GraphRecord, InputRecord
from npugraph_ex.report.passes import Branch, Fusion, NearMiss, PassRecord, PassReport, RuleRecord
from npugraph_ex.testing.validation.findings import Validation, ValidationFinding
from npugraph_ex_conformance.mutants.search import Kill
from npugraph_ex_conformance.results import Entry, Failure, Finished
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome

WRONG: list[tuple[list[str], tuple[str, ...]]] = [
    # No command, or none of that name.
    ([], ("usage: npugraph-ex", "npugraph-ex explain")),
    (["--"], ("usage: npugraph-ex",)),
    (["rnu"], ("'rnu'", "explain", "did you mean 'run'?")),
    (["cache"], ("action",)),
    (["cache", "sl"], ("'sl'", "clear")),
    (["cache", "claer"], ("usage: npugraph-ex cache ", "did you mean 'clear'?")),
    (["cache", "clear", "--qiet"], ("usage: npugraph-ex cache clear ", "did you mean '--quiet'?")),
    (["--verison"], ("usage: npugraph-ex ", "did you mean '--version'?")),
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
    (["env", "--nonesuch"], ("usage: npugraph-ex env ", "--nonesuch\n")),
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
    # Files that cannot be written are told before the run.
    (["fidelity", "--output", "."], ("--output: . cannot be written",)),
    (["advise", "--html", "/proc/x.html", "x.py"], ("--html: /proc/x.html cannot be written",)),
    (["timeline", "--output", "/proc/x", "x.py"], ("--output: /proc/x cannot be written",)),
    (["validate", "--report-dir", "/proc/x", "os"], ("--report-dir", "'/proc/x'")),
    # Files of the user's stay as they are: the script, and rules that were found and perhaps edited.
    (["explain", "--html", "mine.py", "mine.py"], ("--html: 'mine.py' is the script itself",)),
    (["explain", "--sarif", "./mine.py", "mine.py"], ("--sarif: 'mine.py' is the script itself",)),
    (["advise", "--discover", "mine.py", "mine.py"], ("--discover: 'mine.py' is the script itself",)),
    (["advise", "--discover", "rules/found.py", "mine.py"], ("--discover: 'rules/found.py' is there already",)),
    (["validate", "rules/"], ("'rules/' is a folder",)),
    # Numbers.
    (["conformance", "--jobs", "0"], ("--jobs", "at least 1", "'0'")),
    (["conformance", "--jobs", "two"], ("--jobs", "whole number", "'two'")),
    (["campaign", "events=1", "--workers", "0"], ("--workers", "at least 1", "'0'")),
    (["campaign", "events=1", "--seed", "x"], ("--seed", "whole number", "'x'")),
    (["campaign", "events=1", "--memory", "0"], ("--memory", "at least 1", "'0'")),
    (["campaign", "events=1", "--limit", "0"], ("--limit", "at least 1", "'0'")),
    (["campaign", "events=1", "--nice", "-1"], ("--nice", "at least 0", "'-1'")),
    (["bench", "--worse", "two"], ("--worse", "at least 0", "'two'")),
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
    (["conformance", "--emulate"], ("write --target emulated",)),
    (["bench", "--emulate"], ("leave --emulate out",)),
    (["operators", "--emulate", "x.py"], ("leave --emulate out",)),
    (["bench", "streams", "--compare", "absent.json"], ("npugraph-ex: --compare", "'absent.json'")),
]
_NEEDS_TORCH = {"--nonesuch", "absent.json", "mutants", "-k"}
"""Words that pytest or a table of the suite judges, after torch is imported."""
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
    """Status 2; what came and what is allowed are named; nothing of the program's inside is shown.

    Torch, whose import takes seconds, is not imported before.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules").mkdir()
    mine = [tmp_path / "mine.py", tmp_path / "rules" / "found.py"]
    for file in mine:
        file.write_text("mine = 1", encoding="utf-8")
    with monkeypatch.context() as without_torch:
        if not _NEEDS_TORCH & {*arguments}:
            without_torch.setitem(sys.modules, "torch", None)
        try:
            status: object = cli.main(arguments)
        except SystemExit as ended:
            status = ended.code
    said = "".join(capfd.readouterr())
    assert status == 2, said
    assert all(word in said for word in words), said
    assert not _INTERNALS.search(said), said
    assert [file.read_text(encoding="utf-8") for file in mine] == ["mine = 1"] * 2


@pytest.mark.parametrize("names", ["'run', 'env'", "run, env"], ids=["Python 3.10", "Python 3.13"])
def test_the_nearest_name_in_either_wording_of_argparse(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Newer releases of Python quote no choice."""
    with pytest.raises(SystemExit):
        Parser().error(f"argument command: invalid choice: 'rnu' (choose from {names})")
    assert capsys.readouterr().err.endswith("; did you mean 'run'?\n")


_READ = {"--compare", "--as-measured", "--known", "--xfails-file"}
"""The options that name a file which is there already. Any other FILE is one to write."""


@pytest.mark.parametrize(
    ("parser", "option"),
    [
        pytest.param(parser, option, id=f"{parser.prog} {option}")
        for parser in (*parsers_in(cli._parser()), mutants.parser())
        for action in parser._actions
        for option in action.option_strings
        if action.metavar == "FILE" and option not in _READ
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_the_work(
    parser: Parser, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser itself refuses a folder, and a file in a folder that is not there, which it does not make."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("as it was", encoding="utf-8")
    for file, words in ((".", ". cannot be written: Is a directory"), ("none/x", "no folder 'none'")):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([option, file])
        assert ended.value.code == 2
        assert f"{option}: " in (said := capsys.readouterr().err)
        assert words in said
    for file in ("new", "there"):
        assert output_file(file) == Path(file)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text(encoding="utf-8") == "as it was"


def test_every_option_with_a_type_is_tried_above() -> None:
    """A new number or choice gets a row: argparse's own words would show the name of a function."""
    tried = " ".join(word for arguments, _ in WRONG for word in arguments)
    for parser in (*parsers_in(cli._parser()), mutants.parser(), alarms.parser()):
        for action in parser._actions:
            if action.option_strings and (action.choices or action.type not in {None, Path, output_file}):
                assert any(option in tried for option in action.option_strings), (parser.prog, action.option_strings)


def test_every_command_has_json_quiet_and_an_example() -> None:
    """What all commands share; `run` prints no result of its own. A part of a command takes both after its name too."""
    commands = list(parsers_in(cli._parser()))
    assert len(commands) > 17
    for parser in (*commands[1:], mutants.parser(), alarms.parser()):
        assert "--quiet" in parser._option_string_actions, parser.prog
        assert ("--json" in parser._option_string_actions) == (parser.prog != "npugraph-ex run"), parser.prog
        texts = f"{parser.description}\n{parser.epilog}"
        assert f"  {parser.prog}" in texts or parser.prog.startswith("npugraph-ex cache "), parser.prog
    for words in (["cache", "--json", "ls"], ["cache", "ls", "--json"]):
        assert cli._parser().parse_args(words).json
    assert not cli._parser().parse_args(["cache", "ls"]).json


def test_the_help_of_an_option_has_its_default() -> None:
    """Wherever an option that takes a value has one."""
    for parser in (*parsers_in(cli._parser()), mutants.parser(), alarms.parser()):
        for action in parser._actions:
            if action.option_strings and action.nargs != 0 and action.default not in {None, "", argparse.SUPPRESS}:
                assert "default" in (action.help or ""), (parser.prog, action.option_strings)


def test_a_shell_completes_words_of_a_list() -> None:
    """Names that no `choices` has: the shell asks their completers."""
    expected = {
        "help": {"CaptureError", "107030", "lift", "explain"}, "options": {"lift"}, "bench": {"call"},
        "campaign": {"integers"}, "validate": {"bfloat16"},
    }  # fmt: skip
    for parser in parsers_in(cli._parser()):
        for action in (action for action in parser._actions if hasattr(action, "completer")):
            assert expected.pop(parser.prog.removeprefix("npugraph-ex ")) <= {*action.completer(prefix="")}
    assert not expected


@pytest.mark.parametrize(
    ("typed", "works"),
    [
        ("--json env", "env --json"),
        ("--quiet env", "env --quiet"),
        ("--quiet --json options lift", "options --quiet --json lift"),
        ("--dir=saved cache ls", "cache --dir=saved ls"),
        ("--emulate run 'my script.py' --json", "run --emulate 'my script.py' --json"),
        ("--json", "COMMAND --json"),
    ],
)
def test_an_option_before_the_command_is_shown_behind_it(
    typed: str, works: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the command line that works, and suggests nothing that was typed."""
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(typed))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith(
        f"error: {typed.partition(' ')[0].partition('=')[0]} goes behind the command: npugraph-ex {works}\n"
    )
    assert "did you mean" not in said
    if "COMMAND" not in works:
        assert cli._parser().parse_args(shlex.split(works)).command == works.partition(" ")[0]


def test_nothing_is_suggested_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that the command has, where it cannot stand."""
    parser = Parser(prog="example")
    parser.add_argument("--json", action="store_true")
    with pytest.raises(SystemExit):
        parser.error("unrecognized arguments: --json")
    assert capsys.readouterr().err.endswith("unrecognized arguments: --json\n")
    with pytest.raises(SystemExit):
        parser.error("unrecognized arguments: --jsno")
    assert "did you mean '--json'?" in capsys.readouterr().err


@pytest.mark.parametrize("parser", [*parsers_in(cli._parser())][1:], ids=lambda parser: parser.prog)
def test_an_option_for_the_device_leads_to_the_commands_own(parser: Parser, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that run a script take --emulate, those that run programs of their own --target, and others choose by themselves."""
    for typed, own in (("--emulate", "--target emulated"), ("--target=emulated", "--emulate")):
        if typed.partition("=")[0] in options_of(parser):
            continue
        with pytest.raises(SystemExit):
            parser.error(f"unrecognized arguments: {typed}")
        said = capsys.readouterr().err
        taken = own.partition(" ")[0] in options_of(parser)
        assert said.endswith("starts the emulated one by itself\n") != taken
        assert (f"; write {own} for the emulated device" in said) == taken


def test_help_knows_options_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """What `options` and `--help` say; a mistyped one is suggested."""
    for name, words in (
        ("capture_limit", "takes an int"),
        ("lift", "default: 'off'"),
        ("explain", "usage: npugraph-ex explain"),
    ):
        assert cli.main(["help", name]) == 0
        assert words in capsys.readouterr().out
    assert cli.main(["help", "capture_limi"]) == 2
    assert "perhaps capture_limit" in capsys.readouterr().err
    assert cli.main(["help", "StreamOrder"]) == 2
    assert "perhaps StreamOrderError" in capsys.readouterr().err
    assert cli.main(["help", "107003"]) == 2
    assert "the emulated device never gives the code 107003" in capsys.readouterr().err


def test_the_page_of_json_has_every_command_and_its_keys() -> None:
    """A row for each command; keys and types are the fields of what is printed, where that is a dataclass."""
    page = json_page.PAGE.read_text(encoding="utf-8")
    rows = {of.strip("`"): json_page.keys(row) for of, row in json_page.rows(page)}
    parsers = (*list(parsers_in(cli._parser()))[1:], mutants.parser(), alarms.parser())
    names = {parser.prog.removeprefix("npugraph-ex ") for parser in parsers} - {"run", "cache"}
    assert names <= set(rows)
    beside = {
        "env": {"works"}, "timeline": {"picture", "trace", "figures"}, "validate": {"ok", "complete", "replacements", "verdict"},
        "conformance mutants": {"kills", "wrong_without_a_mutant"}, "upstream": {"complete", "stale", "outcomes"},
        "advise": {"graphs", "trained", "advice", "modelled_us", "rolled_back", "pass"},
    }  # fmt: skip
    for command, kinds in {
        "diff": (Comparison, Difference), "env": (Environment,), "explain": (Explanation,), "timeline": (Summary, Share, Lane),
        "validate": (Validation, ValidationFinding), "conformance mutants": (Kill,),
        "advise": (Advice, Launched), "upstream": (UpstreamOutcome,),
    }.items():  # fmt: skip
        fields = {field for kind in kinds for field in json_page.fields(kind)}
        assert {key for key in rows[command] if key[0] not in beside.get(command, ())} == fields, command
    kinds = (
        Explanation, GraphExplanation, CaptureRecord, GraphRecord, InputRecord, CallRecord, PassReport, PassRecord, RuleRecord,
        Fusion, NearMiss, Branch, Finding, Location, Entry, Finished, Failure,
    )  # fmt: skip
    told = json_page.rows(page.partition("## The JSON of")[2].partition("| key | meaning |")[0])
    for kind, (_, row) in zip(kinds, told, strict=True):
        assert json_page.keys(row) == json_page.fields(kind), kind


def test_progress_draws_a_bar_on_a_terminal_and_lines_in_a_file() -> None:
    """The share, the words and the time left; in a file a line for each hundredth; nothing with `--quiet`."""

    def told(*, quiet: bool = False, total: int | None = 200, of: int | None = None, **settings: bool) -> str:
        console = Console(file=io.StringIO(), width=100, _environ={}, **settings)  # type: ignore[arg-type]
        with progress(total, quiet=quiet, done=2, console=console) as reached:
            for count in range(3, 9):
                reached(count - 0.5, "a part of it", of)
                reached(count, f"item {count}", of)
        return console.file.getvalue()  # type: ignore[attr-defined]

    assert told() == "[4/200] item 4\n[6/200] item 6\n[8/200] item 8\n"
    assert told(total=None).splitlines()[0] == "[3] item 3"
    assert told(total=None, of=9).splitlines()[:2] == ["[3/9] item 3", "[4/9] item 4"]
    drawn = told(force_terminal=True)
    assert "8/200" in drawn
    assert re.search(r"item 8 .*left \S*\d?:\d\d", drawn)
    assert told(quiet=True) == told(quiet=True, force_terminal=True).replace("\x1b[?25l", "") == ""


def test_progress_in_a_cell_of_a_notebook_is_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jupyter runs `!command` on a terminal and asks for colours; a cell would keep each redrawing of a bar."""
    told = {}
    for place in ("cell", "terminal"):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("JPY_PARENT_PID", "1")
        if place == "terminal":
            monkeypatch.delenv("JPY_PARENT_PID")
        with progress(200, quiet=False) as reached:
            reached(2, "two items")
        told[place] = capsys.readouterr().err
    assert told["cell"] == "[2/200] two items\n"
    assert "\x1b[" in told["terminal"]


def test_results_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One object on stdout and nothing else there: of saved compilations, of a help section, of the kinds of a campaign."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    for words, expected in (
        (["cache", "--dir", "saved", "ls"], {"folder": "saved", "saved": []}),
        (["cache", "--dir", "saved", "clear"], {"folder": "saved", "deleted": 0}),
        (["help", "107025"], {"107025": sections()["107025"]}),
    ):
        assert cli.main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == expected
    assert cli.main(["campaign", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fidelity"] == "the rules of the emulated device"


def test_a_campaign_looks_before_it_starts_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger that is there, none to resume, and a Ray that lacks something: one sentence each, and no cluster."""
    monkeypatch.setattr(campaign, "require", lambda *_: None)
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it raises ImportError
    assert cli.main(["campaign", "events=1", "--resume", "--report-dir", str(tmp_path / "new")]) == 2
    assert "there is no campaign in" in capsys.readouterr().err
    for words, said in (
        (["--checkout", str(tmp_path / "gone")], f"there is no '{tmp_path}/gone'"),
        ([], "needs --checkout"),
    ):
        assert cli.main(["campaign", "upstream", *words, "--report-dir", str(tmp_path / "new")]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "results.jsonl").write_text("{}\n", encoding="utf-8")
    assert cli.main(["campaign", "events=1", "--report-dir", str(tmp_path)]) == 2
    assert "holds a campaign" in capsys.readouterr().err
    assert cli.main(["campaign", "events=1", "--report-dir", str(tmp_path / "new")]) == 2
    assert "Ray is installed and cannot be imported" in capsys.readouterr().err


def test_every_positional_and_value_has_a_name() -> None:
    """The help says FILE or N where argparse would repeat the option in capitals."""
    for parser in (*parsers_in(cli._parser()), mutants.parser(), alarms.parser()):
        for action in parser._actions:
            if action.option_strings and action.nargs is None and not action.choices:
                assert action.metavar, (parser.prog, action.option_strings)


@pytest.mark.parametrize(("count", "said"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (1234, "1,234 nodes")])
def test_numbers_have_the_right_noun(count: int, said: str) -> None:
    """One is singular; nought is not."""
    assert counted(count, "node") == said


def test_a_full_disk_names_the_file() -> None:
    """An error of a write, unlike one of opening, has no file name of its own."""
    with pytest.raises(UsageError, match=r"--html: /dev/full cannot be written: No space left on device"):
        script._write("--html", Path("/dev/full"), "page")


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
