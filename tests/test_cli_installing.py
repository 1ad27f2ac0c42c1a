"""The command that installs what is missing is one that works for the installation at hand."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from npugraph_ex import cli
from npugraph_ex.commands import suites
from npugraph_ex.observe.installing import install_command

REQUIRES = ["torch>=2.13,<2.14", "pytest>=8.2; extra == 'benches'", "pytest-benchmark>=5.1; extra == 'benches'"]


class _Installed:
    """What pip wrote down of the package."""

    requires = REQUIRES

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'npugraph-ex[benches]'"),
        ({"url": "file://{here}", "dir_info": {"editable": True}}, "pip install -e '{here}[benches]'"),
        ({"url": "file://{here}", "dir_info": {}}, "pip install '{here}[benches]'"),
        ({"url": "file://{here}/a%20b.whl", "archive_info": {}}, "pip install '{here}/a b.whl[benches]'"),
        ({"url": "file://{here}/gone.whl", "archive_info": {}}, "pip install 'pytest>=8.2' 'pytest-benchmark>=5.1'"),
        (
            {"url": "https://example.org/n.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'npugraph-ex[benches] @ git+https://example.org/n.git@abc'",
        ),
        (
            {"url": "https://example.org/n.whl", "archive_info": {}},
            "pip install 'npugraph-ex[benches] @ https://example.org/n.whl'",
        ),
    ],
)
def test_each_way_to_install(
    origin: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index, a checkout, editable or not, a wheel that is there or gone, a repository, an address."""
    (tmp_path / "a b.whl").touch()
    if origin is not None:
        origin = {**origin, "url": origin["url"].format(here=tmp_path)}
    monkeypatch.setattr(metadata, "distribution", lambda _name: _Installed(origin))
    assert install_command("benches") == command.format(here=tmp_path)


def test_a_checkout_that_is_only_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any metadata the checkout itself is what there is to install."""

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    command = install_command("conformance")
    assert command.startswith("pip install -e ")
    root = Path(command.removeprefix("pip install -e ").strip("'").removesuffix("[conformance]"))
    assert (root / "npugraph_ex" / "__init__.py").is_file()


@pytest.mark.parametrize("command", ["bench", "conformance", "validate"])
def test_a_missing_package_is_wrong_use(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, the packages by the names under which they are installed, and the command."""
    monkeypatch.setattr(suites, "find_spec", lambda _module: None)
    assert cli.main([command, *(["json"] if command == "validate" else [])]) == 2
    said = capsys.readouterr().err
    name = {"bench": "pytest-benchmark", "conformance": "transformers", "validate": "hypothesis"}[command]
    extra = "benches" if command == "bench" else "conformance"
    assert name in said
    assert install_command(extra) in said
