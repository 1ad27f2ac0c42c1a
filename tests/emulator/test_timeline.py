"""The modelled clock: roofline prices, streams side by side, events as arrows, replays, and the file for Perfetto."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_emulator
from npu_emulator import activation
from npu_emulator.chips import CHIPS, DEFAULT
from npu_emulator.clock.products import ProductCounter
from npu_emulator.clock.roofline import LAUNCH_US, Roofline
from npu_emulator.settings import SOCS
from npugraph_ex.operators import OPERATORS
from npugraph_ex.versions import captured_generators
from npugraph_ex_conformance.operator_checks import on_device

MODEL = Roofline(DEFAULT)


def test_the_chips_have_the_published_figures() -> None:
    """Counts and rates give the peaks that are printed elsewhere: 354 TFLOPS of a 910B2, 246 of a 910B4, 70 of a 310P."""
    assert DEFAULT.half_flops == pytest.approx(353.9e12, rel=1e-3)
    assert DEFAULT.bandwidth == pytest.approx(1.382e12, rel=1e-3)
    small, edge = CHIPS["Ascend910B4"], CHIPS["Ascend310P3"]
    assert (small.cube_cores, small.vector_cores, small.memory >> 30, small.l2 >> 20) == (20, 40, 32, 96)
    assert (small.half_flops, small.bandwidth) == pytest.approx((245.76e12, 960e9))
    assert edge.half_flops == pytest.approx(70e12, rel=0.01)
    assert edge.bandwidth == pytest.approx(204.8e9, rel=0.02)
    assert set(CHIPS) <= set(SOCS)


def test_a_record_prices_a_matrix_product() -> None:
    """What a package says of its operators' first factors reaches the clock: a product costs by its depth, not by its result."""
    x, wide = torch.ones(256, 512, dtype=torch.int8), torch.ones(512, 4096, dtype=torch.int8)
    y = torch.ones(256, 4096, dtype=torch.float16)
    told = Roofline(DEFAULT, activation.registry.first_factors)
    for name in ("npu.npu_quant_matmul.default", "npu.npu_transpose_batchmatmul.default"):
        product = told.kernel_us(name, [x, wide], [y], cube_cores=1) - LAUNCH_US
        assert product == pytest.approx(1e6 * 2 * 256 * 4096 * 512 / 2 / (DEFAULT.half_flops / DEFAULT.cube_cores))
        assert product > MODEL.kernel_us(name, [x, wide], [y], cube_cores=1) - LAUNCH_US
    assert MODEL.kernel_us("npu.npu_swiglu.default", [x], [y]) == told.kernel_us("npu.npu_swiglu.default", [x], [y])


@pytest.mark.slow
def test_the_products_of_every_record_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a chip whose cubes are slow and which is fast in all else, each operator costs the products that its formula computes."""
    slow = dataclasses.replace(DEFAULT, half_flops=1e6, vector_bytes=1e30, bandwidth=1e30)
    monkeypatch.setattr(npu_emulator, "with_figures", lambda _: slow)
    wrong, priced = {}, 0
    for name, record in OPERATORS.items():
        if record.formula is None or record.overload is None or record.schema or record.across_ranks:
            continue
        example = record.calls()[0]
        args, kwargs = on_device(record, example)
        with npu_emulator.timeline() as clock:
            record.overload(*args, **kwargs)
        with ProductCounter() as counter:
            record.formula(*example.args, **example.kwargs)
        cost = sum(span.duration - LAUNCH_US for span in clock.spans)  # an operation takes a microsecond in float16
        priced += counter.operations > 0
        if not any(cost == pytest.approx(counter.operations * rate) for rate in (0.5, 1, 4)):  # int8, float16, float32
            wrong[name] = (counter.operations, cost)
    assert not wrong, wrong
    assert priced > 70


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
@pytest.mark.parametrize("schedule", ["fifo", "lazy"])
def test_attention_costs_its_products(schedule: str) -> None:
    """On one cube of 24 attention takes as long as its two products: in eager mode, in replays, and where it runs later."""
    x, few, graph = torch.ones(1, 1, 256, 64).npu().half(), torch.npu.Stream(), torch.npu.NPUGraph()
    torch.npu.synchronize()
    torch.npu.set_stream_limit(few, 1, 48)
    try:
        with npu_emulator.schedule(schedule), npu_emulator.timeline() as clock, torch.npu.stream(few):
            kept = torch.ops.npu.npu_prompt_flash_attention(x, x, x, num_heads=1, input_layout="BNSD")
            with torch.npu.graph(graph, stream=few):
                y = torch.ops.npu.npu_prompt_flash_attention(x, x, x, num_heads=1, input_layout="BNSD")
            graph.replay()
            torch.npu.synchronize()
    finally:
        torch.npu.reset_stream_limit(few)
    durations = [span.duration - LAUNCH_US for span in clock.spans if "attention" in span.name]
    assert durations == pytest.approx([1e6 * 2 * 2 * 256 * 256 * 64 / (DEFAULT.half_flops / DEFAULT.cube_cores)] * 2)
    del kept, y


def test_memory_and_arithmetic_bind_in_turn() -> None:
    """A sum costs its bytes, a large product its operations, and float32 products four times those of float16."""
    x = torch.empty(4096, 4096, dtype=torch.float16)
    added = MODEL.kernel_us("aten.add.Tensor", [x, x], [x]) - LAUNCH_US
    assert added == pytest.approx(3 * 2 * 4096**2 / 1.3824e12 * 1e6)
    product = MODEL.kernel_us("aten.mm.default", [x, x], [x]) - LAUNCH_US
    assert product == pytest.approx(2 * 4096**3 / 353.8944e12 * 1e6)
    single = MODEL.kernel_us("aten.mm.default", [x.float(), x.float()], [x.float()]) - LAUNCH_US
    assert single == pytest.approx(4 * product)
    whole = MODEL.kernel_us("aten.mm.default", [x.to(torch.int8), x.to(torch.int8)], [x]) - LAUNCH_US
    assert whole == pytest.approx(product / 2)


def test_vector_cores_bind_where_few_are_left_or_memory_is_not_touched() -> None:
    """One vector core goes through 256 bytes a cycle; what an expanded tensor saves in memory it costs in computing."""
    x = torch.empty(4096, 4096, dtype=torch.float16)
    alone = MODEL.kernel_us("aten.neg.default", [x], [x], vector_cores=1) - LAUNCH_US
    assert alone == pytest.approx(2 * 4096**2 / (1.8e9 * 256) * 1e6)
    half = MODEL.kernel_us("aten.neg.default", [x], [x], vector_cores=24) - LAUNCH_US
    assert half == pytest.approx(2 * 2 * 4096**2 / 1.3824e12 * 1e6)  # the memory binds
    row = torch.empty(1, 4096, dtype=torch.float16).expand(4096, 4096)
    total = MODEL.kernel_us("aten.sum.default", [row], []) - LAUNCH_US
    assert total == pytest.approx(2 * 4096**2 / (48 * 1.8e9 * 256) * 1e6)
    widened = MODEL.kernel_us("aten.neg.default", [x.to(torch.int8)], [], vector_cores=1) - LAUNCH_US
    assert widened == pytest.approx(alone)  # bytes are computed on as two


def test_rows_of_a_cache_or_a_table_count_as_rows() -> None:
    """A step that writes one row of a cache, or looks one up in a table, moves a row; a sum over the cache moves all of it."""
    cache, row = torch.ones(4096, 128, device="npu"), torch.ones(1, 128, device="npu")
    places, row_bytes = torch.zeros(1, dtype=torch.int64, device="npu"), 4 * 128
    with npu_emulator.timeline() as clock:
        cache.index_copy_(0, places, row)
        cache.index_select(0, places)
        torch.nn.functional.embedding(places, cache)
        cache.sum()
    *few, whole = [span.moved for span in clock.spans]
    assert few == [2 * row_bytes + 8] * 3
    assert whole == 4096 * row_bytes + 4


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
def test_elementwise_work_goes_by_the_vector_cores_of_its_stream() -> None:
    """On one vector core of 48 a sum takes longer than its memory; its stream's limit decides, in captured kernels too."""
    x = torch.ones(1 << 16, device="npu", dtype=torch.float16)
    few, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    torch.npu.synchronize()
    torch.npu.set_stream_limit(few, 24, 1)
    try:
        with npu_emulator.timeline() as clock:
            kept = x.neg()
            with torch.npu.stream(few):
                kept = kept, x.neg()
            with torch.npu.graph(graph, stream=few):
                y = x.neg()
            graph.replay()
            torch.npu.synchronize()
    finally:
        torch.npu.reset_stream_limit(few)
    free, limited, replayed = (span.duration - LAUNCH_US for span in clock.spans)
    assert free == pytest.approx(2 * 2 * 2**16 / 1.3824e12 * 1e6)
    assert [limited, replayed] == pytest.approx([2 * 2**16 / (1.8e9 * 256) * 1e6] * 2)
    del kept, y


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
def test_a_product_on_a_quarter_of_the_cube_cores_takes_four_times_as_long() -> None:
    """The arithmetic time goes by the stream's cube cores, in captured kernels too; the memory time does not."""
    x = torch.ones(512, 512, device="npu")
    few, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    torch.npu.synchronize()
    torch.npu.set_stream_limit(few, 6, 48)
    try:
        with npu_emulator.timeline() as clock:
            for stream in (torch.npu.current_stream(), few):
                with torch.npu.stream(stream):
                    kept = x.mm(x), x + 1
            with torch.npu.graph(graph, stream=few):
                y = x.mm(x)
            graph.replay()
            torch.npu.synchronize()
    finally:
        torch.npu.reset_stream_limit(few)
    product, add, slow_product, slow_add, replayed = (span.duration - LAUNCH_US for span in clock.spans)
    assert product == pytest.approx(1e6 * 2 * 512**3 / (DEFAULT.half_flops / 4))  # float32
    assert [slow_product, replayed] == pytest.approx([4 * product, 4 * product])
    assert slow_add == pytest.approx(add)
    del kept, y


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


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
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


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
def test_a_graph_captured_before_the_timeline_is_priced_as_inside_it() -> None:
    """Compile, warm up, then measure: names, lines, lanes, arrows and times are those of a capture that the timeline saw."""

    def counted(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    counted.work = lambda _: (0.0, 4e9)  # type: ignore[attr-defined]
    name = "timeline_test::counted"
    torch.library.define(name, "(Tensor x) -> Tensor")
    npu_emulator.register_kernel(name, counted)
    x = torch.ones(512, 512, device="npu")
    few, side = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()

    def captured() -> tuple[torch.npu.NPUGraph, object]:
        graph = torch.npu.NPUGraph()
        torch.npu.set_stream_limit(few, 6, 48)
        try:
            with torch.npu.graph(graph, stream=few):
                side.wait_stream(few)
                with torch.npu.stream(side):
                    told = torch.ops.timeline_test.counted(x)
                y = x.mm(x)
                few.wait_stream(side)
                return graph, (told, y, y + 1)
        finally:
            torch.npu.reset_stream_limit(few)  # the price is that of the cores at the capture

    before, kept = captured()
    with npu_emulator.timeline() as outer:
        with npu_emulator.timeline() as clock:
            before.replay()
            torch.npu.synchronize()
        inside, kept_too = captured()
        start = len(outer.spans)
        inside.replay()
        torch.npu.synchronize()

    def seen(spans: list[Any]) -> list[Any]:
        return [(span.name, span.line, pytest.approx(span.duration)) for span in spans]

    names = {"timeline_test.counted.default", "aten.mm.default", "aten.add.Tensor"}
    assert {span.name for span in clock.spans} == names
    assert seen(clock.spans) == seen(outer.spans[start:])
    assert all("test_timeline.py" in span.line for span in clock.spans)
    assert max(clock.spans, key=lambda span: span.duration).name == "timeline_test.counted.default"
    assert len(outer.arrows) == 2 * len(clock.arrows) > 0
    del kept, kept_too


def test_the_critical_path_leads_through_the_events(tmp_path: Path) -> None:
    """The long kernel on the side stream and what waits for it make the end; the short one beside it does not."""
    long, short = torch.zeros(1 << 22, device="npu"), torch.zeros(4, device="npu")
    side, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    torch.npu.synchronize()
    with npu_emulator.timeline() as clock:
        assert clock.critical_path == []
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            long.add_(1)
        short.mul_(2)
        torch.npu.current_stream().wait_stream(side)
        short.sub_(1)
        with torch.npu.graph(graph):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                long.neg_()
            short.abs_()
            torch.npu.current_stream().wait_stream(side)
            short.exp_()
        graph.replay()
        torch.npu.synchronize()
    path = clock.critical_path
    assert [span.name.split(".")[1] for span in path] == ["add_", "sub_", "neg_", "exp_"]
    for before, after in itertools.pairwise(path):
        assert after.start == pytest.approx(before.start + before.duration)
    assert path[0].start == 0
    assert path[-1].start + path[-1].duration == clock.end
    rows = json.loads(clock.save(tmp_path / "trace.json").read_text())["traceEvents"]
    marked = [row["name"].split(".")[1] for row in rows if row["ph"] == "X" and row["args"]["critical"]]
    assert marked == ["add_", "sub_", "neg_", "exp_"]


def _as_perfetto_reads(path: Path) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Import a Chrome trace by the rules of Perfetto's importer; return the spans of each track, and who points to whom.

    Seen on its trace processor (v52): whole nanoseconds; a span that begins before the one ahead of it on its track has
    ended, and is not inside it, is dropped; an arrow's end belongs to the span around it, and with none the arrow is dropped.
    """
    rows = json.loads(path.read_text())["traceEvents"]
    assert {row["ph"] for row in rows} <= {"M", "X", "s", "f"}
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    tracks: dict[int, list[tuple[int, int, str]]] = {number: [] for number in names}
    for row in rows:
        if row["ph"] == "X":
            begin = round(row["ts"] * 1000)
            tracks[row["tid"]].append((begin, begin + round(row["dur"] * 1000), row["name"]))
    for spans in tracks.values():
        assert all(begin < end for begin, end, _ in spans)
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(sorted(spans))), (
            "Perfetto drops a span"
        )

    def around(row: dict[str, Any]) -> str:
        (found,) = [n for begin, end, n in tracks[row["tid"]] if begin <= round(row["ts"] * 1000) < end]
        return found

    arrows = []
    starts = {row["id"]: row for row in rows if row["ph"] == "s"}
    ends = {row["id"]: row for row in rows if row["ph"] == "f"}
    assert len(starts) + len(ends) == sum(row["ph"] in "sf" for row in rows)
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] < end["ts"]
        assert end["bp"] == "e"
        assert all(start[part] == end[part] for part in ("name", "cat", "pid"))
        arrows.append((around(start), around(end)))
    return {names[number]: [n for _, _, n in sorted(spans)] for number, spans in tracks.items()}, arrows


@pytest.mark.skipif(captured_generators.DIFFERENCE.older, reason=captured_generators.DIFFERENCE.what)
def test_perfetto_reads_every_span_and_binds_every_arrow(tmp_path: Path) -> None:
    """No span overlaps another by a nanosecond; arrows lead from the work before the record to the first behind the wait."""
    side, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    sizes = [torch.zeros(size, device="npu") for size in range(100_000, 2_000_000, 25_033)]
    x = torch.zeros(1 << 20, device="npu")
    torch.npu.synchronize()
    with npu_emulator.timeline() as clock:
        for each in sizes:
            each.neg_()
        x.add_(1)
        side.wait_stream(torch.npu.current_stream())
        x.abs_()
        with torch.npu.stream(side):
            x.mul_(2)
            event = side.record_event()
            x.exp_()
        torch.npu.current_stream().wait_event(event)
        x.sub_(1)
        with torch.npu.graph(graph):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                x.cos_()
            torch.npu.current_stream().wait_stream(side)
            x.sin_()
        graph.replay()
        torch.npu.synchronize()
    tracks, arrows = _as_perfetto_reads(clock.save(tmp_path / "trace.json"))
    assert sum(map(len, tracks.values())) == len(clock.spans) == len(sizes) + 7
    first, second, *lanes = tracks.values()
    assert first == [*["aten.neg_.default"] * len(sizes), "aten.add_.Tensor", "aten.abs_.default", "aten.sub_.Tensor"]
    assert second == ["aten.mul_.Tensor", "aten.exp_.default"]
    assert sorted(lanes) == [["aten.cos_.default"], ["aten.sin_.default"]]
    assert arrows == [  # the fork of the graph has no work before it, and no arrow
        ("aten.add_.Tensor", "aten.mul_.Tensor"),
        ("aten.mul_.Tensor", "aten.sub_.Tensor"),
        ("aten.cos_.default", "aten.sin_.default"),
    ]


def test_an_interpreted_graph_names_the_lines_that_it_was_traced_from() -> None:
    """A node that knows where it comes from says so; the interpreter and whoever runs it come after."""
    x = torch.zeros(4, device="npu")
    graph = torch.fx.Graph()
    value = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), 1))
    value.meta["stack_trace"] = (
        '  File "main.py", line 9, in run\n    step()\n  File "model.py", line 7, in forward\n    x + 1\n'
    )
    graph.output(value)
    interpreter = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), graph))
    with npu_emulator.timeline() as clock:
        interpreter.run(x)
        torch.npu.synchronize()
    assert clock.spans[0].line == "model.py:7 in forward"
