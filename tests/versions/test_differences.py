"""What differs between releases: each record tells the truth about the installed torch, and the tested pairs about themselves."""

from __future__ import annotations

import logging
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import npugraph_ex_autoload
from npugraph_ex.errors import ScopeError
from npugraph_ex.frontend.native_streams import streams
from npugraph_ex.observe import environment, private_names
from npugraph_ex.versions import out_tag, pairs
from npugraph_ex.versions.difference import VersionDifference, differences, installed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CUDA = "cuda: Optional[str] = '13.0'\n"


@pytest.mark.parametrize("name", differences())
def test_the_record_is_true(name: str) -> None:
    """The installed torch has the private names of its own side and lacks the other side's; the test it names is there."""
    difference = differences()[name]
    assert (2, 10) < difference.since <= (2, 14), "no supported release is on the other side: the module can go"
    assert (ROOT / difference.test).exists()
    here, gone = (difference.old, difference.new) if difference.older else (difference.new, difference.old)
    assert {name for name in (*here, *gone) if not private_names._exists(name)} == set(gone)


def test_the_canary_expects_each_name_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of other releases is not missing; without its record it is."""
    gone = {name: ["a.py"] for difference in differences().values() for name in difference.absent}
    assert private_names.missing({**gone, "torch._guards.gone": ["b.py"]}) == {"torch._guards.gone": ["b.py"]}
    monkeypatch.setattr(private_names, "differences", dict)
    assert private_names.missing(gone).keys() == gone.keys()


def test_older_and_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release before the newer form has the old names and lacks the new ones; numbers are compared, not texts."""
    record = VersionDifference(what="", since=(2, 10), new=("torch._new",), old=("torch._old",), test="")
    answers = {}
    for release in ("2.9.1", "2.10.0+cpu", "2.13.0", "2.15.0.dev20261101"):
        monkeypatch.setattr(metadata, "version", lambda _, release=release: release)
        installed.cache_clear()
        answers[release] = (record.older, record.absent)
    installed.cache_clear()
    older, newer = (True, ("torch._new",)), (False, ("torch._old",))
    assert list(answers.values()) == [older, newer, newer, newer]


@pytest.mark.skipif(out_tag.DIFFERENCE.older, reason=out_tag.DIFFERENCE.what)
def test_schemas_tell_what_the_tag_tells() -> None:
    """For every operator of ATen and torch_npu with a keyword-only argument that it writes."""
    compared = 0
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace not in {"aten", "npu"} or not any(argument.is_out for argument in schema.arguments):
            continue
        packet = getattr(getattr(torch.ops, namespace), name)
        overload = getattr(packet, schema.overload_name or "default")
        assert out_tag.by_schema(schema) == (torch.Tag.out in overload.tags), schema
        compared += 1
    assert compared > 500


def test_the_declared_range_is_that_of_the_tested_pairs() -> None:
    """pyproject.toml allows the tested releases, all between them, and no others."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    minors = [int(version.split(".")[1]) for version in pairs.TESTED]
    assert minors == list(range(minors[0], minors[-1] + 1))
    for package, first in (("torch", f"2.{minors[0]}"), ("torch_npu", pairs.TESTED["2.10.0"])):
        assert f"{package}>={first},<2.{minors[-1] + 1}" in declared


@pytest.mark.parametrize(
    ("torch_version", "npu_version", "said"),
    [
        ("2.10.0+cpu", "2.10.0.post4", ""),
        ("2.10.1", "2.10.0.post7", ""),
        ("2.14.0+cu130", "2.14.0", ""),
        ("2.9.1", "2.9.0.post9", "torch 2.9.1 with torch_npu 2.9.0.post9"),
        ("2.13.0", "2.12.0.post3", "torch 2.13.0 with torch_npu 2.12.0.post3"),
        ("2.1.0", "2.1.0", "torch 2.1.0"),
        ("2.15.0.dev20261101", "2.15.0", "torch 2.15.0.dev20261101"),
    ],
)
def test_a_pair_that_was_not_tested_is_named(torch_version: str, npu_version: str, said: str) -> None:
    """Minor releases decide: a later patch is served, another minor release or a mixed pair is not known."""
    text = pairs.untested(torch_version, npu_version)
    assert text.startswith(said)
    assert bool(text) == bool(said)
    assert not text or "2.10.0/2.10.0.post4" in text


def test_an_untested_pair_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The hook that takes the name says it in one line of the log, which no strict filter of warnings turns into an error."""
    monkeypatch.setattr(npugraph_ex_autoload, "failures", {})
    monkeypatch.setattr(pairs, "untested_here", lambda: "torch 9 with torch_npu 9 is installed")
    with caplog.at_level(logging.WARNING, logger="npugraph_ex"):
        npugraph_ex_autoload._say_if_untested()
        npugraph_ex_autoload._say_if_untested()
    assert [record.getMessage() for record in caplog.records] == [
        "torch 9 with torch_npu 9 is installed; `npugraph-ex env` says more"
    ]


class _Torch:
    """An installed torch, of which only files are read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def locate_file(self, path: str) -> Path:
        return self._folder / path


@pytest.mark.parametrize(
    ("version", "text", "fatal"),
    [
        ("2.14.0", CUDA, True),
        ("2.12.0", CUDA, True),
        ("2.11.0", CUDA, False),
        ("2.14.0", "cuda: Optional[str] = None\n", False),
    ],
)
def test_a_build_that_ends_the_process_is_recognised(
    version: str, text: str, fatal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From torch's files, before anything is imported; no interpreter is started only to see it end."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("from typing import Optional\n__version__ = '1'\n" + text)
    versions = {"torch": version, "torch_npu": pairs.TESTED[version]}
    monkeypatch.setattr(metadata, "distribution", lambda _: _Torch(tmp_path))
    monkeypatch.setattr(environment, "_version", lambda name: versions.get(name, "1.0"))
    started: list[Any] = []
    answer = {"device": "910B2", "import_name": None, "backend_string": None, "error": None}
    monkeypatch.setattr(environment, "_ask", lambda **how: started.append(how) or answer)
    found = environment.inspect()
    assert bool(started) != fatal
    assert found.works != fatal
    wrong = [problem for problem in found.problems if problem.fatal]
    assert len(wrong) == fatal
    assert all("CUDA 13.0" in problem.what and "CPU build" in problem.remedy for problem in wrong)


def test_the_readmes_name_the_tested_releases() -> None:
    """Both languages, by their first and last pair."""
    first, last = (re.match(r"\d+\.\d+", list(pairs.TESTED)[at])[0] for at in (0, -1))  # type: ignore[index]
    for page in ("README.md", "README.zh.md"):
        line = next(line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "Apache-2.0" in line)
        assert first in line
        assert last in line


def test_a_method_that_dynamo_does_not_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under older releases of torch, in one sentence that names the method; AOT would drop the call, and the streams would race."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    current = graph.call_function(torch.npu.current_stream)
    graph.call_method("wait_stream", (current, current))
    graph.output((x,))
    monkeypatch.setattr("npugraph_ex.versions.difference.installed", lambda: (2, 11))
    monkeypatch.setattr(torch.npu, "fake_record_stream", object(), raising=False)
    with pytest.raises(ScopeError, match=r"uses wait_stream, .*`event.record\(stream\)`.* torch 2.12 or later"):
        streams.lower(torch.fx.GraphModule({}, graph))
