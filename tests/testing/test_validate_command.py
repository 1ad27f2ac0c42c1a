"""The command `npugraph-ex validate`: what it takes, refuses and prints."""

from __future__ import annotations

import json
import logging
import re
import runpy
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from printed import blocks as printed_blocks
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import cli
from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.graph.metadata import quiet_refusals
from npugraph_ex.testing import RulesNotFoundError, Validation, ValidationFinding, load_rules

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "validate.md"


BAD = {
    "import nothing_there\n": "importing {0} failed at line 1: ModuleNotFoundError: No module named 'nothing_there'",
    "def f(:\n": "importing {0} failed at line 1: SyntaxError",
    "import sys\nsys.exit(3)\n": "importing {0} failed at line 2: SystemExit: 3",
    "import sys\nsys.exit()\n": "importing {0} failed at line 2: SystemExit",
    "x = 1\0": "importing {0} failed: SyntaxError: source code string cannot contain null bytes",
    "x = 1\n": "{0} registers no replacement when it is imported",
    "import torch, npugraph_ex\ndef s(x):\n    return x + 1 if x.sum() > 0 else x\n"
    "npugraph_ex.register_replacement(s, s, [torch.empty(2)])\n": "the search function cannot be traced",
}
REPLACEMENT = "register_replacement"
"""What raises an error of its own, whose address is of more help."""


ADDRESS = "help: npugraph-ex help RulesNotFoundError"


@pytest.mark.parametrize("text", BAD, ids=["import", "syntax", "exit", "quit", "null", "nothing", "untraceable"])
def test_a_bad_module_is_one_clear_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and one line that names the module, the line in it, and what happened; behind it the address."""
    path = tmp_path / f"bad_{abs(hash(text))}.py"
    path.write_text(text, encoding="utf-8")
    assert cli.main(["validate", str(path)]) == 2
    said = capsys.readouterr().err
    assert BAD[text].format(path) in said, said
    address = ADDRESS.replace("RulesNotFoundError", "ReplacementError") if REPLACEMENT in text else ADDRESS
    assert said.splitlines()[1:] == [address]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_such_module", "there is no module 'no_such_module'"),
        ("no/such.py", "there is no file 'no/such.py'"),
        ("json:loads", "json:loads is no search function of a registered replacement"),
        ("json:JSONDecoder.x", "must be MODULE or MODULE:NAME"),
        ("json:nothing", "json has no 'nothing'"),
        ("json:codecs", "json:codecs is of type module, no search function"),
        ("tests/testing", "'tests/testing' is a folder"),
        (".", "'.' must be MODULE or MODULE:NAME"),
        ("", "'' must be MODULE or MODULE:NAME"),
    ],
)
def test_a_wrong_name_is_one_clear_line(spec: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not there is named."""
    assert cli.main(["validate", spec]) == 2
    said_then = capsys.readouterr().err
    assert said in said_then
    assert said_then.splitlines()[1:] == [ADDRESS]


def test_a_folder_is_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python would import it, as a package without anything in it."""
    (tmp_path / "folder_of_fusions").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["validate", "folder_of_fusions"]) == 2
    assert "'folder_of_fusions' is a folder" in capsys.readouterr().err


def test_a_function_that_exits_or_fails_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a function that should register does instead is one line; the process goes on."""
    path = tmp_path / "failing_registration.py"
    path.write_text("import sys\ndef leave():\n    sys.exit(4)\ndef fail():\n    1 / 0\n", encoding="utf-8")
    for name, said in (("leave", "line 3: SystemExit: 4"), ("fail", "line 5: ZeroDivisionError: division by zero")):
        assert cli.main(["validate", f"{path}:{name}"]) == 2
        assert capsys.readouterr().err == f"npugraph-ex: calling {path}:{name}() failed at {said}\n{ADDRESS}\n"


def test_an_import_that_fails_further_down_has_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module is right; what it imports has a wrong line, or imports what is not installed, or a name that is gone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for number, (text, said) in enumerate(
        {
            "import os\nimport no_such_library\n": "line 2 of {0}: ModuleNotFoundError: No module named 'no_such_library'. "
            f"Install it for {sys.executable}, or name the folder that holds it in PYTHONPATH",
            "from json import no_such_name\n": "line 1 of {0}: ImportError: cannot import name 'no_such_name' from 'json'",
            "import json\n\njson.loads('[')\n": "line 3 of {0}: JSONDecodeError: ",
            "x = 1\ndef f(:\n": "line 2 of {0}: SyntaxError: invalid syntax",
        }.items()
    ):
        helper = tmp_path / f"wrong_helper_{number}.py"
        helper.write_text(text, encoding="utf-8")
        path = (
            tmp_path / f"right_by_itself_{number}.py"
        )  # of a name of its own: in one second bytecode of the last would do
        path.write_text(f"import {helper.stem}\n", encoding="utf-8")
        assert cli.main(["validate", str(path)]) == 2
        message = capsys.readouterr().err
        assert f"importing {path} failed at {said.format(helper)}" in message
        assert message.splitlines()[1:] == [ADDRESS]


def test_a_file_that_was_mended_is_imported_anew(tmp_path: Path) -> None:
    """Half a module does not stay behind where the first import failed."""
    path = tmp_path / "mended_later.py"
    for text, said in (("1 / 0\n", "ZeroDivisionError"), ("1 + None\n", "TypeError")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RulesNotFoundError, match=said):
            load_rules(str(path))


def test_a_file_of_a_package_is_imported_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its relative imports work. A package of the same name elsewhere, which Python would import instead, is named."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "src" / "package_of_a_test" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package.parent / "widths.py").write_text("WIDTH = 4\n", encoding="utf-8")
    path = package / "fusions.py"
    path.write_text(
        "import torch, npugraph_ex\nfrom ..widths import WIDTH\ndef search(x):\n    return torch.sigmoid(x) * x\n"
        "npugraph_ex.register_replacement(search, lambda x: torch.nn.functional.silu(x), [torch.empty(WIDTH)])\n",
        encoding="utf-8",
    )
    for _ in range(2):
        (rule,) = load_rules(str(path))
        assert rule.rule.search.__module__ == "package_of_a_test.inner.fusions"
    USER_RULES.release(rule.key)
    other = tmp_path / "copy" / "package_of_a_test"
    shutil.copytree(package.parent, other)
    with pytest.raises(
        RulesNotFoundError, match=r"is the module package_of_a_test.widths, and Python imports that from"
    ):
        load_rules(str(other / "widths.py"))


def _blocks() -> list[str]:
    return [block.code for block in printed_blocks(PAGE) if block.language == "python"]


@pytest.mark.slow
def test_the_documented_mistake_passes_fixed_tolerances_and_is_refuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's module passes the page's test; the page's command prints what the page does, numbers aside."""
    module, usual_test, _ = _blocks()
    (tmp_path / "my_fusions.py").write_text(module, encoding="utf-8")
    (tmp_path / "usual_test.py").write_text(usual_test, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = set(USER_RULES.snapshot())
    try:
        runpy.run_path("usual_test.py")
        assert cli.main(["validate", "my_fusions.py"]) == 1
    finally:
        for rule in set(USER_RULES.snapshot()) - before:
            USER_RULES.release(rule.key)
    printed = capsys.readouterr().out
    (shown,) = (text for block in printed_blocks(PAGE) for _, text in block.commands if text)
    assert _words(printed) == _words(shown)
    (script,) = re.findall("counterexample: python (.*)", printed)
    assert f"load_rules({str(tmp_path / 'my_fusions.py')!r})" in (tmp_path / script).read_text(encoding="utf-8")


def _words(text: str) -> list[str]:
    """Without numbers, which differ between processors, and lines of dashes."""
    return re.sub(r"-?\d[\d.e+-]*", "#", re.sub("--+", "", text)).split()


def test_several_modules_are_refused_with_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    """One error, not argparse's; the words are those of the command."""
    assert cli.main(["validate", "one.py", "two.py", "three.py", "--quiet"]) == 2
    assert re.search(r"takes one module, .* 3 are named.*`npugraph-ex validate one\.py`", capsys.readouterr().err)


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_keeps_warnings_back(
    quiet: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """Those of the module and of the device, and the library's log."""
    path = tmp_path / f"noisy_{quiet}.py"
    path.write_text(
        "import logging, warnings\nwarnings.warn('of the device')\nlogging.getLogger('npugraph_ex').warning('of the log')\n"
    )
    assert cli.main(["validate", str(path), *["--quiet"] * quiet]) == 2  # it registers nothing
    said = [*(str(one.message) for one in recwarn), *(one.message for one in caplog.records)]
    assert said == ([] if quiet else ["of the device", "of the log"])


def test_a_rule_has_one_verdict() -> None:
    """The worst of its failures; the others stand below it. What is right elsewhere, and remarks, stay beside it."""
    found = [
        ValidationFinding("refuted", "a", fails=True),
        ValidationFinding("never-for-its-example", "b", fails=True, where="float16"),
        ValidationFinding("guard-too-weak", "c"),
    ]
    assert Validation("a rule", tuple(found)).verdict == "refuted"
    assert Validation("a rule", tuple(found[1:])).verdict == "never-for-its-example (float16)"
    right = [ValidationFinding("proven", "d"), found[2], ValidationFinding("overlaps-with", "e")]
    assert (
        Validation("a rule", (found[1], *right), fused=3).verdict
        == "never-for-its-example (float16), proven on 3, overlaps-with"
    )
    assert Validation("a rule", tuple(right), fused=3).verdict == "proven on 3, guard-too-weak, overlaps-with"
    assert all(f"{one.kind}: {one.text}" in str(Validation("a rule", tuple(found))) for one in found)


@pytest.mark.slow
def test_json_says_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, whose verdict and exit status are the table's; what the module prints is no part of it."""
    path = tmp_path / "told_as_json.py"
    source = _blocks()[0].replace("epsilon=1e-5", "epsilon=1e-6")
    path.write_text(f"{source}\nprint('loaded')\n", encoding="utf-8")
    asked = ["validate", str(path), "--dtype", "float16", "--max-examples", "1"]
    before = set(USER_RULES.snapshot())
    try:
        statuses = [cli.main([*asked, "--expect-matches", "3", "--json"]), cli.main(asked)]
    finally:
        for rule in set(USER_RULES.snapshot()) - before:
            USER_RULES.release(rule.key)
    assert statuses == [1, 0]
    printed = capsys.readouterr().out
    told, end = json.JSONDecoder().raw_decode(printed)
    (failing,) = told["replacements"]
    assert told["ok"] is failing["ok"] is False
    assert failing["verdict"] == "never-matches"
    findings = tuple(ValidationFinding(**finding) for finding in failing.pop("findings"))
    del failing["verdict"], failing["ok"]
    row, right = str(Validation(findings=findings, **failing)), printed[end:]
    assert failing["rule"] in row
    assert findings[0].text in row
    assert re.split("  +", right.strip().splitlines()[2])[:2] == [failing["rule"], "proven on 1"]


@pytest.mark.slow
def test_the_documented_api_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last block of the page, as printed."""
    path = tmp_path / "example.py"
    path.write_text(_blocks()[-1], encoding="utf-8")
    runpy.run_path(str(path))
    assert "proven on" in capsys.readouterr().out


def test_torch_logs_no_traceback_of_sizes_that_are_only_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an operator refuses fake tensors, torch logs the stack. `validate` asks for many sizes, and a refusal is an answer."""
    logged: list[object] = []
    monkeypatch.setattr(logging.getLogger(FakeTensorMode.__module__), "callHandlers", logged.append)
    for quiet, records in ((quiet_refusals(), 0), (nullcontext(), 1)):
        with FakeTensorMode(), quiet, pytest.raises(RuntimeError, match="broadcast"):
            torch.empty(3, 8, device="npu") + torch.empty(4, 8, device="npu")
        assert len(logged) == records
