"""The modules of the suite that the pages run by `python -m`: each has a help."""

from __future__ import annotations

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


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_help(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` names the module as the pages do and says what it does, and a wrong option is status 2; both were tracebacks."""
    for word, status in (("--help", 0), ("--wrong", 2)):
        monkeypatch.setattr(sys, "argv", [module, word])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        assert ended.value.code == status
        said = capsys.readouterr()
        assert (said.out or said.err).split()[:4] == ["usage:", "python", "-m", module]
