"""Each error names its section on the page of errors, and the section is there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_emulator.errors
from npugraph_ex import errors, testing
from npugraph_ex.aclgraph.capture_pool import CaptureNotBegunError
from npugraph_ex.commands.remedies import sections
from npugraph_ex.testing import ReplacementRefutedError, RulesNotFoundError

Command = Callable[..., subprocess.CompletedProcess[str]]
_FOUND = sections()
_CLASSES = [
    kind
    for module in (errors, npu_emulator.errors, testing)
    for name in (dir(module) if module is not testing else testing.__all__)
    if inspect.isclass(kind := getattr(module, name)) and issubclass(kind, Exception)
]


def test_every_class_has_a_section_with_cause_and_remedy_and_no_section_is_left_over() -> None:
    """The page follows the classes, and no section of a class that is gone stays."""
    names = {kind.__name__ for kind in _CLASSES}
    assert len(names) > 30
    theirs = {"AcceleratorError", "OutOfMemoryError"}.intersection(dir(torch)) | set(dir(torch._dynamo.exc))
    left_over = {name for name in _FOUND if not name.isdigit()} - names
    assert left_over - theirs == names - set(_FOUND) == set()
    assert [name for name in _FOUND if "Cause." not in _FOUND[name] or "Remedy." not in _FOUND[name]] == []


def test_a_code_of_the_device_has_its_line() -> None:
    """The line of the table of codes, as text: cause and remedy."""
    told = _FOUND["107025"]
    assert told.startswith("STREAM_UNJOINED.\n\nCause. The end of a capture")
    assert "Remedy. Let the capturing stream wait" in told


def test_the_search_of_the_site_finds_a_code() -> None:
    """Sphinx's search drops numbers from texts; it finds them among the entries of the index."""
    docs = Path(__file__).parents[1] / "docs"
    sys.path.insert(0, str(docs))
    try:
        import generated
    finally:
        sys.path.remove(str(docs))
    source = [(docs / "reference" / "emulator-codes.md").read_text(encoding="utf-8")]
    generated.index_codes(None, "reference/emulator-codes", source)
    assert re.findall(r"^   single: (\d+)$", source[0], re.MULTILINE) == [name for name in _FOUND if name.isdigit()]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (errors.CaptureError, "CaptureError"),
        (CaptureNotBegunError, "CaptureError"),
        (ReplacementRefutedError, "ReplacementRefutedError"),
        (RulesNotFoundError, "RulesNotFoundError"),
    ],
)
def test_an_error_names_its_section(kind: type[errors.NpuGraphExError], named: str) -> None:
    """An internal class names the public one below it; the message itself stays what it was."""
    error = kind("what happened")
    assert str(error) == "what happened"
    assert error.address == f"help: npugraph-ex help {named}"
    assert getattr(error, "__notes__", [error.address]) == [error.address]


def test_what_dynamo_shows_ends_with_the_address() -> None:
    """Dynamo quotes the message of its backend's error and drops the notes."""

    @torch.compile(backend="npugraph_ex", fullgraph=True, options={"require_capture": True})
    def step(x: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=limits[1].item())

    with pytest.raises(Exception, match="CaptureError") as found:
        step(torch.ones(4, device="npu"), torch.zeros(2, device="npu"))
    assert str(found.value).count("help: npugraph-ex help CaptureError") == 1


@pytest.mark.parametrize("options", [{"lift": "lfit"}, {"liftt": "judged"}, {"fusion_rules": {"nope": True}}])
def test_a_wrong_option_ends_with_the_address(options: dict[str, Any]) -> None:
    """Whether the name or the value is wrong, or what the value names."""
    with pytest.raises(Exception, match="npugraph_ex") as found:
        torch.compile(torch.relu, backend="npugraph_ex", options=options)(torch.ones(4, device="npu"))
    assert (
        len(
            re.findall(
                r"^help: npugraph-ex help (?:OptionValueError|UnknownOptionError)$", str(found.value), re.MULTILINE
            )
        )
        == 1
    )


def test_the_command_prints_a_section(command: Command) -> None:
    """A class with its module in front, too; a wrong name is wrong use, and the nearest name is shown."""
    done = command("help", "npugraph_ex.errors.ScopeError")
    assert done.returncode == 0, done.stderr
    assert "Cause. A scope or a stream is used wrongly" in done.stdout
    assert "](" not in done.stdout
    same = command("help", "scopeerror")
    assert (same.returncode, same.stdout) == (0, done.stdout)
    assert "graph breaks" in command("help", "torch._dynamo.exc.Unsupported").stdout
    wrong = command("help", "scoperror")
    assert wrong.returncode == 2
    assert "ScopeError" in wrong.stderr
