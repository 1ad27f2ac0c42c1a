"""Compilations that are kept on disk: graphs with streams of their own come back on them, those with the program's do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_programs import check, vector

import npu_emulator
from npugraph_ex import inference
from npugraph_ex.report.graphs import graphs_so_far
from npugraph_ex_conformance.models.stream_forms import Tagged, inserting_pass, native_events, plain

FOLDER = str(Path(__file__).parent)

FORMS: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any]]] = {
    "tagged": (lambda: Tagged("kept ").forward, {}),
    "custom pass": (lambda: plain, {"post_grad_custom_pre_pass": inserting_pass("air")}),
    "native": (lambda: native_events, {}),
}

ONE_PROCESS = """
import sys
sys.path.insert(0, FOLDER)
import npu_emulator
npu_emulator.activate(quiet=True)
from test_kept_streams import calls
answer = calls(DIRECTORY)
"""


pytestmark = pytest.mark.usefixtures("fresh")


def calls(directory: str) -> dict[str, int]:
    """Call each form as a new process would, values compared under two schedules; how many graphs each compiled."""
    counts = {}
    for name, (form, options) in FORMS.items():
        torch.compiler.reset()
        before = graphs_so_far()
        fast = inference.cache_compile(form(), options=options, dynamic=True, cache_dir=directory)
        with torch.no_grad():
            check(fast, plain, (vector(1, 2, 3),), (vector(4, 5),), schedules=("lazy", "random:3"))
        assert npu_emulator.resources().graphs[-1].streams == 3, name
        counts[name] = graphs_so_far() - before
    return counts


def test_kept_graphs_keep_their_streams(tmp_path: Path, ask: Callable[..., Any]) -> None:
    """Written with scopes, or by a custom pass, a graph is compiled once for all processes; with native objects, in each.

    Neither process is this one, in which other libraries may have put functions into torch's classes: that makes a graph anew.
    """
    code = ONE_PROCESS.replace("FOLDER", repr(FOLDER)).replace("DIRECTORY", repr(str(tmp_path)))
    assert ask(code) == {"tagged": 1, "custom pass": 1, "native": 1}
    assert ask(code) == {"tagged": 0, "custom pass": 0, "native": 1}
