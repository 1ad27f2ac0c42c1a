"""The log of what ran: its order, where each piece came from, and the file of a whole program."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from printed import blocks

import npu_emulator
from npugraph_ex.versions import captured_generators

Program = Callable[..., subprocess.CompletedProcess[str]]
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "emulator-records.md"


@pytest.mark.slow
@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
def test_the_documented_example_prints_what_the_page_says(program: Program, tmp_path: Path) -> None:
    """The page's block runs as it stands, and the file of the whole program ends with the same pieces of work."""
    code, shown = next(
        (block.code, then.code) for block, then in pairwise(blocks(PAGE)) if "test_kernel_log" in block.reason
    )
    file = tmp_path / "ran.jsonl"
    done = program(f"import npu_emulator, torch\n{code}", "--quiet", "--kernel-log", str(file))
    printed = re.sub(r"\S*/\w+\.py:(\d+)", lambda found: f"example.py:{int(found[1]) - 1}", done.stdout)
    assert printed == shown, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["name"] for row in rows] == ["aten.ones.default", *re.findall(r"\d: (\S+)", shown)]
    last = rows[-2]
    assert (last["graph"], last["replay"], last["read_bytes"], last["written_bytes"]) == (1, 2, 128, 16)
    assert last["reads"] == [{"dtype": "float32", "shape": [4, 8], "bytes": 128}]


def test_the_log_follows_the_order_of_running_not_of_launching() -> None:
    """Under `lazy` nothing is logged before something waits, and what is waited for first ran first."""
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()
    with npu_emulator.schedule("lazy"), npu_emulator.kernel_log() as log:
        with torch.npu.stream(side):
            a = x + 1
        b = x * 2
        assert len(log) == 0
        torch.npu.current_stream().synchronize()
        assert [ran.name for ran in log] == ["aten.mul.Tensor"]
        side.synchronize()
    assert [ran.name for ran in log] == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert log[0].launch > log[1].launch
    assert log[0].stream != log[1].stream
    del a, b


@pytest.mark.parametrize("schedule", ["fifo", "lazy", "random:3"])
def test_replays_are_numbered_and_keep_their_launch(schedule: str) -> None:
    """Lanes, replays and lines of a graph that was captured before the log, whichever way its replays run."""
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    main, side = torch.npu.Stream(), torch.npu.Stream()  # neighbours in torch_npu's pool, so never one stream
    with torch.npu.graph(graph, stream=main):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
        torch.npu.current_stream().wait_stream(side)
        z = y * 2
    graph.replay()
    torch.npu.synchronize()
    with npu_emulator.schedule(schedule), npu_emulator.kernel_log() as log:
        graph.replay()
        graph.replay()
        torch.npu.synchronize()
    assert [(ran.name, ran.lane, ran.replay) for ran in log] == [
        ("aten.add.Tensor", 1, 2),
        ("aten.mul.Tensor", 0, 2),
        ("aten.add.Tensor", 1, 3),
        ("aten.mul.Tensor", 0, 3),
    ]
    assert log[0].launch == log[2].launch != log[1].launch
    assert len({ran.graph for ran in log}) == 1
    assert {ran.line.rpartition("/")[2].partition(":")[0] for ran in log} == {"test_kernel_log.py"}
    del z


def test_null_kernels_are_logged_like_others() -> None:
    """What would have run is told in full; the values are not computed."""
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(1)
    with npu_emulator.kernel_log() as log, npu_emulator.null_kernels():
        graph.replay()
        y = x * 2
        torch.npu.synchronize()
    assert [(ran.name, ran.read_bytes, ran.written_bytes) for ran in log] == [
        ("aten.add_.Tensor", 16, 16),
        ("aten.mul.Tensor", 16, 16),
    ]
    assert x.tolist() == [1] * 4
    del y


def test_a_failing_kernel_is_the_last_of_its_replay() -> None:
    """It ran, so it is there; what stands behind it in the graph did not."""
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    index = torch.zeros(1, dtype=torch.int64, device="npu")
    with torch.npu.graph(graph):
        y = x.index_select(0, index) + 1
    index.fill_(9)
    with npu_emulator.kernel_log("aten.*") as log:
        graph.replay()
        with pytest.raises(RuntimeError, match="507015"):
            torch.npu.synchronize()
    assert [ran.name for ran in log] == ["aten.index_select.default"]
    del y


def test_a_log_chooses_and_saves(tmp_path: Path) -> None:
    """By name while it is open, by name, stream and graph afterwards; a tensor's bytes are those that it stands on."""
    x, side = torch.ones(4, 1, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()
    with npu_emulator.kernel_log() as log, npu_emulator.kernel_log("aten.a*") as few:
        y = x.expand(4, 8) + 1
        with torch.npu.stream(side):
            z = x * 2
        torch.npu.synchronize()
    assert [ran.name for ran in few] == ["aten.add.Tensor"]
    assert (log[0].reads[0].shape, log[0].read_bytes, log[0].written_bytes) == ((4, 8), 16, 128)
    assert log.of(stream=log[1].stream) == log.of("*mul*") == log[1:] != []
    assert log.of(graph=1) == []
    saved = [json.loads(line) for line in log.save(tmp_path / "log").read_text().splitlines()]
    assert [(row["number"], row["name"], row["written_bytes"]) for row in saved] == [
        (1, "aten.add.Tensor", 128),
        (2, "aten.mul.Tensor", 16),
    ]
    del y, z


def test_logs_go_with_checks_and_cost_nothing_when_closed() -> None:
    """A timeline and a log see the same work; afterwards the launcher reports to nobody and eager work runs at once."""
    launcher = npu_emulator.current().launcher
    x = torch.ones(4, device="npu")
    with npu_emulator.timeline() as clock, npu_emulator.kernel_log() as log:
        y = x + 1
        torch.npu.synchronize()
    assert [ran.name for ran in log] == [span.name for span in clock.spans] == ["aten.add.Tensor"]
    assert launcher.recorder is None
    with npu_emulator.kernel_log() as later:
        pass
    y = x + 1
    assert list(later) == []
    with npu_emulator.kernel_log() as last:
        y = x + 1
        torch.npu.synchronize()
    assert last[0].launch == log[0].launch + 1  # the one between was no launch to keep: it ran at once
    del y


def test_copies_and_fills_of_the_runtime_are_logged() -> None:
    """What is asked of the runtime itself has a name and a size, and no launch."""
    library = ctypes.CDLL(None)
    x, y = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    x_at, y_at, stream = (ctypes.c_void_p(value) for value in (x.data_ptr(), y.data_ptr(), 0))
    size = ctypes.c_size_t(16)
    with npu_emulator.kernel_log() as log:
        assert library.aclrtMemcpyAsync(y_at, size, x_at, size, 3, stream) == 0  # device to device
        assert library.aclrtMemsetAsync(x_at, size, 0, size, stream) == 0
        torch.npu.synchronize()
    assert [(ran.name, ran.read_bytes, ran.written_bytes, ran.launch, ran.line) for ran in log] == [
        ("memcpy", 16, 16, 0, ""),
        ("memset", 0, 16, 0, ""),
    ]
    assert (x.tolist(), y.tolist()) == ([0] * 4, [1] * 4)
