"""The command line as a person meets it: its help, its exit status, its one clear sentence when something is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from npugraph_ex.cli import main
from npugraph_ex.config import OPTION_TABLE

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_help_teaches_every_command(command: Command) -> None:
    """`--help` shows each command in an example and what the exit status means."""
    done = command("--help")
    assert done.returncode == 0
    for line in (
        "npugraph-ex env",
        "npugraph-ex run --emulate",
        "--as-torchair",
        "npugraph-ex cache ls",
        "npugraph-ex diff",
        "npugraph-ex validate",
        "npugraph-ex options",
        "exit status",
    ):
        assert line in done.stdout


def test_a_wrong_command_line_is_status_two(command: Command) -> None:
    """The status that argparse gives to a wrong command line is kept."""
    assert command("rnu", "x.py").returncode == 2


@pytest.mark.slow
def test_python_runs_the_package_as_the_command() -> None:
    """`python -m npugraph_ex` is `npugraph-ex` where the script is not on PATH."""
    done = subprocess.run([sys.executable, "-m", "npugraph_ex", "rnu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: npugraph-ex")


def test_options_prints_the_named_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Its entry alone, also as JSON; a name that is none is wrong use, and the nearest right one is shown."""
    assert main(["options", "lift"]) == 0
    entry = capsys.readouterr().out
    assert entry.startswith(f"lift = {OPTION_TABLE['lift'].default!r}\n    {OPTION_TABLE['lift'].meaning}\n")
    assert OPTION_TABLE["lift"].kind.allowed in entry
    assert "capture_limit" not in entry
    assert main(["options", "lift", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["lift"]
    assert main(["options", "liftt"]) == 2
    assert capsys.readouterr().err.startswith("npugraph-ex: no option is named 'liftt'; did you mean 'lift'?")


def test_options_prints_every_row(command: Command) -> None:
    """The table has a row for each option, with its default and its place in TorchAir's config, each in its column."""
    done = command("options")
    assert done.returncode == 0
    rows = [[cell.strip() for cell in re.split("[│┃]", line)] for line in done.stdout.splitlines()]
    printed = {row[1]: row for row in rows if len(row) > 6 and row[1] in OPTION_TABLE}
    assert list(printed) == list(OPTION_TABLE)
    for name, option in OPTION_TABLE.items():
        assert printed[name][2] == repr(option.default)
        assert option.kind.allowed.startswith(printed[name][3][:8])
        assert printed[name][5].startswith(option.torchair or "")  # whole: a cut name cannot be searched for
        assert printed[name][5].startswith(option.torchair[:8])


SCRIPT = """
import sys
import helper
print("argv", sys.argv[1:], "name", __name__, "helper", helper.VALUE)
sys.exit(5)
"""


def test_run_is_the_script(command: Command, tmp_path: Path) -> None:
    """`run` gives the script its arguments, its directory, the name __main__, and passes its exit status on."""
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = command("run", str(script), "--steps", "3")
    assert done.returncode == 5
    assert done.stdout.strip() == "argv ['--steps', '3'] name __main__ helper 7"


def test_run_emulate_computes_on_the_device(command: Command, tmp_path: Path) -> None:
    """`run --emulate` has an npu device with values in it."""
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint((torch.arange(3, device='npu') * 2).cpu().tolist())\n")
    done = command("run", "--emulate", str(script), NPU_EMULATOR_FORCE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[0, 2, 4]")


TORCHAIR = """
import torchair
from torchair.core.utils import logger
from torchair.configs.compiler_config import CompilerConfig
from torchair.scope import limit_core_num
import npugraph_ex
from torchair.inference import cache_compile
assert torchair.inference.cache_compile is cache_compile is npugraph_ex.inference.cache_compile
assert torchair.CompilerConfig is CompilerConfig is npugraph_ex.CompilerConfig
assert torchair.logger is logger is npugraph_ex.logger
assert torchair.scope.limit_core_num is limit_core_num is npugraph_ex.scope.limit_core_num
try:
    torchair.npu_print
except AttributeError as error:
    print(error)
"""


def test_run_as_torchair(command: Command, tmp_path: Path) -> None:
    """A script that says `import torchair` gets this library's objects, and a plain error for what it has not."""
    script = tmp_path / "script.py"
    script.write_text(TORCHAIR)
    done = command("run", "--as-torchair", str(script))
    assert done.returncode == 0, done.stderr
    assert "has no 'npu_print'" in done.stdout


def test_run_under_bundled_hands_the_name_over(command: Command, tmp_path: Path) -> None:
    """NPUGRAPH_EX=bundled reaches the script although the command's own code is this library's."""
    script = tmp_path / "script.py"
    script.write_text("import torch, npugraph_ex\nprint(npugraph_ex.__file__)\n")
    done = command("run", "--emulate", str(script), NPUGRAPH_EX="bundled", NPU_EMULATOR_FORCE="1")
    assert done.returncode == 0, done.stderr
    assert "torch_npu/dynamo/npugraph_ex" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (["run", "absent.py"], {}, "npugraph-ex: there is no file 'absent.py' to run"),
        (["run", __file__], {"NPUGRAPH_EX": "bundeld"}, "NPUGRAPH_EX is 'bundeld'; it takes 'bundled'"),
        (["run", "--as-torchair", __file__], {"NPUGRAPH_EX": "bundled"}, "choose one"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    command: Command, arguments: list[str], variables: dict[str, str], sentence: str
) -> None:
    """A wrong command line is status 2 and one line, without a traceback."""
    done = command(*arguments, **variables)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_options_on_a_narrow_terminal_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a table would break words each option is a paragraph; --json gives every field."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["options"]) == 0
    narrow = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "capture_limit = 64" in narrow
    assert main(["options", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == OPTION_TABLE.keys()
    for name, option in OPTION_TABLE.items():
        told = [rows[name][field] for field in ("default", "allowed", "meaning", "torchair", "inverted")]
        assert told == [option.default, option.kind.allowed, option.meaning, option.torchair, option.inverted]
    assert rows["capture_limit"]["default"] == 64
    assert rows["inplace_pass"]["inverted"] is True


def test_the_librarys_own_errors_keep_the_scripts_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of this library in a script is the script's: with the line that caused it, and status 1."""
    script = tmp_path / "script.py"
    script.write_text("from npugraph_ex import CompilerConfig\nCompilerConfig().nope = 3\n")
    for variable in ("argv", "path"):
        monkeypatch.setattr(sys, variable, list(getattr(sys, variable)))
    assert main(["run", str(script)]) == 1
    said = capsys.readouterr().err
    assert "line 2" in said
    assert "UnknownOptionError" in said


@pytest.mark.parametrize("name", ["run", "explain"])
@pytest.mark.parametrize("text", ["x = (1,\n", "def f():\n    {}['a']\n\n\nf()\n"], ids=["no Python", "an error"])
def test_a_failing_script_shows_its_own_lines_only(name: str, text: str, tmp_path: Path, command: Command) -> None:
    """To the letter what `python script.py` prints: no frame of the command above it. Nothing is told of what never began."""
    script = tmp_path / "script.py"
    script.write_text(text)
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    done = command(name, str(script))
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)
    assert done.returncode == 1
    assert ("Nothing was compiled" in done.stdout) == (name == "explain" and "def" in text)


@pytest.mark.parametrize("name", ["run", "explain"])
def test_a_machine_without_a_device_gets_a_hint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch's own error stays to be seen, the last words say what to do, and nothing is raised on top of it."""
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('libhccl.so: cannot open shared object file')\n")
    for variable in ("argv", "path"):
        monkeypatch.setattr(sys, variable, list(getattr(sys, variable)))
    monkeypatch.delitem(sys.modules, "npugraph_ex.frontend.entry.backend", raising=False)
    assert main([name, str(script)]) == 1
    said = capsys.readouterr()
    assert "RuntimeError: libhccl.so" in said.err
    assert "Add --emulate" in said.err.splitlines()[-1]
    assert name == "run" or "Nothing was compiled" in said.out


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("", ["--json", "--steps", "--emulate=1", "--html"], "--json --emulate --html FILE"),
        ("", ["--html", "my page.html", "--after=3"], "--html 'my page.html' --after=3"),
        ("", ["--after", "--json"], "--after SECONDS --json"),
        ("'--json'", ["--json", "-h"], ""),
        ("", [], ""),
    ],
)
def test_an_option_behind_the_script_is_told(
    text: str, words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The script gets it, and one line says where it would be the command's, with its value; nothing where the script names it."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys; {text}\nprint(sys.argv[1:])\n")
    for variable in ("argv", "path"):
        monkeypatch.setattr(sys, variable, list(getattr(sys, variable)))
    monkeypatch.delitem(sys.modules, "npugraph_ex.frontend.entry.backend", raising=False)
    assert main(["explain", str(script), *words]) == 0
    said = capsys.readouterr()
    assert str(words) in said.out
    lines = [line for line in said.err.splitlines() if " behind " in line]
    options = " ".join(re.findall(r"--\w+", told))
    assert [line.partition(" stand")[0] for line in lines] == ([f"npugraph-ex: {options}"] if told else [])
    assert all(line.endswith(f"write `npugraph-ex explain {told} {script}`") for line in lines)


def test_advice_without_a_device_gets_the_hint_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its watch imports torch before the script does, and fails as the script's import would."""
    script = tmp_path / "script.py"
    script.write_text("import torch\n")
    for variable in ("argv", "path"):
        monkeypatch.setattr(sys, variable, list(getattr(sys, variable)))

    def lacking(**_: object) -> None:
        raise RuntimeError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr("npugraph_ex.commands.advise.advising", lacking)
    assert main(["advise", str(script)]) == 1
    said = capsys.readouterr()
    assert "RuntimeError: libhccl.so" in said.err
    assert "Add --emulate" in said.err.splitlines()[-1]
    assert "Nothing was compiled" in said.out


def test_what_the_emulated_runtime_lacks_is_told_under_emulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m npu_emulator` says it: torch_npu's error, then whose lack it is."""
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.npu.utilization()\n")
    for variable in ("argv", "path"):
        monkeypatch.setattr(sys, variable, list(getattr(sys, variable)))
    assert main(["run", "--emulate", str(script)]) == 1
    said = capsys.readouterr().err
    assert "npu_emulator: torch_npu looked for aclrtGetDeviceUtilizationRate" in said
