"""The modelled clock: roofline prices, streams side by side, events as arrows, replays, and the file for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import npu_emulator
from npu_emulator.clock.roofline import ASCEND_910B


def test_the_chip_has_the_published_peaks() -> None:
    """24 cores at 1.8 GHz with 16 x 16 x 16 multiply-adds give 353.9 TFLOPS; 32 bytes a cycle and core give 1.38 TB/s."""
    assert ASCEND_910B.half_flops == pytest.approx(353.9e12, rel=1e-3)
    assert ASCEND_910B.bandwidth == pytest.approx(1.382e12, rel=1e-3)


def test_memory_and_arithmetic_bind_in_turn() -> None:
    """A sum costs its bytes, a large product its operations, and float32 products four times those of float16."""
    x = torch.empty(4096, 4096, dtype=torch.float16)
    free = ASCEND_910B.launch_us
    added = ASCEND_910B.kernel_us("aten.add.Tensor", [x, x], [x]) - free
    assert added == pytest.approx(3 * 2 * 4096**2 / 1.3824e12 * 1e6)
    product = ASCEND_910B.kernel_us("aten.mm.default", [x, x], [x]) - free
    assert product == pytest.approx(2 * 4096**3 / 353.8944e12 * 1e6)
    single = ASCEND_910B.kernel_us("aten.mm.default", [x.float(), x.float()], [x.float()]) - free
    assert single == pytest.approx(4 * product)
    row = torch.empty(1, 4096, dtype=torch.float16).expand(4096, 4096)
    assert ASCEND_910B.kernel_us("aten.neg.default", [row], []) - free == pytest.approx(2 * 4096 / 1.3824e12 * 1e6)


def test_streams_run_side_by_side_until_an_event_orders_them() -> None:
    """Independent work overlaps in modelled time; work behind an event starts when the recorded work ends."""
    x = torch.zeros(1 << 20, device="npu")
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with npu_emulator.timeline() as clock:
        a = x + 1
        with torch.npu.stream(side):
            b = x * 2
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            c = b - 1
        torch.npu.synchronize()
        d = x.neg()
    add, mul, sub, neg = clock.spans
    assert add.start == mul.start == 0
    assert add.stream != mul.stream == sub.stream
    assert sub.start == pytest.approx(max(add.start + add.duration, mul.start + mul.duration))
    assert neg.start == pytest.approx(sub.start + sub.duration)
    assert clock.end == pytest.approx(neg.start + neg.duration)
    assert "test_timeline.py" in add.line
    del a, c, d


def test_an_event_makes_the_later_stream_wait() -> None:
    """A short kernel behind a long one on another stream starts at the long one's end."""
    long, short = torch.zeros(1 << 22, device="npu"), torch.zeros(4, device="npu")
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with npu_emulator.timeline() as clock:
        long.add_(1)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            short.add_(1)
    first, second = clock.spans
    assert second.start == pytest.approx(first.duration)
    assert first.duration > second.duration


def test_replays_and_the_file(tmp_path: Path) -> None:
    """Each replay runs its lanes after the other replay; the file holds spans, names and an arrow's two ends."""
    x = torch.zeros(1 << 16, device="npu")
    side = torch.npu.Stream()
    with npu_emulator.timeline() as clock:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                y = x + 1
            z = x * 2
            torch.npu.current_stream().wait_stream(side)
            w = y + z
        assert clock.spans == []
        graph.replay()
        graph.replay()
        torch.npu.synchronize()
    assert [span.name for span in clock.spans] == ["aten.add.Tensor", "aten.mul.Tensor", "aten.add.Tensor"] * 2
    first, second, third, again = clock.spans[:4]
    assert first.start == second.start
    assert third.start == pytest.approx(first.duration)
    assert again.start == pytest.approx(third.start + third.duration)
    rows = json.loads(clock.save(tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(row["ph"] == "X" for row in rows) == 6
    assert sum(row["ph"] == "s" for row in rows) == sum(row["ph"] == "f" for row in rows) > 0
    assert "modelled" in rows[0]["args"]["name"]
    del w
