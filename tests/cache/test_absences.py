"""A saved compilation of a function that looked for something in vain is not used once it is there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from npugraph_ex.inference import cache_compile
from npugraph_ex.inference.absences import absences
from npugraph_ex.report.graphs import graphs_so_far

SETTINGS = "CONFIG = {}\n\n\nclass Options:\n    pass\n"
PROGRAM = """
import os

import absent_settings
from absent_settings import CONFIG, Options


def decode(x):
    {}
    return x * scale
"""
_TRY = "try:\n        scale = {}\n    except {}:\n        scale = 1"
LOOKS = {
    "environ.get": "scale = int(os.environ.get('ABSENT_SCALE', '1'))",
    "getenv": "scale = int(os.getenv('ABSENT_SCALE', '1'))",
    "environ[]": _TRY.format("int(os.environ['ABSENT_SCALE'])", "KeyError"),
    "dict[]": _TRY.format("CONFIG['scale']", "KeyError"),
    "dict.get": "scale = absent_settings.CONFIG.get('scale', 1)",
    "in dict": "scale = CONFIG['scale'] if 'scale' in CONFIG else 1",
    "class": _TRY.format("Options.scale", "AttributeError"),
    "getattr": "scale = getattr(Options, 'scale', 1)",
    "hasattr": "scale = absent_settings.SCALE if hasattr(absent_settings, 'SCALE') else 1",
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], ModuleType]:
    """The program as a new process has it; with or without what it looks for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def fresh(look: str, there: bool) -> ModuleType:
        (tmp_path / "absent_program.py").write_text(PROGRAM.format(look), encoding="utf-8")
        (tmp_path / "absent_settings.py").write_text(SETTINGS, encoding="utf-8")
        for name in ("absent_program", "absent_settings"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        torch.compiler.reset()
        module = importlib.import_module("absent_program")
        if there:
            monkeypatch.setenv("ABSENT_SCALE", "3")
            module.CONFIG["scale"] = module.Options.scale = module.absent_settings.SCALE = 3
        return module

    return fresh


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_was_absent_is_seen_once_it_is_there(
    look: str, load: Callable[[str, bool], ModuleType], tmp_path: Path
) -> None:
    """The values are those of the program as it is; an unchanged program is loaded."""
    x, folder = torch.ones(3), str(tmp_path / "saved")
    compiled_graphs = []
    for there in (False, False, True):
        decode = cache_compile(load(look, there).decode, cache_dir=folder)
        before = graphs_so_far()
        assert torch.equal(decode(x), x * (3 if there else 1))
        compiled_graphs.append(graphs_so_far() - before)
    assert compiled_graphs == [1, 0, 1]


def test_only_what_is_absent_and_the_module_s_is_recorded() -> None:
    """Locals, and what only the program's own code could tell, are left out."""
    source = """
def f(x, local):
    y = CONFIG["there"] + CONFIG["absent"] + local["a"]
    CONFIG[x], LAZY.anything, len(x).b, x.absent, MISSING, OPTIONS.made.z
    "key" in CONFIG
    return getattr(OPTIONS, x), getattr(OPTIONS, "b c", 0)
def g():
    return CONFIG["other"]
"""

    class Lazy:
        def __getattr__(self, name: str) -> int:
            return 1

    class Options:
        @property
        def made(self) -> int:
            raise AssertionError("the program's code runs")

    module = ModuleType("m")
    vars(module).update(CONFIG={"there": 1}, LAZY=Lazy(), OPTIONS=Options())
    assert absences(module, source, [(2, 7)]) == ["CONFIG['absent']", "CONFIG['key']", "MISSING"]
