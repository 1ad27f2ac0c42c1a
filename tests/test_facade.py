"""The façade: public names load on first use, and a wrong one is named."""

from __future__ import annotations

import ast
import importlib
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest

import npugraph_ex
from npugraph_ex import testing
from npugraph_ex.config.compiler_config import CompilerConfig


def test_names_come_from_their_modules() -> None:
    """A public name is the object of the module that defines it."""
    assert npugraph_ex.CompilerConfig is CompilerConfig
    assert npugraph_ex.logger is logging.getLogger("npugraph_ex")


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known() -> None:
    """A misspelt attribute says what there is."""
    with pytest.raises(AttributeError, match=r"'CompileConfig'.*CompilerConfig"):
        _ = npugraph_ex.CompileConfig  # type: ignore[attr-defined]


def test_a_name_that_needs_hypothesis_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another module that is absent is its own message."""
    for absent, said in (
        ("hypothesis", r"testing\.anything draws programs .* not installed: pip install "),
        ("other", "^plain$"),
    ):
        missing = ModuleNotFoundError("plain", name=absent)
        monkeypatch.setattr("npugraph_ex.testing._names.load", Mock(side_effect=missing))
        with pytest.raises(ModuleNotFoundError, match=said):
            _ = testing.anything  # type: ignore[attr-defined]


def test_dir_lists_what_all_lists() -> None:
    """`dir()` shows public names before they are loaded."""
    assert set(npugraph_ex.__all__) <= set(dir(npugraph_ex))


@pytest.mark.parametrize("package", ["npugraph_ex", "npugraph_ex.testing", "npu_emulator"])
def test_a_typed_client_uses_every_public_name(package: str) -> None:
    """The programs that mypy and pyright read leave no public name out, and use none that is not there."""
    client = {"npugraph_ex": "library", "npugraph_ex.testing": "toolkit", "npu_emulator": "emulator"}[package]
    tree = ast.parse((Path(__file__).parents[1] / "typing_tests" / f"{client}.py").read_text())
    name = package.rpartition(".")[2]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    assert {node.attr for node in nodes if node.value.id == name} == set(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", ["npugraph_ex", "npugraph_ex.testing"])
def test_every_listed_name_loads(package: str) -> None:
    """Each name of the stub is there, and is what the module that the stub names calls so."""
    module = importlib.import_module(package)
    for name, home in module._names.home_of.items():
        there = importlib.import_module(home)
        expected = importlib.import_module(f"{home}.{name}") if there is module else getattr(there, name)
        assert getattr(module, name) is expected


def test_the_logger_decides_nothing_for_the_program() -> None:
    """At import the logger has no level and no handler, so that Python shows warnings where nobody configured logging."""
    assert npugraph_ex.logger.level == logging.NOTSET
    assert npugraph_ex.logger.handlers == []
    assert npugraph_ex.logger.propagate


def test_the_guides_logger_path() -> None:
    """`from npugraph_ex.core.utils import logger` gives the library's logger."""
    from npugraph_ex.core.utils import logger

    assert logger is npugraph_ex.logger
