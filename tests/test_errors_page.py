"""Each error, warning, device code and finding names its section on the pages, and the section is there."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npugraph_ex import cli, errors
from npugraph_ex.aclgraph.capture_pool import CaptureNotBegunError
from npugraph_ex.commands import public_names
from npugraph_ex.commands.remedies import sections
from npugraph_ex.report.findings import MEANING, Code
from npugraph_ex.testing import ReplacementRefutedError, RulesNotFoundError

Command = Callable[..., subprocess.CompletedProcess[str]]
_ROOT = Path(__file__).parents[1]
_FOUND = sections()
_NO_USER_SEES = {"AddressedError", "AddressedWarning", "CrashedError", "NotRecordableError", "Probed", "Unsaveable"}
"""Two bases, and what this library raises to itself and catches, as it does all private classes."""
_CLASSES = [
    getattr(importlib.import_module(".".join(path.relative_to(_ROOT).with_suffix("").parts)), name)
    for package in ("npugraph_ex", "npu_emulator")
    for path in sorted((_ROOT / package).rglob("*.py"))
    for name in re.findall(
        r"^class ([A-Z]\w*)\(.*(?:Error|Exception|Warning)\b.*\):", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    if name not in _NO_USER_SEES
]


def _shown(kind: type[Exception]) -> str:
    """What Python prints of an error or a warning of this class."""
    needed = [
        one
        for one in inspect.signature(kind.__init__).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    error = kind("what happened", *[None] * (len(needed) - 2))  # without `self` and the message
    if sys.version_info >= (3, 11):
        error.add_note("a line more")
    if isinstance(error, Warning):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warnings.warn("what happened", kind, stacklevel=1)
        return str(given[0].message)
    notes = [] if sys.version_info >= (3, 11) else [error.address]  # type: ignore[attr-defined]
    return "\n".join(["".join(traceback.format_exception_only(error)).rstrip(), *notes])


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
def test_the_last_line_of_every_error_and_warning_is_its_address(kind: type[Exception]) -> None:
    """A class that is not on the page names the nearest one below it that is."""
    lines = _shown(kind).splitlines()
    assert "what happened" in lines[0]
    assert lines[-1].startswith("help: npugraph-ex help ")
    named = lines[-1].rpartition(" ")[2]
    assert named in _FOUND
    assert named in [one.__name__ for one in kind.__mro__]
    assert (named == kind.__name__) == (kind.__name__ in _FOUND)


def test_every_class_has_a_section_with_cause_and_remedy_and_no_section_is_left_over() -> None:
    """The page follows the public classes, and no section of a class that is gone stays."""
    names = {kind.__name__ for kind in _CLASSES}
    internal = {"CaptureNotBegunError", "ConditionFailedError", "LostWriteError", "UndeclaredEffectError"}
    assert len(names) > 40
    theirs = {"AcceleratorError", "OutOfMemoryError"}.intersection(dir(torch)) | set(dir(torch._dynamo.exc))
    left_over = {name for name in _FOUND if not name.isdigit() and "-" not in name} - names
    assert left_over - theirs == names - set(_FOUND) - internal == set()
    assert [name for name in _FOUND if "Cause." not in _FOUND[name] or "Remedy." not in _FOUND[name]] == []


@pytest.mark.slow
def test_the_command_answers_for_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Classes, device codes and findings."""
    assert {code.value for code in Code} < set(_FOUND)
    for name in _FOUND:
        assert cli.main(["help", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name}\n\n")


def test_the_page_of_the_stream_check_has_the_sentences_of_the_code() -> None:
    """A row for each finding, with its level, its meaning and its remedy; the Chinese table has the same findings."""
    rows = [
        tuple(f"{text[0].lower()}{text[1:]}".removesuffix(".") for text in (f"`{code.value}`", *MEANING[code]))
        for code in Code
    ]
    name = "explanation/stream-check.md"
    page = (_ROOT / "docs" / name).read_text(encoding="utf-8")
    told = re.findall(r"^\| (`[\w-]+`) \| (\w+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert sorted(told) == sorted(rows)
    chinese = (_ROOT / "docs" / "zh" / name).read_text(encoding="utf-8")
    assert re.findall(r"^\| (`[\w-]+`) \| (\w+) \| .+ \| .+ \|$", chinese, re.MULTILINE) == [row[:2] for row in told]


def test_a_warning_that_nothing_is_captured_ends_with_the_address(caplog: pytest.LogCaptureFixture) -> None:
    """The remedy is that of the error which `require_capture` would raise."""

    @torch.compile(backend="npugraph_ex", fullgraph=True)
    def step(x: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=limits[1].item())

    assert step(torch.ones(4, device="npu"), torch.zeros(2, device="npu")).tolist() == [0, 0, 0, 0]
    (said,) = [one for one in caplog.messages if one.startswith("This graph cannot be captured")]
    assert said.endswith("\nhelp: npugraph-ex help CaptureError")


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
    assert "wrong for others" in command("help", "guard-too-weak").stdout
    wrong = command("help", "scoperror")
    assert wrong.returncode == 2
    assert "ScopeError" in wrong.stderr


@pytest.mark.parametrize(
    "name", ["IndexError", "typeerror", "builtins.KeyError", "torch._dynamo.exc.BackendCompilerFailed"]
)
def test_an_error_of_python_out_of_the_compiler_has_a_remedy(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a fault of the library: what to do at once, and that it be reported."""
    assert cli.main(["help", name]) == 0
    said = capsys.readouterr().out
    assert said.startswith("BackendCompilerFailed\n\n")
    assert all(part in said for part in ("fault of this library", "report it", "dynamic=False", "suppress_errors"))


def test_every_public_name_is_described_by_its_docstring() -> None:
    """Read from the sources, without an import: the first paragraph."""
    silent = []
    for module in public_names.MODULES:
        for name in public_names.offered(module):
            value, said = getattr(importlib.import_module(module), name), public_names.described(module, name)
            silent += [name] * (not said)
            if inspect.isclass(value) or (inspect.isfunction(value) and not hasattr(value, "__wrapped__")):
                assert " ".join(str(inspect.getdoc(value)).partition("\n\n")[0].split()) == said
    assert silent == ["__version__"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("ShapeRange", ["npugraph_ex.ShapeRange"]),
        ("shaperange", ["npugraph_ex.ShapeRange"]),
        ("ulp", ["npugraph_ex.operators.ulp", "npugraph_ex.testing.ulp"]),
        ("npugraph_ex.testing.ulp", ["npugraph_ex.testing.ulp"]),
        ("explain", ["npugraph_ex.explain"]),  # behind what the command takes
        ("NearMiss", ["npugraph_ex.report.passes.NearMiss"]),
        ("ScopeError", []),  # has cause and remedy
        ("operators", []),  # the command, not OPERATORS
        ("use_as_torchair", ["npugraph_ex.compat.use_as_torchair"]),
        ("session.warm_up", ["npugraph_ex.inference.decode_session.DecodeSession.warm_up"]),
        ("CompilerConfig.to_options", ["npugraph_ex.CompilerConfig.to_options"]),
        ("race", ["npu_emulator.races.report.Race"]),
    ],
)
def test_the_command_says_what_a_public_name_is(
    asked: str, found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the places of the documentation that describe it."""
    assert cli.main(["help", asked]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\w+\.[\w.]+): ", out, re.MULTILINE) == found
    assert all(f".html#{name}" in out for name in found)


def test_a_class_with_an_error_has_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks for a race wants to be rid of it."""
    assert cli.main(["help", "race"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"RaceError\n\n{_FOUND['RaceError']}")


def test_a_name_that_is_almost_public_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest names stand in the refusal."""
    assert cli.main(["help", "LikeExampels"]) == 2
    assert re.findall(r"perhaps (\w+)", capsys.readouterr().err) == ["LikeExamples"]
