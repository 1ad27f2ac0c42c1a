"""Each command of the project that a page, a README or a help text prints runs, or a line below says why it does not.

`test_pages.py` runs what stands in blocks; here are the commands in sentences and tables, and the examples of the help texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from printed import blocks
from reader import Reader
from test_guides import code

from npu_emulator.__main__ import command_line
from npugraph_ex.cli import _parser
from npugraph_ex.commands import alarms, mutants
from npugraph_ex.commands.terminal import parsers_in
from npugraph_ex.testing import mutation

ROOT = Path(__file__).parents[1]
_GUIDES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if not re.search("/_|/zh/", str(page))),
]
NOT_HERE = {
    r"npugraph-ex (?!(?:env|operators|options)$)\w+": "a name",
    r"python -m npu_emulator|npugraph-ex COMMAND --help": "a name",
    r"(NPU_EMULATOR_COMPILED=0 )?pip .*": "installs; `tox -e wheel` installs into a new environment",
    r"tox .*": "a check of its own, which `test_guides.py` looks up",
    r"(NPUGRAPH_EX=bundled )?python \w+\.py": "wants an NPU; behind `-m npu_emulator` the same runs here",
    r"(ruff|towncrier|python (docs|benches|\.ci)/|python -m npu_emulator docs/).*": "works on a checkout",
    r"pytest (-n 3 .*|tests/.*)": "this very run",
    r"pytest (--junit-xml|-W).*": "pytest's own",
    r"(NPU_EMULATOR_SOC=\S+ )?pytest (-n 2 )?--npu=.*": "`emulator/test_pytest_plugin.py`; `test_pages.py` runs two of them",
    r"npugraph-ex env (--emulate --canary|--canary --emulate)": "`--canary` alone runs here, on the emulated device",
    r"npugraph-ex env (--emulate )?--json": "`test_cli_env.py`",
    r"python -m npu_emulator (--soc .*|script.py.*)": "`emulator/test_budgets.py`; `test_pages.py` gives a script arguments",
    r"python -m npu_emulator --schedule lazy .*": "`emulator/test_poisoned_schedules.py`",
    r"npugraph-ex diff npugraph_ex_data/.*": "two graphs of one process, by its number; two other comparisons run",
    r"npugraph-ex explain --sarif FILE \$\(which pytest\) .*": "the shell's own part; `test_cli_explain.py` explains a suite",
    r"npugraph-ex bench( .*)?": "minutes to an hour; `tox -e bench`, and `test_cli_bench.py` with small topics",
    r"npugraph-ex campaign [a-z].*": "hours; `tox -e campaigns`",
    r"python tests/emulator/broken_rules\.py": "half an hour; `test_broken_rules.py` looks whether the breaks fit",
    r"npugraph-ex conformance .*": "minutes to hours; `tox -e emulated`, and `test_cli_conformance.py`",
    r"npugraph-ex upstream .*": "a checkout of another project; `testing/test_upstream.py` has files of its own",
    r"npugraph-ex fidelity.*": "asks an NPU, or half a minute; `emulator/test_fidelity.py`",
    r"npugraph-ex validate my_(package|fusions).*": "hundreds of programs; `testing/test_validate_command.py` with a few",
}
"""Why a command is not run here, and what runs it."""


_OURS = r"(?:[A-Z_]+=\S+ )*(?:npugraph-ex|python|pytest|tox|pip|ruff|towncrier) ."
_MODEL = """
import shutil

class Model(torch.nn.Module):
    def decode(self, x):
        return x.relu() * 2

from npugraph_ex.inference import cache_compile

x = torch.ones(4, device="npu")
for folder in ({}, {"cache_dir": "compiled"}):
    cache_compile(Model().decode, **folder)(x)
torch.compile(Model().decode, backend="npugraph_ex", options={"dump_tensor_data": True, "data_dump_dir": "dump_a"})(x)
for folder in ("dump_b", "dump_cpu", "dump_npu"):
    shutil.copytree("dump_a", folder, dirs_exist_ok=True)
"""
"""A saved method, and dumps of equal runs."""


def _printed() -> Iterator[str]:
    """All that reads as code, in prose and in help texts."""
    for guide in _GUIDES:
        yield from code(guide)
    for parser in (*parsers_in(_parser()), command_line(), mutants.parser(), alarms.parser()):
        for line in re.findall(r"^ +((?:npugraph-ex|python -m npu_emulator) .*)$", parser.format_help(), re.MULTILINE):
            yield re.split(r"  +| >", line)[0]


def _without_name(command: str) -> str:
    """A command with one name for all scripts that may be any script."""
    return re.sub(r"\b(script|old_script|serve|server|compiled|train)\.py\b", "script.py", command)


def _of_any_script(command: str) -> str:
    """A command with one name for all scripts: a block has a script that the command is for."""
    return re.sub(r"\b\w+\.py\b", "script.py", command)


_IN_BLOCKS = {
    _of_any_script(command)
    for page in _GUIDES
    if page != "CONTRIBUTING.md"
    for block in blocks(ROOT / page)
    for command, _ in block.commands
}
"""What `test_pages.py` runs, or asks for a reason."""
_COMMANDS = sorted(
    {
        _without_name(command)
        for command in _printed()
        if re.match(_OURS, command) and _of_any_script(command) not in _IN_BLOCKS
    }
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Someone with the files that the pages show: the README's script, and those that pages name."""
    made = Reader(tmp_path_factory.mktemp("reader"))
    project = "docs/how-to/ship-a-rule.md"  # its settings of pytest would be those of every command
    shown = {
        block.file: block.code for page in _GUIDES if page != project for block in blocks(ROOT / page) if block.file
    }
    shown["script.py"] = next(block.code for block in blocks(ROOT / "README.md") if block.language == "python")
    shown["my_ops.py"] = shown["my_operators.py"].replace("mine::", "my_ops::")
    shown["bench.py"] = "import torch, torch_npu; torch.ones(2, device='npu') + 1"
    for name, text in shown.items():
        (made.folder / name).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPUGRAPH_EX_CACHE", str(made.folder / "cache"))
        yield made


@pytest.mark.parametrize(
    "command", [command for command in _COMMANDS if not any(re.fullmatch(p, command) for p in NOT_HERE)]
)
def test_a_command_runs(reader: Reader, command: str) -> None:
    """With exit status 0."""
    if re.match("npugraph-ex (cache|diff)", command):
        reader.run(_MODEL)
    reader.command(command)
    assert reader.status == 0, reader.output


def test_each_printed_mutant_is_one() -> None:
    """Commands that switch one on take minutes, and are not run here."""
    named = {
        name for command in _printed() for name in re.findall(r"(?:conformance mutants|--mutant) (\w[\w-]+)", command)
    }
    assert named - {"NAME", "list"}
    assert named <= {*mutation.mutants(), "NAME", "list"}


def test_each_reason_is_needed() -> None:
    """A command that is printed no more needs no reason, and none has two."""
    for pattern in NOT_HERE:
        assert any(re.fullmatch(pattern, command) for command in _COMMANDS), pattern
