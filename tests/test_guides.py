"""What the guides name exists: files, environments of tox, extras, subcommands and their options. Nothing is run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

from npugraph_ex.cli import _parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
GUIDES = [
    "CONTRIBUTING.md",
    "CONTRIBUTING.zh.md",
    "README.md",
    "README.zh.md",
    "docs/explanation/architecture.md",
    "docs/reference/operators.md",
]
_PAGES = sorted(
    {*GUIDES, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if "/_" not in str(page))}
)
"""Those whose commands are compared with the parsers."""
# Files that a reader writes, and one of torch_npu's.
_ELSEWHERE = {"script.py", "my_fusions.py", "my_operators.py", "acl_rt.h"}
_FILE = re.compile(r"[\w.<>*-]*/[\w.<>*/-]*|[\w<>*]+\.(?:py|pyi|md|cpp|h|toml|ini|pth)")


def code(guide: str) -> list[str]:
    """What stands in back-ticks or in a block of shell, without comments and placeholders of values."""
    text = (ROOT / guide).read_text(encoding="utf-8")
    shell = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    lines = [line for block in shell for line in block.splitlines()]
    lines += re.findall(
        r"^(?:    |\$ )(npugraph-ex .*?)(?:  .*)?$", text, re.MULTILINE
    )  # a remark stands behind two spaces
    parts = [part.strip() for line in lines for part in re.split(r"&&", re.sub(r" #.*", "", line))]
    return [piece for piece in (*spans, *parts) if piece]


def words(guide: str) -> Iterator[list[str]]:
    """The words of each piece of code that reads as a command; not of formulas."""
    for piece in code(guide):
        try:
            yield shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", piece))
        except ValueError:
            continue


@pytest.mark.parametrize("guide", GUIDES)
def test_every_file_that_is_named_exists(guide: str) -> None:
    """A path is one from the root; `<name>` stands for any name; a bare file name is somewhere in the project."""
    named = {word for command in words(guide) for word in command if _FILE.fullmatch(word)} - _ELSEWHERE
    named = {name for name in named if not name.startswith(("/", "~")) and "//" not in name}
    assert named
    tops = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for name in named:
        pattern = re.sub(r"<\w+>", "*", name).removeprefix("./").rstrip("/")
        found = any(ROOT.glob(pattern)) or ("/" not in name and any(any(top.rglob(pattern)) for top in tops))
        assert found or name.startswith(".venv"), f"{guide} names {name}, which does not exist"


@pytest.mark.parametrize(
    "guide",
    [
        "CONTRIBUTING.md",
        "CONTRIBUTING.zh.md",
        "CODE_OF_CONDUCT.md",
        "CODE_OF_CONDUCT.zh.md",
        "SECURITY.md",
        "SECURITY.zh.md",
        "README.md",
    ],
)
def test_every_file_that_is_linked_exists(guide: str) -> None:
    """Links to other files; who contributes finds the rules of conduct, and they name a way to report a breach."""
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / guide).read_text(encoding="utf-8"), flags=re.DOTALL)
    linked = {name for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if "//" not in name}
    assert {name for name in linked if not (ROOT / name).exists()} == set()
    pages = ROOT / "docs" / "how-to"
    if guide != "README.md":  # a page of the site is made of it, and its links lead from there
        assert {name for name in linked if not name.startswith("docs/") and not (pages / name).exists()} == set()
    if guide.startswith("CONTRIBUTING"):
        assert {"CODE_OF_CONDUCT.md", "SECURITY.md"} <= linked
    if guide.startswith("CODE_OF_CONDUCT"):
        assert "SECURITY.md" in linked


def _environments(tox: ConfigParser) -> set[str]:
    """The names of tox's sections; `vllm{,-torch210}` has two."""
    found: set[str] = set()
    for section in tox.sections():
        head, _, factors = section.removeprefix("testenv:").partition("{")
        found |= {head + factor for factor in factors.rstrip("}").split(",")}
    return found


@pytest.mark.parametrize("guide", _PAGES)
def test_every_command_parses(guide: str) -> None:
    """Subcommands of `npugraph-ex` take the options that are printed; tox has the environments and pyproject the extras."""
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for command in words(guide):
        if command[0] == "npugraph-ex" and len(command) > 1 and command[1] != "COMMAND":
            arguments = command[1:] if len(command) > 2 else [command[1], "--help"]  # a subcommand that is only named
            try:
                known, further = _parser().parse_known_args(arguments)
            except SystemExit as end:
                if end.code:
                    pytest.fail(f"the command line refuses {' '.join(command)!r}")
            else:
                assert not further or known.takes_further, " ".join(command)
        elif command[0] == "tox" and "-e" in command:
            for name in command[command.index("-e") + 1].split(","):
                assert name in _environments(tox), " ".join(command)
        elif command[:2] == ["pip", "install"]:
            for names in re.findall(r"\[([\w,]+)\]", command[-1]):
                assert set(names.split(",")) <= extras.keys(), " ".join(command)
