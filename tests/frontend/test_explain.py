"""`npugraph_ex.explain` and the dumps: what they say is what happened."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from npugraph_ex.observe import NOTHING_COMPILED, dump, explain
from npugraph_ex.report.recompilations import in_words


def _step(x: torch.Tensor, cache: torch.Tensor, factor: int) -> torch.Tensor:
    cache.add_(x)
    return (x * factor).relu().t() + cache.sum()


def _device(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="npu")


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
    assert pairs == [
        ("runs as", f"captured graphs, replayed: graph {first}"),
        ("", f"operator by operator, because it cannot be captured: graph {second}"),
        ("kernels", "10 before the passes, 9 after: 1 saved"),
        ("fused", f"1: {rule}"),
        ("near-miss", f"{rule}: output 0 of npu_add_rms_norm_2 is also used by npu_rms_norm_1 {nearly}"),
        ("", f"{rule}: output 0 of npu_add_rms_norm_1 is also used by npu_rms_norm {nearly}"),
        ("norm not fused", f"no rule begins with npu.npu_rms_norm.default ({__file__}:{lines['unlike']}), 2 times"),
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


def test_a_backward_half_is_told() -> None:
    """The figures are those of the forward half, so the screen says so; without gradients there is no such row."""
    fast, x = torch.compile(lambda x: x.sin() * 2, backend="npugraph_ex"), _device(4)
    for trained in (True, False):
        watch = Watch()
        with torch.enable_grad():
            fast(x.clone().requires_grad_(trained))
        (entry,) = watch.explanation().graphs
        assert entry.graph.trained is trained
        assert ("backward" in dict(watch.explanation().summary().pairs)) is trained


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


def test_graph_breaks_are_told_with_their_lines() -> None:
    """Dynamo's reason and the line of the user's code: of a call, also in a function of another, and of a branch on values."""

    def says(y: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break(msg="a line of the test's own")
        return y * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = says(x + 1)
        if y.sum() > 3:
            y = y - 1
        return y.relu()

    explanation, again = (npugraph_ex.explain(broken, torch.ones(3, device="npu")) for _ in range(2))
    assert again.breaks == explanation.breaks
    lines = (says.__code__.co_firstlineno + 1, broken.__code__.co_firstlineno + 2)
    assert [reason.splitlines()[0] for reason in explanation.breaks] == [
        f"{__file__}:{lines[0]}: Call to `torch._dynamo.graph_break()`",
        f"{__file__}:{lines[1]}: Data-dependent branching: a condition needs the value of a tensor",
    ]
    assert json.loads(explanation.to_json())["breaks"] == list(explanation.breaks)
    assert all(reason in str(explanation) for reason in explanation.breaks)


def test_a_function_that_is_left_out_is_told() -> None:
    """A break in a block that no graph can end in: Dynamo leaves out the whole function, or the rest of one; also in a loop."""

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            x = x + 1
            torch._dynamo.graph_break()
        finally:
            x = x * 2
        return x

    def early(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        try:
            x = x - 2
            torch._dynamo.graph_break()
        finally:
            x = x * 3
        return x

    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + x.sum().item()
        return x

    def whole(x: torch.Tensor) -> torch.Tensor:
        return step(x) + loop(x) + early(x)

    found = npugraph_ex.explain(whole, torch.ones(3, device="npu"))
    firsts = [reason.splitlines()[0] for reason in found.breaks]
    begin, turn, late = (function.__code__.co_firstlineno for function in (step, loop, early))
    own = "Call to `torch._dynamo.graph_break()`"
    assert f"{__file__}:{begin + 3}: the function step of line {begin} is not compiled: {own}" in firsts
    loops = [
        first for first in firsts if first.startswith(f"{__file__}:{turn + 2}: ")
    ]  # torch 2.10 compiles the loop in parts
    assert loops
    assert f"{__file__}:{late + 5}: the rest of early from line {late + 2} is not compiled: {own}" in firsts
    assert sum("is not compiled" in first for first in firsts) == 2 + any(
        first.endswith(f"the function loop of line {turn} is not compiled: {_ITEM}") for first in loops
    )
    assert not any(first.startswith(("Call", "Unsupported")) for first in firsts)


_ITEM = "Unsupported Tensor.item() call with capture_scalar_outputs=False"


def test_a_function_that_is_compiled_no_more_is_told() -> None:
    """Behind Dynamo's limit calls run in eager mode: no graph would show it."""
    fast = torch.compile(lambda x, n: x * n, backend="npugraph_ex", dynamic=False)
    watch = Watch()
    with torch._dynamo.config.patch(recompile_limit=1):
        for number in (2, 3):
            fast(_device(3), number)
    explanation = watch.explanation()
    assert (len(explanation.graphs), len(explanation.breaks)) == (1, 1)
    assert re.search("recompile.limit", str(explanation))


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


def test_all_dumps_of_a_graph_lie_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's graph, each pass, the report, the inputs by class and the captures: numbered, in model__0."""
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    monkeypatch.setattr(dump._torch_private, "debug_directory", lambda: tmp_path)
    npugraph_ex.explain(_step, _device(4, 4), _device(4, 4), 3)
    (folder,) = (tmp_path / "npugraph_ex").iterdir()
    assert folder.name == "model__0"
    names = sorted(path.name for path in folder.iterdir())
    assert names[:2] == ["000_dynamo.py", "001_aot.py"]
    assert any(name.endswith("_reinplace_inputs.py") for name in names)
    description = next(folder.glob("*_captured_graph.txt")).read_text()
    assert "L['cache']" in description
    assert "6 before the passes, 5 after" in description
    captures = (folder / "captures.txt").read_text().splitlines()
    assert [line.split("because of ")[1].split(";")[0] for line in captures] == [
        "the first call",
        "a new address of L['cache']",
    ]


def test_the_dump_of_torch_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch.compile and torch's own folder: the documented layout, and each dumped graph computes what eager mode does."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x * 2).relu() + y).t()

    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    fast = torch.compile(function, backend="npugraph_ex", fullgraph=True, dynamic=False)
    kept = []
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path / "torch_compile_debug")):
        for _ in range(3):
            inputs = _device(3, 4), _device(3, 4)
            kept.append((fast(*inputs), function(*inputs), inputs))
        torch.compile(lambda x: x + 1, backend="npugraph_ex")(_device(2))
    for got, expected, _ in kept:
        assert torch.equal(got.cpu(), expected.cpu())
    (run,) = (tmp_path / "torch_compile_debug").glob(f"run_*-pid_{os.getpid()}")
    assert sorted(path.name for path in (run / "npugraph_ex").iterdir()) == ["model__0", "model__1"]
    names = sorted(path.name for path in (run / "npugraph_ex" / "model__0").iterdir())
    assert names[:2] == ["000_dynamo.py", "001_aot.py"]
    assert [name.split("_", 1)[0] for name in names[:-1]] == [f"{number:03d}" for number in range(len(names) - 1)]
    assert names[-1] == "captures.txt"
    assert {"pass_report.txt", "pass_report.json", "captured_graph.txt"} <= {name.split("_", 1)[-1] for name in names}
    for name in names[1:]:
        if name.endswith(".py"):
            space: dict[str, Any] = {}
            exec((run / "npugraph_ex" / "model__0" / name).read_text(), space)  # noqa: S102 - that it runs is the point
            _, expected, inputs = kept[-1]
            (value,) = space["GraphModule"]()(*inputs)
            assert torch.equal(value.cpu(), expected.cpu()), name


def test_a_recompiled_graph_says_what_changed() -> None:
    """Each change of one thing gives a graph that names it: a number, sizes, strides, dtype, gradient, grad mode, an attribute."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, device="npu"))
            self.factor = 3.0

        def forward(self, x: torch.Tensor, n: object) -> torch.Tensor:
            return x * self.weight * n * self.factor

    model = Scaled()
    line = f"{Path(__file__).name}:{Scaled.forward.__code__.co_firstlineno + 1}"
    fast = torch.compile(model, backend="npugraph_ex", dynamic=False)
    square = torch.ones(4, 4, device="npu")
    watch, narrow = Watch(), square[:2].half()
    columns = narrow.t().contiguous().t()
    for call in ((square, 2), (square, 3), (square[:2], 3), (narrow, 3), (columns, 3)):
        fast(*call)
    model.factor = 4.0
    fast(columns, 3)
    with torch.enable_grad():
        fast(columns, 3)
    causes = [entry.graph.cause for entry in watch.explanation().graphs]
    assert causes[2:5] == [
        "again: the size 0 of x was 4 and is 2",
        "again: the dtype of x was torch.float32 and is torch.float16",
        "again: the stride 0 of x was 4 and is 1",
    ]
    assert (causes[0], causes[6]) == ("for the first call", "again: torch's own state changed: grad_mode")
    assert re.fullmatch(rf"again: n == 2 was true and is not now \(used at {line}\)", causes[1])
    assert causes[5].startswith("again: self.factor == 3.0 was true")
    assert f"compiled         {causes[1]}\n" in str(watch.explanation())
    numbers = [entry.graph.number for entry in watch.explanation().graphs]
    summary = watch.explanation().summary()
    assert isinstance(summary, Facts)
    first = next(place for place, (name, _) in enumerate(summary.pairs) if name == "compiled")
    assert [said for _, said in summary.pairs[first : first + 4]] == [
        *(f"graph {number} {cause}" for number, cause in zip(numbers[1:4], causes[1:4], strict=True)), "… and 3 more"
    ]  # fmt: skip
    few = f"graphs {numbers[0]}, {numbers[1]}, {numbers[2]}, …, {numbers[6]}"
    assert summary.pairs[0] == ("runs as", f"captured graphs, replayed: {few}")


def test_the_line_that_needed_a_size_is_named() -> None:
    """torch_npu's attention asks for its sizes under `dynamic=True`: each length compiles, and its values are right.

    If this test fails with a new torch_npu because nothing compiles again, take the case out of `docs/faq.md`.
    """
    attend = torch.nn.functional.scaled_dot_product_attention

    def attention(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return attend(given["q"], given["q"], given["q"])

    def asking_nothing(q: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", scale=0.25)[0]

    lengths = [torch.randn(1, 2, length, 16, device="npu", dtype=torch.float16) for length in (4, 7, 9)]
    watch = Watch()
    fast = torch.compile(attention, backend="npugraph_ex", dynamic=True)
    for q in lengths:
        torch.testing.assert_close(fast({"q": q}), attention({"q": q}), rtol=0, atol=0)
    once = torch.compile(asking_nothing, backend="npugraph_ex", dynamic=True)
    for q in lengths:
        torch.testing.assert_close(once(q), attention({"q": q}), rtol=0, atol=0)
    line = f"{Path(__file__).name}:{attention.__code__.co_firstlineno + 1}"
    changes = [f"again: the size 2 of given['q'] was {old} and is {new}" for old, new in ((4, 7), (7, 9))]
    asked = f' (`return attend(given["q"], given["q"], given["q"])` at {line} needs its value)'
    assert [entry.graph.cause for entry in watch.explanation().graphs] == [
        "for the first call", *[change + asked for change in changes], "for the first call"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("", ""),
        ("Unable to find recompilation reasons", "a guard failed, and torch does not say which"),
        (
            "0/2: 2 <= L['x'].size()[0]  # return x + 1  # model.py:7 in forward (to avoid 0/1 specialization, do)\nUser stack",
            "2 <= x.size()[0] was true and is not now (used at model.py:7, torch compiles for the sizes 0 and 1 anew)",
        ),
        ("0/0: tensor 'x' rank mismatch. expected 2, actual 1", "the number of dimensions of x was 2 and is 1"),
        ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0", "x required no gradient and does now"),
        ("0/0: ___check_type_id(n, 12), type=<class 'int'>  # (HINT)", "n was of type int and is of another type"),
        ("0/0: ___check_obj_id(f, 12), type=<class 'x'>", "f is another object than it was"),
        (
            "0/0: expected type of 'm._modules['lin']._parameters['bias']' to be a tensor type, ' but found <class 'NoneType'>",
            "m.lin.bias was a tensor and is of type NoneType",
        ),
        ("0/0: TYPE_MISMATCH(L['parts']._modules)", "parts._modules is of another type than it was"),
        ("0/0: G['__import_my_dot_code'].N == 2", "my.code.N == 2 was true and is not now"),
        ("0/0: words of a later torch", "words of a later torch was true and is not now"),
    ],
)
def test_reasons_of_dynamo_in_plain_words(reason: str, words: str) -> None:
    """Each form that Dynamo writes; what it writes in another form is passed on."""
    assert in_words(reason) == words


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
