"""What holds of every command: JSON is one value, `--quiet` is silent, no colours in a pipe, long ones say how far they are."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import json_page
import pytest
import torch
from rich.progress import Progress

from npugraph_ex import cli
from npugraph_ex.cache.store import Store
from npugraph_ex.commands import alarms, mutants, script
from npugraph_ex.commands.terminal import parsers_in, parts_of
from npugraph_ex.observe import environment
from npugraph_ex.operators import OPERATORS
from npugraph_ex.report import graphs
from npugraph_ex.saving import text
from npugraph_ex.testing import validation
from npugraph_ex_conformance.campaign import fidelity
from npugraph_ex_conformance.fidelity.rule import DeviceRule
from npugraph_ex_conformance.mutants import search
from npugraph_ex_conformance.upstream import process
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome

SHORT: dict[str, list[str]] = {
    # They answer at once, or take as long as the user's script.
    "advise": ["--html", "page.html", "script.py"],
    "cache clear": ["nothing"],
    "cache ls": [],
    "cache show": ["Model"],
    "explain": ["--html", "page.html", "--sarif", "found.sarif", "script.py"],
    "help": ["CaptureError"],
    "options": [],
    "run": ["script.py"],
    "timeline": ["script.py"],
}
LONG: dict[str, list[str]] = {
    "conformance alarms": ["--examples", "2"],
    "conformance mutants": ["matcher-ignores-constants"],
    "diff": ["one", "other"],
    "env": [],
    "fidelity": ["-k", "capture.", "--output", "answers.json"],
    "operators": ["--check", "records_of_a_test.py"],
    "upstream": ["test"],
    "validate": ["json"],
}
ELSEWHERE = {
    "bench": "test_cli_bench.py, in a process of its own: pytest in pytest",
    "campaign": "testing/test_campaign.py, with a cluster; `--list` in test_cli_wrong_input.py",
    "conformance": "test_cli_interrupts.py, in a process of its own: pytest in pytest",
}
RECORD = """
import torch
from npugraph_ex.operators import Operator, call

if not hasattr(torch.ops.every_command, "twice"):
    torch.library.define("every_command::twice", "(Tensor x) -> Tensor")
Operator(name="every_command::twice", source="by hand", dtypes=(torch.float16,), examples=(lambda: call(torch.ones(4)),))(
    lambda x: x * 2
)
"""


@pytest.fixture
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the commands above look at; what would start other processes answers at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPUGRAPH_EX_CACHE", str(tmp_path / "saved"))
    graph = text.write({"inputs": []}, "def forward(): ...").encode()
    Store(tmp_path / "saved").write(
        "Model.decode-1", {"torch": "2.13", "sources": "{}", "graph_length": str(len(graph))}, graph
    )
    (tmp_path / "script.py").write_text("import torch\ntorch.ones(2, device='npu').add_(1)\n")
    (tmp_path / "records_of_a_test.py").write_text(RECORD)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        torch.save(torch.ones(2), tmp_path / name / "x.pt")
        entry = {"node": "x", "operator": "input", "source": "", "file": "x.pt", "inputs": []}
        (tmp_path / name / "index.json").write_text(json.dumps([entry]))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_a.py").write_text("")
    for name in ("_records", "_listeners"):
        monkeypatch.setattr(OPERATORS, name, type(getattr(OPERATORS, name))(getattr(OPERATORS, name)))
    monkeypatch.setattr(
        graphs, "_records", deque()
    )  # `explain` is about a whole process, here without earlier tests' graphs
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])

    def kill(names: list[str], *, budget: int, on_kill: Callable[[search.Kill], None]) -> None:
        on_kill(search.Kill(names[0], "a promise", "streams", 7, 0.1, "a message"))

    def right(file: Path, *_: object) -> list[UpstreamOutcome]:
        return [UpstreamOutcome(file.name, "test_a", "Ascend910B2", "passed")]

    def answer(rules: dict[int, DeviceRule], _target: str) -> Iterator[tuple[str, object]]:
        yield from ((rule.name, rule.answer) for rule in rules.values())

    monkeypatch.setattr(search, "kill_all", kill)
    monkeypatch.setattr(process, "run_file", right)

    def validate(_module: str, *, on_progress: Callable[[float, int, str], None], **_: object) -> None:
        on_progress(1, 1, "a rule")

    monkeypatch.setattr(validation, "validate_module", validate)
    monkeypatch.setattr(fidelity, "ask", answer)
    home = Path(environment.__file__).parents[1] / "__init__.py"
    good = {
        "error": None,
        "device": "Ascend910B2",
        "import_name": str(home),
        "backend_string": "npugraph_ex_autoload.backend",
    }
    monkeypatch.setattr(environment, "_ask", lambda **_: dict(good))


def test_every_command_is_tried() -> None:
    """A new command gets a line above."""
    parsers = [*parsers_in(cli._parser()), mutants.parser(), alarms.parser()]
    known = [parser.prog.removeprefix("npugraph-ex ") for parser in parsers if not parts_of(parser)]
    assert sorted(known) == sorted([*SHORT, *LONG, *ELSEWHERE])


def test_every_command_is_described_and_has_an_example() -> None:
    """In its help; `cache`, whose actions are commands, as well. What runs a script mentions the status after Ctrl-C."""
    for parser in [*parsers_in(cli._parser()), mutants.parser(), alarms.parser()]:
        said = parser.format_help()
        assert parser.description, parser.prog
        assert re.search(rf"^  {parser.prog} ", f"{said}\n".replace("\n", " \n"), re.MULTILINE), said
    for name, parser in parts_of(cli._parser()).items():
        if name in script.COMMANDS:
            assert "exit status: the script's; 130 after Ctrl-C" in parser.format_help()


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_what_every_command_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain: no colours, and a bar exactly where it is long. `--json --quiet`: one value on stdout, nothing on stderr."""
    bars: list[str] = []
    add = Progress.add_task

    def noted(bar: Progress, description: str, *, total: float | None, completed: int) -> int:
        bars.append(description)
        return add(bar, description, total=total, completed=completed)

    monkeypatch.setattr(Progress, "add_task", noted)
    first, *part = name.split()
    words = [*part, *(SHORT | LONG)[name]]
    status = cli.main([first, *words])
    said = capsys.readouterr()
    assert status == 0, said
    assert "\x1b" not in said.out + said.err
    assert bool(bars) == (name in LONG)
    monkeypatch.delitem(sys.modules, "records_of_a_test", raising=False)
    cli.main([first, *([] if name == "run" else ["--json"]), "--quiet", *words])
    said = capsys.readouterr()
    assert said.err == ""
    if name != "run":
        documented = _documented(name)
        for outer, key, kind in _keys(json.loads(said.out)):
            assert kind in documented.get((outer, key), ()), (outer, key, kind)


@pytest.mark.slow
@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize(
    "name", [*(name for name in SHORT if "script.py" in SHORT[name] and name != "run"), "operators SCRIPT"]
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_of_several_ranks_one_prints_and_each_has_files_of_its_own(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the others would print is in a file, which stderr names: stdout has one value, and no file is written twice."""
    command = name.partition(" ")[0]
    words = [command, *(["--json"] if form == "json" else []), *SHORT.get(name, ["script.py"])]
    written, before = [], set(Path.cwd().iterdir())
    for rank in range(3):
        for variable, value in {"RANK": 2 + rank, "WORLD_SIZE": 5, "LOCAL_RANK": rank}.items():  # of the second machine
            monkeypatch.setenv(variable, str(value))
        assert cli.main(words) == 0
        said = capsys.readouterr()
        found = set(Path.cwd().iterdir()) - before
        before |= found
        written.append({file.name for file in found})
        assert all(f".rank{2 + rank}." in file.name for file in found), found
        own = Path(f"script.rank{2 + rank}.{command}.{'json' if form == 'json' else 'txt'}")
        assert (said.out == "", own.exists(), f"written: {own}\n" in said.err) == (bool(rank),) * 3
        result = own.read_text() if rank else said.out
        assert json.loads(result) is not None if form == "json" else result.strip()
    assert len(written[0]) + 1 == len(written[1]) == len(written[2])
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable)
    cli.main(words)  # a program of one rank has the usual names
    assert not any(".rank" in file.name for file in set(Path.cwd().iterdir()) - before)


def _keys(found: object, outer: str = "") -> set[tuple[str, str, str]]:
    """Of all objects in a JSON value, down to those that are named by what they hold, as versions are by packages.

    Returns:
        The key that holds the object, or a list of such objects; the object's key; and its type.
    """
    if isinstance(found, list):
        return set().union(*(_keys(one, outer) for one in found))
    if not isinstance(found, dict):
        return set()
    own = {(outer, key, json_page.kind_of(value)) for key, value in found.items()}
    return own.union(
        *(_keys(value, "" if key in _NAMES else key) for key, value in found.items() if key not in _BY_NAME)
    )


_BY_NAME = {"packages", "tested", "versions", "answers", "checked", "commands"}


_NAMES = {"every_command::twice", *(word.partition("=")[0] for words in (SHORT | LONG).values() for word in words)}
"""Names that the commands above are asked for, and answer by."""


def _documented(name: str) -> dict[tuple[str, str], str]:
    """The keys in the row of the page of JSON with their types, and names that the commands above are asked for."""
    page = json_page.rows(json_page.PAGE.read_text(encoding="utf-8"))
    rows = [json_page.nested_keys(keys) for of, keys in page if of in (f"`{name}`", f"`{name} --check`")]
    return {("", one): "object string" for one in _NAMES} | {
        (outer, key): kind for row in rows for outer, key, kind in row
    }
