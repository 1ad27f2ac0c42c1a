"""What a person is told of saved compilations that no longer hold: one line, however many there are."""

from __future__ import annotations

import importlib
import linecache
import logging
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import cached_models
import pytest
import torch
from torch._dynamo.exc import Unsupported

from npugraph_ex.cache.store import SUFFIX
from npugraph_ex.cli import main
from npugraph_ex.inference import cache_compile

MODEL = """
from helper_of_a_model import shifted


def decode(x):
    return shifted(x) * 2
"""
HELPER = "def shifted(x):\n    return x + {}\n"


@pytest.fixture
def decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], ModuleType]:
    """Import the function whose helper, in a file of its own, adds a number."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "a_model.py").write_text(MODEL)

    def load(number: int) -> ModuleType:
        file = tmp_path / "helper_of_a_model.py"
        file.write_text(HELPER.format(number))
        importlib.invalidate_caches()
        for name in ("a_model", "helper_of_a_model"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        linecache.checkcache(str(file))
        return importlib.import_module("a_model")

    return load


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a person sees."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_edited_helper_is_told_once(
    decode: Callable[[int], ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Three files are stale: one warning counts them, and the command that it names deletes them and not what took their place."""
    folder = tmp_path / "what was kept"
    before = cache_compile(decode(1).decode, cache_dir=folder, dynamic=False)
    for rows in (2, 3, 4):
        before(cached_models.batch(rows))
    assert len(list(folder.glob(f"*{SUFFIX}"))) == 3
    assert _told(caplog) == []

    x = cached_models.batch(3)
    assert torch.equal(cache_compile(decode(5).decode, cache_dir=folder, dynamic=False)(x).cpu(), (x.cpu() + 5) * 2)
    (said,) = _told(caplog)
    assert said.startswith("3 saved compilations of decode-")
    assert f"in {folder} " in said
    assert "helper_of_a_model:" in said
    assert said.count("has changed") == 1
    assert len(list(folder.glob(f"*{SUFFIX}"))) == 4

    named = re.search("`npugraph-ex (.*)`", said)
    assert named
    assert main(shlex.split(named[1])) == 0
    assert capsys.readouterr().out.startswith("3 saved compilations deleted")
    kept = set(folder.glob(f"*{SUFFIX}"))
    assert torch.equal(cache_compile(decode(5).decode, cache_dir=folder, dynamic=False)(x).cpu(), (x.cpu() + 5) * 2)
    assert len(kept) == 1
    assert set(folder.glob(f"*{SUFFIX}")) == kept


@pytest.mark.slow
def test_a_changed_global_is_named_as_the_program_has_it(
    decode: Callable[[int], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By its module, and not by the name that Dynamo imports the module under."""
    monkeypatch.setitem(globals(), "HELPER", "CFG = {{'a': {}}}\n\n\ndef shifted(x):\n    return x + CFG['a']\n")
    x, module = cached_models.batch(3), decode(1)
    for changed, words in (
        (5, "helper_of_a_model.CFG['a'] has changed"),
        (None, "helper_of_a_model.CFG['a'] is not there: 'a'"),
    ):
        caplog.clear()
        cache_compile(module.decode, cache_dir=tmp_path / str(changed))(x)
        configuration = sys.modules["helper_of_a_model"].CFG
        configuration.update(a=changed) if changed else configuration.clear()
        with nullcontext() if changed else pytest.raises(Unsupported, match="KeyError"):
            cache_compile(module.decode, cache_dir=tmp_path / str(changed))(x)
        (said,) = _told(caplog)
        assert words in said
        assert "__import_" not in said


def test_one_stale_file_is_named(
    decode: Callable[[int], ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its path, and the same way to be rid of it."""
    x = cached_models.batch(3)
    cache_compile(decode(1).decode, cache_dir=tmp_path)(x)
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    cache_compile(decode(5).decode, cache_dir=tmp_path)(x)
    (said,) = _told(caplog)
    assert said.startswith(f"The saved compilation {path} is not used and made anew: the source of helper_of_a_model:")
    assert f"`npugraph-ex cache --dir {tmp_path} clear decode-" in said


def test_files_that_are_stale_for_two_reasons_are_counted_by_reason(
    decode: Callable[[int], ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """How many have which."""
    before = cache_compile(decode(1).decode, cache_dir=tmp_path, dynamic=False)
    for rows in (2, 3, 4):
        before(cached_models.batch(rows))
    cut = min(tmp_path.glob(f"*{SUFFIX}"))
    cut.write_bytes(cut.read_bytes()[:-9])
    caplog.clear()
    cache_compile(decode(5).decode, cache_dir=tmp_path, dynamic=False)(cached_models.batch(2))
    said = " ".join(_told(caplog))
    assert "1 because it is cut off" in said
    assert "2 because the source of helper_of_a_model" in said


@pytest.mark.slow
def test_what_another_file_replaces_is_not_told(
    decode: Callable[[int], ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A value that changes to and fro has a file for each; the one that does not hold is nobody's concern."""
    x = cached_models.batch(3)
    for number in (1, 5, 1, 5, 1):
        files = set(tmp_path.glob(f"*{SUFFIX}"))
        caplog.clear()
        found = cache_compile(decode(number).decode, cache_dir=tmp_path)(x)
        assert torch.equal(found.cpu(), (x.cpu() + number) * 2)
        told, made = _told(caplog), set(tmp_path.glob(f"*{SUFFIX}")) - files
        assert bool(told) == bool(made and files)


def test_files_that_others_can_write_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason stands once, without the paths, in the warning and in each row of the table."""
    folder = tmp_path / "kept"
    before = cache_compile(_twice, cache_dir=folder, dynamic=False)
    for rows in (2, 3):
        before(cached_models.batch(rows))
    for path in folder.glob(f"*{SUFFIX}"):
        path.chmod(0o666)
    x = cached_models.batch(3)
    assert torch.equal(cache_compile(_twice, cache_dir=folder, dynamic=False)(x).cpu(), x.cpu() * 2)
    (said,) = _told(caplog)
    assert said.count("can be written by others") == 1
    assert "not read: each can be written" in said
    assert main(["cache", "--dir", str(folder), "ls"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if "no: not read: it can be written" in line]
    assert rows
    assert not any(str(folder) in row for row in rows)
