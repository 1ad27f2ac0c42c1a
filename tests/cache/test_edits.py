"""Edits of a program between two processes: each shows in the values, whatever part of a class or a module it changes."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from npugraph_ex.inference import cache_compile
from npugraph_ex.report.graphs import graphs_so_far

BASE = """
import torch

class Gate(torch.nn.Module):
    k = 3
    def forward(self, x):
        return x * 2

class OtherGate(torch.nn.Module):
    k = 5
    def forward(self, x):
        return x * 5
"""
MODEL = """
import abc
import torch
import edited_base
from edited_base import Gate, OtherGate

class Doubles:
    def scale(self, x):
        return x * 2

class Triples:
    def scale(self, x):
        return x * 3

class Scaling(Doubles):
    pass

class Marked(abc.ABC):
    pass

class Plain:
    pass

class Mixin:
    pass

class Settings:
    def factor(self):
        return 2

class MyGate(Gate):
    pass

SETTINGS, PLAIN = Settings(), Plain()
LIBRARY = torch.library.Library("edited_operators", "FRAGMENT")

class Model(Mixin, torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = MyGate()
        self.scaling = Scaling()

    def forward(self, x):
        y = self.scaling.scale(self.gate(x)) + self.gate.k + SETTINGS.factor()
        if isinstance(PLAIN, Marked):
            y = y + 100
        if hasattr(PLAIN, "bonus"):
            y = y + 1000
        if issubclass(Mixin, Marked):
            y = y + 10000
        if hasattr(edited_base, "OPTIONAL"):
            y = y + 100000
        return y * getattr(SETTINGS, "sign", 1)
"""
EDITS = {
    "a method is added": ("class MyGate(Gate):\n    pass", "class MyGate(Gate):\n    def forward(self, x): return x * 10"),
    "a constant is added": ("class MyGate(Gate):\n    pass", "class MyGate(Gate):\n    k = 4"),
    "another base": ("class MyGate(Gate)", "class MyGate(OtherGate)"),
    "another base of an object": ("class Scaling(Doubles)", "class Scaling(Triples)"),
    "a base in front": ("class Scaling(Doubles)", "class Scaling(Triples, Doubles)"),
    "a base that is asked for": ("class Plain:", "class Plain(Marked):"),
    "a base of a mixin": ("class Mixin:", "class Mixin(Marked):"),
    "a registered class": ("class Mixin:", "Marked.register(Plain)\n\nclass Mixin:"),
    "an attribute that is asked for": ("class Plain:\n    pass", "class Plain:\n    bonus = 1"),
    "an attribute with a default": ("class Settings:", "class Settings:\n    sign = -1"),
    "a method of a global object": ("return 2", "return 7"),
    "a member of the model": ("class Model(Mixin, torch.nn.Module):", "class Model(torch.nn.Module):"),
}  # fmt: skip
"""By what it is: text of the model's file, and what stands in its place afterwards."""
EDITS_OF_THE_BASE = {
    "a name of a module": ("import torch\n", "import torch\nOPTIONAL = 1\n"),
    "a constant of a base": ("k = 3", "k = 8"),
}
OPERATOR = """
import torch

library = torch.library.Library("edited_operator", "DEF")
library.define("scaled(Tensor x) -> Tensor")
library.impl("scaled", lambda x: x * {}, "CompositeImplicitAutograd")
"""
CALLING = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.edited_operator.scaled(x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program lies."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def _imported(folder: Path, **sources: str) -> ModuleType:
    """The module `edited_model` as a new process has it."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    importlib.invalidate_caches()
    for name in ("edited_model", "edited_base"):
        sys.modules.pop(name, None)
        linecache.checkcache(str(folder / f"{name}.py"))
    torch.compiler.reset()
    importlib.import_module("edited_base")
    return importlib.import_module("edited_model")


def _agrees(folder: Path, module: ModuleType) -> int:
    """Whether the saved and the new compilations compute what the model does; how many are new."""
    model, before = module.Model().npu(), graphs_so_far()
    x = torch.tensor([1.0, -2.0], device="npu")
    with torch.no_grad():
        found = cache_compile(model.forward, cache_dir=folder / "kept")(x)
        assert torch.equal(found, model.forward(x))
    return graphs_so_far() - before


@pytest.mark.slow
@pytest.mark.parametrize("edit", [*EDITS, *EDITS_OF_THE_BASE])
def test_an_edit_shows_in_the_values(folder: Path, edit: str) -> None:
    """And where nothing is edited, the saved compilation serves."""
    old, new = {**EDITS, **EDITS_OF_THE_BASE}[edit]
    sources = {"edited_base": BASE, "edited_model": MODEL}
    name = "edited_model" if edit in EDITS else "edited_base"
    assert old in sources[name]
    assert _agrees(folder, _imported(folder, **sources)) == 1
    assert _agrees(folder, _imported(folder)) == 0
    sources[name] = sources[name].replace(old, new)
    assert _agrees(folder, _imported(folder, **sources)) == 1


@pytest.mark.slow
def test_an_edit_while_the_program_runs_is_of_the_next_process(folder: Path) -> None:
    """What this process compiles afterwards is the code that it has imported."""
    module = _imported(folder, edited_base=BASE, edited_model=MODEL)
    model = module.Model().npu()
    with torch.no_grad():
        compiled = cache_compile(model.forward, cache_dir=folder / "kept")
        (folder / "edited_model.py").write_text(MODEL.replace(*EDITS["a method is added"]))
        x = torch.tensor([1.0, -2.0], device="npu")
        assert torch.equal(compiled(x), model.forward(x))
    assert _agrees(folder, _imported(folder)) == 1


@pytest.mark.slow
def test_an_edit_of_an_operator_that_is_traced_into(folder: Path) -> None:
    """Its function stands in a file that the model's does not name."""
    for number in (2, 3):
        module = _imported(folder, edited_base=OPERATOR.format(number), edited_model=CALLING)
        assert _agrees(folder, module) == 1
        sys.modules["edited_base"].library._destroy()


CONFIG: dict[str, float] = {"k": 2.0}
FLAG, FACTORS, TABLE = False, [2.0, 3.0], torch.ones(2, device="npu")


class Held:
    """A global object."""

    k = 2.0


HELD = Held()


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Reading(torch.nn.Module):
    """Reads globals, classes and functions."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of any shape."""
        y = _doubled(self.act(x)) * CONFIG["k"] + HELD.k * self.scale
        for factor in FACTORS:
            y = y * factor
        if FLAG or "more" in CONFIG:
            y = y + 100
        if hasattr(HELD, "bonus"):
            y = y + 1000
        return y * getattr(HELD, "sign", 1) + TABLE.sum()


_HERE = sys.modules[__name__]
CHANGES: dict[str, Callable[[pytest.MonkeyPatch, torch.nn.Module], None]] = {
    "a flag": lambda patch, _: patch.setattr(_HERE, "FLAG", True),
    "an item of a dictionary": lambda patch, _: patch.setitem(CONFIG, "k", 5.0),
    "a key of a dictionary": lambda patch, _: patch.setitem(CONFIG, "more", 1),
    "an element of a list": lambda patch, _: patch.setattr(_HERE, "FACTORS", [7.0, 3.0]),
    "a longer list": lambda patch, _: patch.setattr(_HERE, "FACTORS", [2.0, 3.0, 4.0]),
    "an attribute of an object": lambda patch, _: patch.setattr(HELD, "k", 9.0),
    "an attribute of a class": lambda patch, _: patch.setattr(Held, "k", 9.0),
    "a constant of the model's class": lambda patch, _: patch.setattr(Reading, "scale", 9.0),
    "an attribute that appears": lambda patch, _: patch.setattr(HELD, "bonus", 1, raising=False),
    "an attribute that had a default": lambda patch, _: patch.setattr(HELD, "sign", -1, raising=False),
    "another object": lambda patch, _: patch.setattr(_HERE, "HELD", type("Other", (), {"k": 3.0})()),
    "a global function": lambda patch, _: patch.setattr(_HERE, "_doubled", lambda x: x * 6),
    "a function that the model holds": lambda patch, model: patch.setattr(model, "act", torch.sin),
    "a global tensor": lambda patch, _: patch.setattr(_HERE, "TABLE", torch.ones(3, dtype=torch.float64, device="npu")),
}  # fmt: skip
"""By what changes after the first call: how."""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_shows_in_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """In the process that compiled, and in one that has read the file; what changes back finds what was compiled before."""
    torch.compiler.reset()
    x = torch.tensor([1.0, -2.0], device="npu")
    for _ in range(2):
        model = Reading()
        compiled = cache_compile(model.forward, cache_dir=tmp_path)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(x), model.forward(x))
                with monkeypatch.context() as patch:
                    CHANGES[change](patch, model)
                    assert torch.equal(compiled(x), model.forward(x))
            before = graphs_so_far()
            assert torch.equal(compiled(x), model.forward(x))
            assert graphs_so_far() == before


@pytest.mark.slow
def test_functions_as_arguments(tmp_path: Path) -> None:
    """Such a compilation is not kept, and another function is another one."""
    compiled = cache_compile(lambda x, function: function(x) * 2, cache_dir=tmp_path)
    x = torch.tensor([1.0, -2.0], device="npu")
    for function in (torch.sin, torch.cos, torch.sin, _doubled):
        assert torch.equal(compiled(x, function), function(x) * 2)
