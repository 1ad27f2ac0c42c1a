"""What rules and passes call stands in the key too: a saved compilation is not used after a helper has changed."""

from __future__ import annotations

import collections
import fractions
import functools
import importlib
import linecache
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType

import cached_models
import numpy as np
import pytest
import torch

from npugraph_ex import cache_key, register_replacement
from npugraph_ex.cache import source_files
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


@pytest.mark.parametrize("changed", ["limit", "inner", "scale", "table", "wrapped", "unused"])
def test_a_changed_helper_changes_the_key(load: Callable[..., ModuleType], changed: str) -> None:
    """Helpers of helpers, constants, classes, tables of functions, decorated functions; and whatever else their files hold."""

    def key(**numbers: int) -> str:
        return cache_key({"post_grad_custom_post_pass": load(**numbers).Pass()})

    before = key()
    assert key() == before
    assert key(**{changed: 7}) != before


class Part:
    """Of the user's."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


def _remembering(number: int) -> Callable[[], int]:
    return functools.lru_cache(lambda: number)


VALUES: dict[str, Callable[[int], object]] = {
    "a number": lambda n: n,
    "dtypes": lambda n: (torch.float32, torch.float16)[n % 2 :],
    "a table by operator": lambda n: {torch.ops.aten.mul.Tensor: n},
    "a table of operators": lambda n: {"x": torch.ops.aten.mul.Tensor if n % 2 else torch.ops.aten.add.Tensor},
    "an array": lambda n: np.array([n]),
    "a number of numpy": np.float32,
    "a tensor": torch.tensor,
    "a remembering function": _remembering,
    "a queue": lambda n: collections.deque([n]),
    "a default dictionary": lambda n: collections.defaultdict(list, a=[n]),
    "a fraction": lambda n: fractions.Fraction(n, 7),
    "bytes that change": lambda n: bytearray([n]),
    "a range": range,
    "a regular expression": lambda n: re.compile(f"a{n}"),
    "an object that holds an array": lambda n: Part(np.array([n])),
    "an object of torch": lambda n: torch.nn.Linear(n, 1),
    "a set with a type": lambda n: {int, n},
}


@pytest.mark.parametrize(
    ("kind", "reader"),
    [*((kind, "a pass") for kind in VALUES), *product(("a number", "an array"), ("a condition", "a replacement"))],
)
def test_what_a_function_reads_is_part_of_the_key(kind: str, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A global of any kind that decides what the function does, and no file has changed."""

    def key(number: int) -> str:
        monkeypatch.setattr(sys.modules[__name__], "READ", VALUES[kind](number))
        if reader == "a pass":
            return cache_key({"post_grad_custom_post_pass": _pass_that_reads})
        inputs = [torch.empty(4, device="npu")]
        if reader == "a replacement":
            with register_replacement(_sine_times, _reading_sine, inputs):
                return cache_key()
        with register_replacement(_sine_times, _sine, inputs, extra_check=lambda _: _reads()):
            return cache_key()

    assert key(3) == key(3)
    assert key(3) != key(4)


READ: object = 3


def _reads() -> bool:
    return bool(READ)


def _pass_that_reads(gm: torch.fx.GraphModule, *_: object) -> None:
    gm.meta["read"] = READ


def _sine_times(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 7


def _sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def _reading_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * (2 if _reads() else 3)


@pytest.mark.slow
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
    functions = [
        line.partition(" ")[0].rpartition(".")[2] for line in lines if " = " not in line and " in " not in line
    ]
    assert functions == ["rewrite"]
    assert not any(line.startswith(("torch", "npugraph_ex")) for line in lines)


def test_an_installed_package_of_rules_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its helpers and their constants, where a pass comes from it; no other package's."""
    for name in ("package_of_rules", "another_package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "numbers.py").write_text("FACTOR = 2\n\ndef factor():\n    return FACTOR\n")
    passes = "from .numbers import factor\nfrom another_package.numbers import factor as other\n\n"
    passes += "def rewrite(gm, *_):\n    return factor() * other()\n"
    (tmp_path / "package_of_rules" / "passes.py").write_text(passes)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(source_files, "_installed", lambda: (str(tmp_path),))
    rewrite = importlib.import_module("package_of_rules.passes").rewrite
    keys = [cache_key({"post_grad_custom_post_pass": rewrite})]
    for name in ("package_of_rules", "another_package"):
        monkeypatch.setattr(sys.modules[f"{name}.numbers"], "FACTOR", 3)
        keys.append(cache_key({"post_grad_custom_post_pass": rewrite}))
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.slow
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
