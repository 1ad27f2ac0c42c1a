"""What rules and passes call stands in the key too: a saved compilation is not used after a helper has changed."""

from __future__ import annotations

import importlib
import linecache
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cached_models
import pytest
import torch

from npugraph_ex import cache_key
from npugraph_ex.cache.dependencies import reached
from npugraph_ex.inference import cache_compile

PASSES = """
import helpers
from helpers import Settings, TABLE, again, call


def rewrite(gm, inputs, config):
    for node in gm.graph.find_nodes(op="call_function", target=helpers.torch.ops.aten.add.Tensor):
        node.args = (node.args[0], helpers.number())


class Pass:
    def __call__(self, gm, inputs, config):
        return self.step(gm)

    def step(self, gm):
        return [helpers.number(), Settings.scale, TABLE["a"](1), again(3), call(1)]
"""

HELPERS = """
import functools
import torch

LIMIT = {limit}
UNUSED = {unused}


def number():
    return inner() + LIMIT


def inner():
    return {inner}


def again(n):
    return n and again(n - 1)


class Settings:
    scale = {scale}


TABLE = {{"a": lambda x: x + {table}}}


def wrapped(function):
    @functools.wraps(function)
    def outer(*args):
        return function(*args)
    return outer


@wrapped
def call(x):
    return x * {wrapped}
"""

STANDARD = {"limit": 1, "unused": 1, "inner": 1, "scale": 1, "table": 1, "wrapped": 1}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Import the passes beside helpers with other numbers in them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "passes_of_mine.py").write_text(PASSES)

    def load(**numbers: int) -> ModuleType:
        file = tmp_path / "helpers.py"
        file.write_text(HELPERS.format(**{**STANDARD, **numbers}))
        importlib.invalidate_caches()
        for name in ("passes_of_mine", "helpers"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        linecache.checkcache(str(file))
        return importlib.import_module("passes_of_mine")

    return load


@pytest.mark.parametrize("changed", ["limit", "inner", "scale", "table", "wrapped"])
def test_a_changed_helper_changes_the_key(load: Callable[..., ModuleType], changed: str) -> None:
    """Helpers of helpers, constants, classes, tables of functions, decorated functions; and nothing that is not reached."""

    def key(**numbers: int) -> str:
        return cache_key({"post_grad_custom_post_pass": load(**numbers).Pass()})

    before = key()
    assert key() == before
    assert key(unused=7) == before
    assert key(**{changed: 7}) != before


def test_values_follow_the_helper(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    """A pass that asks a helper for a number: a file that was saved with another number is not used."""

    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + 100

    x = cached_models.batch(3)
    for inner, number in ((1, 2), (5, 6), (1, 2)):
        options = {"post_grad_custom_post_pass": load(inner=inner).rewrite}
        result = cache_compile(shift, cache_dir=tmp_path / "kept", options=options)(x)
        assert torch.equal(result.cpu(), x.cpu() + number)


def test_installed_packages_are_not_followed() -> None:
    """What torch and this library do is known by their versions."""

    def rewrite(gm: torch.fx.GraphModule, *_: object) -> None:
        torch.nn.functional.relu(gm)
        cache_key()

    lines = reached([rewrite, torch.nn.functional.relu, cache_key, torch.nn.Linear(2, 2)])
    assert [line.partition(" ")[0].rpartition(".")[2] for line in lines] == ["rewrite"]


def test_two_processes_agree(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    """Neither addresses nor the order of sets get into the lines."""
    load()
    code = "import sys; sys.path.insert(0, sys.argv[1]); import npu_emulator; npu_emulator.activate(quiet=True)\n"
    code += "from npugraph_ex.cache.dependencies import reached; import passes_of_mine; print(reached([passes_of_mine.Pass()]))"
    said = {
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1
    assert "helpers.inner" in said.pop()
