"""Each block that a page prints runs as printed, or a comment above it says why not; printed output is compared."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from printed import TABLE, blocks
from reader import Reader

import npugraph_ex

DOCS = Path(__file__).parents[1] / "docs"
ELSEWHERE = {
    "tutorial.md": "test_tutorial.py",
    "how-to/notebooks.md": "test_notebook.py",
    "how-to/testing.md": "testing/test_documented_toolkit.py",
    "how-to/validate.md": "testing/test_validate_command.py",
    "reference/examples.md": "test_examples.py",
}
"""Pages whose blocks another test runs."""
_PAGES = sorted(
    str(page.relative_to(DOCS))
    for page in DOCS.rglob("*.md")
    if not page.relative_to(DOCS).parts[0].startswith(("zh", "_"))
)
"""The English ones: `test_languages.py` compares the blocks of the Chinese ones with theirs."""


@pytest.mark.parametrize("name", _PAGES)
def test_no_block_escapes(name: str) -> None:
    """Every fence is found, code is fenced, and a block that nothing runs says what it is."""
    text = TABLE.sub("", (DOCS / name).read_text(encoding="utf-8"))
    found = blocks(DOCS / name)
    fences = re.findall(r"^ *```(?!\{)\w", text, re.MULTILINE)
    assert len(found) == len(fences)
    assert not re.search(
        r"(?:^|\n)\n {4,}\S", re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    for block in found:
        runs = block.language in {"python", "bash", "shell", "console"} or block.prints or block.file
        assert runs or block.drawing or block.reason, f"nothing runs or compares\n{block.code}"


@pytest.mark.parametrize("name", [*_PAGES, "../README.md", "../CONTRIBUTING.md"])
def test_a_reason_names_what_runs_the_block(name: str) -> None:
    """A test that exists, or an environment of tox, which is there for what takes long or needs more than a Python."""
    environments = (DOCS.parent / "tox.ini").read_text(encoding="utf-8")
    for reason in filter(None, (block.reason for block in blocks(DOCS / name))):
        tests, named = re.findall(r"tests/[\w/]+\.py", reason), re.findall(r"`tox -e ([\w-]+)`", reason)
        assert tests or named, f"{name}: {reason!r} names neither a test nor an environment of tox"
        assert all((DOCS.parent / test).is_file() for test in tests), reason
        assert all(re.search(rf"^\[testenv:{one}[\]{{]", environments, re.MULTILINE) for one in named), reason


@pytest.mark.slow
@pytest.mark.usefixtures("as_torchair")
@pytest.mark.parametrize("name", [name for name in _PAGES if name not in ELSEWHERE and blocks(DOCS / name)])
def test_a_page_runs_as_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, in one folder and one program."""
    monkeypatch.setenv("NPUGRAPH_EX_CACHE", str(tmp_path / "cache"))
    reader = Reader(tmp_path)
    with torch.enable_grad():  # which a page may switch off for the rest of it
        for block in blocks(DOCS / name):
            if not block.reason and not block.drawing:
                reader.follow(block)


def test_no_paragraph_is_long() -> None:
    """A paragraph or an item of a list has at most 75 words, so that a reader sees where one thing ends."""
    pages = [DOCS / name for name in _PAGES] + [DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md")]
    for page in pages:
        text = re.sub(
            r"<!--.*?-->|^ *(```+).*?^ *\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.)\s)", text):
            assert part.startswith("|") or len(part.split()) <= 75, f"{page.name}: {part}"


def _prose(page: Path) -> Iterator[str]:
    """The lines of a page that Markdown formats: those outside of code, and the options of directives, such as captions."""
    fence = ""
    for line in re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).splitlines():
        if line.lstrip().startswith("```"):
            fence = "" if fence else line.strip()
        elif not fence or (fence.startswith("```{") and line.startswith(":")):
            yield re.sub(r"(`+)[^`]+\1", "", line)


def test_names_with_underscores_are_code() -> None:
    """Outside of backticks, Markdown prints ``__init__`` as bold "init": in a caption, the name of another file."""
    for page in (*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")):
        assert not [line for line in _prose(page) if re.search(r"\b__\w+__", line)], page


def test_docstrings_print_what_they_show() -> None:
    """The examples of the public names, which the reference shows as they stand in the source."""
    root = Path(npugraph_ex.__file__).parent
    files = [file for file in root.rglob("*.py") if "\n        >>> " in file.read_text(encoding="utf-8")]
    assert files
    for file in files:
        module = import_module(".".join(("npugraph_ex", *file.relative_to(root).with_suffix("").parts)))
        assert doctest.testmod(module).failed == 0, file


def test_the_other_tests_read_their_pages() -> None:
    """A page or a block that another test runs is named there."""
    named = dict(ELSEWHERE)
    for page in _PAGES:
        for block in blocks(DOCS / page):
            if block.reason.startswith("run by "):
                named[page] = re.match(r"run by tests/(\S+\.py): \S", block.reason)[1]
    assert len(named) > len(ELSEWHERE)
    for page, test in named.items():
        assert f'"{Path(page).name}"' in (Path(__file__).parent / test).read_text(encoding="utf-8"), page


def test_the_site_shows_the_name_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of the tutorial has a caption, as code: in the source it is a comment, which no reader of the site sees."""
    monkeypatch.syspath_prepend(str(DOCS))
    import generated

    source = [(DOCS / "tutorial.md").read_text(encoding="utf-8")]
    files = [block.file for block in blocks(DOCS / "tutorial.md") if block.file]
    generated.name_files(None, "tutorial", source)
    assert re.findall(r"^```\{code-block\} python\n:caption: `(\S+)`\n\n", source[0], re.MULTILINE) == files != []
