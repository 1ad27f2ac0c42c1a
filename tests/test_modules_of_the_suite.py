"""The modules of the suite that the pages run by `python -m`: each has a help."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
MODULES = sorted(
    {
        module
        for page in DOCS.rglob("*.md")
        for module in re.findall(r"python -m (npugraph_ex_conformance[\w.]*)", page.read_text(encoding="utf-8"))
    }
)


def _file(module: str) -> str:
    """What `python -m` runs. Pytest's own loader, that of modules of an installed plugin, gives `runpy.run_module` no code."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_help(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` names the module as the pages do and says what it does, and a wrong option is status 2; both were tracebacks."""
    for word, status in (("--help", 0), ("--wrong", 2)):
        monkeypatch.setattr(sys, "argv", [module, word])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(_file(module), run_name="__main__")
        assert ended.value.code == status
        said = capsys.readouterr()
        assert (said.out or said.err).split()[:4] == ["usage:", "python", "-m", module]
