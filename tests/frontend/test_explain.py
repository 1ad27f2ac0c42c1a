"""`npugraph_ex.explain` and the dumps: what they say is what happened."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch_npu
from rich.console import Console

import npu_emulator
import npugraph_ex
from npu_emulator.chips import CHIPS
from npu_emulator.clock.roofline import LAUNCH_US
from npu_emulator.pages import Facts, PageTable
from npugraph_ex.frontend.entry.explain import Watch
from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.observe import NOTHING_COMPILED, explain


def _step(x: torch.Tensor, cache: torch.Tensor, factor: int) -> torch.Tensor:
    cache.add_(x)
    return (x * factor).relu().t() + cache.sum()


def _device(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="npu")


@pytest.mark.slow
def test_inputs_are_told_by_class() -> None:
    """A mutated tensor is in place, another tensor is copied, a varying size is part of the key."""
    explanation = npugraph_ex.explain(_step, _device(4, 4), _device(4, 4), 3, dynamic=True)
    (entry,) = explanation.graphs
    classes = {record.name: (record.kind, record.mutated) for record in entry.graph.inputs}
    assert classes["L['x']"] == ("copied", False)
    assert classes["L['cache']"] == ("in place", True)
    assert ("key", False) in classes.values()


def test_the_callers_tensors_stay_as_they_are() -> None:
    """Explaining a program that writes an input does not write the caller's."""
    cache = torch.zeros(4, 4, device="npu")
    npugraph_ex.explain(_step, _device(4, 4), cache, 3)
    assert cache.cpu().eq(0).all()


def test_kernels_passes_and_captures_are_counted() -> None:
    """The write-back copy is saved, each pass has node counts, each capture has its reason, the pool holds memory."""
    (entry,) = npugraph_ex.explain(_step, _device(4, 4), _device(4, 4), 3).graphs
    graph = entry.graph
    # add, copy_ back, mul, relu, sum, add; a transpose launches nothing.
    assert (graph.kernels_before, graph.kernels_after) == (6, 5)
    passes = {record.name: (record.nodes_before, record.nodes_after) for record in graph.report.passes}
    before, after = passes["reinplace_inputs"]
    assert after == before - 1
    assert [capture.reason for capture in entry.captures] == ["the first call", "a new address of L['cache']"]
    assert entry.pool_bytes is not None
    assert entry.pool_bytes > 0


@pytest.mark.slow
def test_before_and_after_stand_side_by_side() -> None:
    """Every call of AOT's graph and of the final one has its row: kept, changed, removed or new, with the user's line.

    The page has each, and the bytes alive; plain text one row for four calls that stay; a narrow terminal has a list.
    """

    def longer(x: torch.Tensor, cache: torch.Tensor, factor: int) -> torch.Tensor:
        return _step(x, cache, factor) @ x @ x @ x @ x

    explanation = npugraph_ex.explain(longer, _device(4, 4), _device(4, 4), 3)
    (entry,) = explanation.graphs
    (table,) = entry.side_by_side().blocks
    assert isinstance(table, PageTable)
    rows = {str(row[0]): row[1:] for row in table.rows}
    assert rows["add"][:5] == ("aten.add.Tensor", "aten.add_.Tensor", "", "0", "changed")
    assert rows["copy_"][:3] == ("aten.copy_", "", "")
    assert rows["copy_"][4] == "removed"
    assert rows["sum_1"][:3] == ("aten.sum", "aten.sum", "")
    assert str(rows["add"][5]).endswith(f"test_explain.py:{_step.__code__.co_firstlineno + 1}")
    # 4 x 4 of float32, and the argument of each product
    assert [rows[name][3] for name in ("mul", "matmul", "matmul_1")] == ["64", "128", "128"]
    for side, nodes in enumerate((entry.graph.before, entry.graph.after)):
        assert [row[0] for row in table.rows if row[1 + side]] == [node.name for node in nodes]
        assert sum(node.kernels for node in nodes) == (entry.graph.kernels_before, entry.graph.kernels_after)[side]
    text = explanation.page().html()
    assert all(
        words in text
        for words in (
            f"graph {entry.graph.number}",
            "aten.add_.Tensor",
            "a new address of",
            "the passes saved 1 kernel",
        )
    )
    peaks = (entry.graph.peak_before, entry.graph.peak_after)
    assert peaks == tuple(max(call.alive_bytes for call in side) for side in (entry.graph.before, entry.graph.after))
    assert f"{peaks[0]:,} bytes before the passes, {peaks[1]:,} after" in str(explanation)
    assert explanation.peak_bytes is not None
    assert explanation.peak_bytes >= peaks[1] > 0
    for said in (str(explanation), _on_a_terminal(explanation, 160)):
        (changed,) = [line.split() for line in said.splitlines() if line.startswith("add  ")]
        assert changed[:4] == ["add", "aten.add.Tensor", "aten.add_.Tensor", "changed"]
        (quiet,) = [line.split() for line in said.splitlines() if line.startswith("…")]
        assert quiet == ["…", "4", "calls", "the", "same"]
    narrow = _on_a_terminal(explanation, 40)
    assert "add\n  before: aten.add.Tensor\n  after: aten.add_.Tensor\n  what happened: changed\n" in narrow
    assert max(map(len, narrow.splitlines())) <= 40
    assert explanation._repr_html_().startswith("<iframe")


def _on_a_terminal(explanation: explain.Explanation, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(explanation)
    return re.sub(r" +$", "", file.getvalue(), flags=re.MULTILINE)


@pytest.mark.slow
def test_one_screen_says_what_matters_first() -> None:
    """How graphs run, breaks, obstacles, kernels, fusions, near-misses and captures, each with its line; the next commands."""

    def normed(rows: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, _, total = torch_npu.npu_add_rms_norm(rows, rows, gamma)
        fused = torch_npu.npu_dynamic_quant(y)
        for _ in range(2):
            y, _, total = torch_npu.npu_add_rms_norm(total, rows, gamma)
            fused += torch_npu.npu_dynamic_quant(y)  # nearly
            fused += torch_npu.npu_rms_norm(y, gamma)  # unlike
        return *fused, total

    def host(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1).cpu()
        torch._dynamo.graph_break()
        return y

    rows, gamma = (torch.ones(shape, device="npu", dtype=torch.half) for shape in ((4, 64), (64,)))
    watch = Watch()
    npugraph_ex.explain(normed, rows, gamma)
    npugraph_ex.explain(host, rows)
    found = watch.explanation()
    first, second = (entry.graph.number for entry in found.graphs)
    lines = {text.partition("# ")[2]: number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)}
    begin = host.__code__.co_firstlineno
    summary = found.summary("--emulate script.py")
    assert isinstance(summary, Facts)
    assert len(str(summary).splitlines()) == len(summary.pairs) <= 20
    pairs = [
        pair for pair in summary.pairs if pair[0] not in {"not capturable", "graph break", "memory", "modelled time"}
    ]
    rule, nearly = "add_rms_norm_dynamic_quant", f"({__file__}:{lines['nearly']})"
    unlike = (
        f"it goes to a result of the graph; no rule begins with npu.npu_rms_norm.default ({__file__}:{lines['unlike']})"
    )
    assert pairs == [
        ("runs as", f"captured graphs, replayed: graph {first}"),
        ("", f"operator by operator, because it cannot be captured: graph {second}"),
        ("kernels", "10 before the passes, 9 after: 1 saved"),
        ("fused", f"1: {rule}"),
        ("near-miss", f"{rule}: output 0 of npu_add_rms_norm_2 is also used by npu_rms_norm_1 {nearly}"),
        ("", f"{rule}: output 0 of npu_add_rms_norm_1 is also used by npu_rms_norm {nearly}"),
        ("norm not fused", f"{unlike}, 2 times"),
        ("captures", "1: the first call"),
        ("next", "npugraph-ex help Unsupported  # why a graph ends, and the remedy"),
        ("", "npugraph-ex help CaptureError  # what keeps a graph from being captured, and the remedy"),
        ("", "npugraph-ex advise --emulate script.py  # what else could be fused, and the lines to change"),
        ("", "npugraph-ex explain --full --emulate script.py  # all tables; --html FILE: as a page"),
    ]
    said = dict(summary.pairs)
    assert said["graph break"] == f"{__file__}:{begin + 2}: Call to `torch._dynamo.graph_break()`"
    assert re.fullmatch(rf"graph {second}: _to_copy: .*:{begin + 1}\)", str(said["not capturable"]))
    assert "next" not in str(found.summary())
    assert str(explain.Explanation(()).summary()) == NOTHING_COMPILED


def test_a_model_that_compiles_nothing_is_told_by_its_name() -> None:
    """Not of the process, which has graphs; beside the graph breaks that are the cause, too, and as a page."""

    class Host(torch.nn.Module):
        def forward(self, x: int) -> int:
            return x + 1

    x = torch.ones(2, device="npu")
    assert npugraph_ex.explain(lambda x: x + 1, x).graphs
    for model, given, name in ((lambda x: x, x, "<lambda>"), (Host(), 3, "Host"), (_with_a_break, x, "_with_a_break")):
        found = npugraph_ex.explain(model, given)
        said = rf"No graph of \S*{name} was compiled: in these calls Dynamo gave this backend no operator of it\."
        assert re.search(rf"{said}\Z", str(found))
        assert bool(found.breaks) or re.fullmatch(said, str(found.summary()))
        assert re.search(said, html.unescape(found.page().html()))
        assert json.loads(found.to_json())["function"].endswith(name)


def _with_a_break(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x


def test_the_modelled_time_is_that_of_starts_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels that read and write 4 MiB each, on the emulated chip."""
    found = npugraph_ex.explain(lambda x: x.relu() + 1, torch.ones(2**20, device="npu"))
    expected = 2 * LAUNCH_US + 1e6 * 4 * 2**22 / CHIPS["Ascend910B2"].bandwidth
    time = rf"^modelled time +{expected:.1f} us before .*, {expected:.1f} us after: .*Ascend910B2$"
    assert re.search(time, str(found.summary()), re.MULTILINE)
    (entry,) = found.graphs
    assert [call.moved_bytes for call in entry.graph.after] == [2 * 2**22] * 2
    for soc, known in (("Ascend910_9391", "Ascend910_9391"), ("Ascend310B1", "Ascend910B2")):
        emulated = SimpleNamespace(settings=SimpleNamespace(soc=soc))
        monkeypatch.setattr(npu_emulator, "current", lambda emulated=emulated: emulated)
        expected = 2 * LAUNCH_US + 1e6 * 4 * 2**22 / CHIPS[known].bandwidth
        assert f" {expected:.1f} us after: starts and bytes of the kernels on an {known}\n" in str(found.summary())


@pytest.mark.slow
def test_a_backward_half_is_told() -> None:
    """The figures are those of the forward half, so the screen says so; without gradients there is no such row."""
    fast, x = torch.compile(lambda x: x.sin() * 2, backend="npugraph_ex"), _device(4)
    for trained in (True, False):
        watch = Watch()
        with torch.enable_grad():
            fast(x.clone().requires_grad_(trained))
        explanation = watch.explanation()
        (entry,) = explanation.graphs
        assert entry.graph.trained is trained
        assert ("backward" in dict(explanation.summary().pairs)) is trained
        assert ("backward" in dict(entry.facts())) is trained


def test_an_obstacle_is_named_with_its_line() -> None:
    """A graph that cannot be captured says which operation forbids it and where it was written."""

    def ends_on_host(x: torch.Tensor) -> torch.Tensor:
        return x.relu().cpu() + 1

    (entry,) = npugraph_ex.explain(ends_on_host, _device(3)).graphs
    assert entry.graph.fate == "not capturable"
    assert "test_explain.py" in entry.graph.obstacles[0]
    assert entry.captures == ()
    assert entry.pool_bytes is None
    assert entry.graph.obstacles[0] in str(entry.section())


def test_it_says_which_option_keeps_it_from_capture() -> None:
    """With force_eager nothing is captured, and that is the reason given."""
    (entry,) = npugraph_ex.explain(lambda x: x + 1, _device(3), options={"force_eager": True}).graphs
    assert (entry.graph.fate, entry.captures) == ("force_eager", ())
    assert entry.graph.options == (("force_eager", "True"),)


def test_it_is_frozen_and_has_two_faces() -> None:
    """The value cannot be changed; text and JSON tell the same numbers."""
    explanation = npugraph_ex.explain(lambda x: x.relu() + 1, _device(3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.graphs = ()  # type: ignore[misc]
    (entry,) = explanation.graphs
    told = json.loads(explanation.to_json())["graphs"][0]
    assert told["pool_bytes"] == entry.pool_bytes
    assert f"{entry.pool_bytes:,} bytes" in str(explanation)
    assert told["captures"][0]["reason"] == "the first call"


def test_no_calls_is_refused() -> None:
    """Nothing can be explained of a model that is never called."""
    with pytest.raises(npugraph_ex.errors.NpuGraphExError, match=r"calls=.*>= 1, got 0"):
        npugraph_ex.explain(lambda x: x, _device(1), calls=0)


def test_a_compiled_model_is_refused() -> None:
    """Dynamo would compile what is inside of it without its options, and show fusions that the user has switched off."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    module, in_place, inside = torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.ReLU()
    in_place.compile(backend="npugraph_ex")
    inside.forward = torch.compile(inside.forward, backend="npugraph_ex")
    outside = torch.compile(module, backend="npugraph_ex")
    for compiled in (torch.compile(doubled, backend="npugraph_ex"), outside, in_place, inside):
        with pytest.raises(
            npugraph_ex.errors.NpuGraphExError, match=r"before torch.compile, and the options as explain"
        ):
            npugraph_ex.explain(compiled, _device(1))
    assert npugraph_ex.explain(module, _device(1)).graphs
    npugraph_ex.explain(torch.compiler.disable(doubled), _device(1))


@pytest.mark.slow
def test_short_text_has_one_row_for_all_weights() -> None:
    """Text gives the count and bytes of parameters and buffers; the page and the JSON have each."""

    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4).npu()
            self.first, self.second = torch.nn.Linear(4, 4).npu(), torch.nn.Linear(4, 4).half().npu()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.norm(x)).half())

    explanation = npugraph_ex.explain(Normed().eval(), _device(2, 4))
    weights = [record for record in explanation.graphs[0].graph.inputs if record.weight_bytes]
    assert len(weights) == 8
    assert sum(record.weight_bytes for record in weights) == 4 * 4 * 4 + 80 + 40
    assert re.search(r"^8 weights +in place +184 bytes$", str(explanation), re.MULTILINE)
    assert "norm.running_mean" not in str(explanation)
    assert "norm.running_mean" in explanation.page().html()


def test_a_local_rule_has_its_last_name_and_its_line() -> None:
    """In tables; JSON has the whole name. Two rules of one last name stay apart."""

    def searched(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def local() -> Callable[[torch.Tensor], torch.Tensor]:
        def searched(x: torch.Tensor) -> torch.Tensor:
            return x.cos().sin().relu()

        return searched

    other, example = local(), [torch.ones(4)]
    with (
        register_replacement(searched, lambda x: torch.cos(torch.sin(x)), example),
        register_replacement(other, lambda x: torch.relu(x.cos().sin()), example),
    ):
        found = npugraph_ex.explain(lambda x: (x.sin().cos(), x.cos().sin()), _device(4))
    report = found.graphs[0].graph.report
    tables = dict(report.tables())
    names = [row[0] for row in tables["fusion rule", "fused", "near-misses", "inactive because"]]
    lines = [f"searched ({__file__}:{one.__code__.co_firstlineno})" for one in (searched, other)]
    assert [name for name in names if "searched" in str(name)] == lines
    assert "<locals>" not in str(found) + str(found.summary())
    assert [one["name"] for one in json.loads(report.to_json())["rules"] if "searched" in one["name"]] == [
        f"{__name__}.{one.__qualname__}" for one in (searched, other)
    ]


@pytest.mark.slow
def test_a_refused_graph_keeps_its_findings() -> None:
    """Where the stream check refuses a graph, the race is in the text, in JSON and in SARIF, though no graph has it."""
    watch = Watch()

    def racy(x: torch.Tensor) -> torch.Tensor:
        with npugraph_ex.scope.npu_stream_switch("side"):
            y = x * 2
        return y + 1

    for refused in (False, True):
        options = {"stream_check": "raise" if refused else "off"}
        compiled = torch.compile(racy, backend="npugraph_ex", options=options)
        with pytest.raises(Exception, match="read-after-write") if refused else nullcontext():
            compiled(_device(4))
        found = watch.explanation()
        assert [finding.code for finding in found.refused] == ["read-after-write"] * refused
    assert "read-after-write" in str(found.summary())
    assert json.loads(found.to_json())["refused"][0]["code"] == "read-after-write"
    assert len(json.loads(found.streams.to_sarif())["runs"][0]["results"]) == 1
