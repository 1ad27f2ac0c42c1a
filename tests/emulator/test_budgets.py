"""What a device has a limited number of: the codes when it runs out, and what graphs cost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

import json_page
import pytest
import torch

import npu_emulator
from npu_emulator.chips import with_figures
from npu_emulator.settings import Settings

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_many_captures_exhaust_the_streams(program: Program) -> None:
    """Each graph holds a stream for each of its lanes; the error is 207008 and says where the streams went."""
    text = """
import torch, npu_emulator
x = torch.ones(4, device="npu")
side = torch.npu.Stream()
graphs = []
def capture():
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
        torch.npu.current_stream().wait_stream(side)
        y = y * 2
    graphs.append(graph)
capture()
resources = npu_emulator.resources()
print(resources.graphs[0].streams, resources.graphs[0].kernels)
room = resources.room_for(resources.graphs[0])
try:
    for _ in range(200):
        capture()
except RuntimeError as error:
    print("207008" in str(error), "captured graphs" in str(error))
print(len(graphs) == room + 1 == npu_emulator.resources().takes(resources.graphs[0]))
graphs.clear()
"""
    done = program(text, "--quiet", "--costs", NPU_EMULATOR_STREAMS="150")
    assert done.stdout.splitlines() == ["2 2", "True True", "True"], done.stdout + done.stderr
    device, header, row = done.stderr.splitlines()[-3:]
    assert "Ascend910B2 (emulated): 150 streams, 65,536 events, 64 GiB" in device
    assert header.split("  ")[0].strip() == "graphs"
    graphs, streams, events, kernels, others, mebibytes, fit = row.split()
    assert (streams, events, kernels, others, mebibytes) == ("2", "2", "2", "4", "4.0")
    assert int(graphs) == int(fit) > 10  # all of them ran into 207008, none of them fits less
    child = 'import atexit, os\natexit.register(print, "at the end")\nos.system("echo child")\n'
    done = program(text + child, "--quiet", "--costs", "--json", NPU_EMULATOR_STREAMS="150")
    assert done.stderr.splitlines() == ["2 2", "True True", "True", "child", "at the end"]
    found = json.loads(done.stdout)
    assert (found["device"], found["streams"], found["events"], found["memory_gb"]) == ("Ascend910B2", 150, 65536, 64)
    alike = {
        "graphs": int(graphs),
        "streams": 2,
        "events": 2,
        "kernels": 2,
        "other_tasks": 4,
        "pool_bytes": 2**22,
        "fit": int(fit),
    }
    assert found["captured"] == [alike]
    page = dict(json_page.rows(json_page.PAGE.read_text(encoding="utf-8")))
    told = dict(json_page.keys(page["`python -m npu_emulator --costs script.py`"]))
    assert {key: json_page.kind_of(value) for key, value in (found | alike).items()} == told
    assert program(text, "--json").stderr.splitlines()[-1].endswith("--json is the form of --costs; add --costs")


@pytest.mark.slow
def test_events_run_out(program: Program) -> None:
    """Keeping too many recorded events is refused with the budget's name."""
    text = """
import pytest
import torch
kept = []
try:
    for _ in range(300):
        event = torch.npu.Event()
        event.record()
        kept.append(event)
except RuntimeError as error:
    print("207007" in str(error), "NPU_EMULATOR_EVENTS" in str(error), len(kept) > 50)
"""
    done = program(text, "--quiet", NPU_EMULATOR_EVENTS="100")
    assert done.stdout == "True True True\n", done.stdout + done.stderr


def test_memory_runs_out(program: Program) -> None:
    """A tensor larger than the device is torch's own out-of-memory error, and the device, as it was asked for, goes on."""
    text = """
import pytest
import torch
try:
    torch.empty(3 << 30, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    print("GiB" in str(error))
print((torch.ones(4, device="npu") + 1).sum().item())
found = torch.npu.get_device_properties(0)
print(found.cube_core_num, found.vector_core_num, found.total_memory >> 30, found.L2_cache_size >> 20)
"""
    done = program(text, "--quiet", "--cube-cores", "20", "--vector-cores", "40", "--memory-gb", "2")
    assert done.stdout == "True\n8.0\n20 40 2 192\n", done.stdout + done.stderr


def test_cores_are_a_budget_too() -> None:
    """A device has the cores that it was given; limits of the device and of a stream lie below, and beyond is 107000."""
    runtime, stream = npu_emulator.current().runtime, torch.npu.Stream()
    assert torch.npu.get_device_limit(0) == {"cube_core_num": 24, "vector_core_num": 48}
    runtime.set_cores(cube=20, vector=40)
    try:
        assert torch.npu.get_device_limit(0) == {"cube_core_num": 20, "vector_core_num": 40}
        torch.npu.set_stream_limit(stream, 8, 16)
        assert torch.npu.get_stream_limit(stream) == {"cube_core_num": 8, "vector_core_num": 16}
        assert torch.npu.get_stream_limit(torch.npu.current_stream()) == {"cube_core_num": 20, "vector_core_num": 40}
        torch.npu.reset_stream_limit(stream)
        assert torch.npu.get_stream_limit(stream) == {"cube_core_num": 20, "vector_core_num": 40}
        with pytest.raises(RuntimeError, match=r"(?s)107000.*must lie in 1\.\.20"):
            torch.npu.set_stream_limit(stream, 24, 16)
    finally:
        torch.npu.reset_stream_limit(stream)
        runtime.set_cores(cube=24, vector=48)


@pytest.mark.slow
def test_a_named_chip_sets_what_is_public_and_explicit_settings_win(program: Program) -> None:
    """Cores, memory, L2, budgets and the clock are the named chip's; a variable or an option that says otherwise wins.

    This chip saturates: a result out of range is the largest number and sets the status, which a scaled gradient reads and clears.
    """
    text = """
import torch, npu_emulator
from torch.npu.utils import clear_npu_overflow_flag, get_npu_overflow_flag
found = torch.npu.get_device_properties(0)
held = npu_emulator.resources()
x = torch.ones(1 << 20, device="npu", dtype=torch.float16)
with npu_emulator.timeline() as clock:
    y = x.neg()
print(found.cube_core_num, found.vector_core_num, found.total_memory >> 30, found.L2_cache_size >> 20, held.streams, held.events)
print(torch.npu.get_device_limit(0)["cube_core_num"], round(clock.end - 2, 3), clock.model.name)
large, grad, found = torch.full((1,), -4e4, device="npu").half(), torch.full((1,), 4.0, device="npu"), torch.zeros(1, device="npu")
masked = large.masked_fill(large < 0, -torch.inf)
print(masked.item(), (masked + large).item(), get_npu_overflow_flag(), (large + large).item(), get_npu_overflow_flag(), end=" ")
clear_npu_overflow_flag()
print(get_npu_overflow_flag(), torch.full((1,), 1e6, device="npu").half().item())
for _ in range(2):
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.full((1,), 0.5, device="npu"))
    print(grad.item(), found.item(), get_npu_overflow_flag())
"""
    done = program(text, "--quiet", "--soc", "Ascend310P3", "--cube-cores", "5", NPU_EMULATOR_EVENTS="77")
    assert done.stdout.splitlines() == [
        "5 7 22 16 1024 77",
        "5 20.247 Ascend310P3, 8 cube cores",
        "-inf -inf False -65504.0 True False 65504.0",
        "4.0 1.0 False",
        "2.0 1.0 False",
    ], done.stderr


def test_settings_follow_the_chip_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's chip counts as the argument's does; what is set itself stands; a chip without figures changes nothing."""
    for name in [name for name in os.environ if name.startswith("NPU_EMULATOR")]:
        monkeypatch.delenv(name)
    default = Settings.from_environment()
    assert default == Settings()
    assert (default.cube_cores, default.memory_gb, default.streams) == (24, 64, 2048)
    assert Settings.from_environment(soc="Ascend910A") == Settings(soc="Ascend910A")
    monkeypatch.setenv("NPU_EMULATOR_SOC", "Ascend910B4")
    small = Settings.from_environment(streams=10)
    assert (small.cube_cores, small.vector_cores, small.memory_gb, small.streams) == (20, 40, 32, 10)
    monkeypatch.setenv("NPU_EMULATOR_MEMORY_GB", "64")
    assert Settings.from_environment().memory_gb == 64


def test_a_chip_without_public_figures_has_no_clock() -> None:
    """The error names the chip and those that have figures."""
    with pytest.raises(
        npu_emulator.EmulatorError, match=r"clock of Ascend910A .* choose one of Ascend910B1, .*Ascend310P3"
    ):
        with_figures("Ascend910A")


def test_a_graph_s_cost_is_counted() -> None:
    """Tasks, events and the bytes that the capture took for its pool; a graph in another's pool takes none."""
    x = torch.ones(1 << 20, device="npu")
    main, side = torch.npu.Stream(), torch.npu.Stream()  # two in turn: the pool of streams begins again after the last
    first, second = torch.npu.NPUGraph(), torch.npu.NPUGraph()
    with torch.npu.graph(first, stream=main):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.add_(1)
        torch.npu.current_stream().wait_stream(side)
        y = x * 2
    del y
    with torch.npu.graph(second, pool=first.pool(), stream=main):
        z = x * 3
    one, two = npu_emulator.resources().captured[-2:]
    assert (one.streams, one.events, one.kernels, one.other_tasks) == (2, 2, 2, 4)
    assert one.pool_bytes >= 4 << 20
    assert (two.streams, two.events, two.kernels, two.other_tasks, two.pool_bytes) == (1, 0, 1, 0, 0)
    assert one.alive
    assert two.alive
    del first, second, z
    assert not any(graph.alive for graph in npu_emulator.resources().captured[-2:])


def test_an_empty_table_says_so() -> None:
    """A program without graphs gets the device's line and a sentence."""
    from npu_emulator.costs import cost_table

    nothing = npu_emulator.resources()._replace(captured=())
    assert cost_table(nothing, npu_emulator.Settings()).endswith("no graph was captured")


def test_a_destroyed_graph_gives_its_streams_back() -> None:
    """Streams in use go down again when a graph dies."""
    before = npu_emulator.resources().streams_used
    x = torch.ones(2, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(1)
    held = npu_emulator.resources()
    assert held.streams_used > before
    assert held.graphs[-1].kernels == 1
    del graph
    assert npu_emulator.resources().streams_used < held.streams_used
