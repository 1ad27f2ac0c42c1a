"""Two dumps side by side: the first node whose values differ, and by how much."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npugraph_ex.cli import main
from npugraph_ex.errors import NpuGraphExError
from npugraph_ex.observe.compare import compare, ulps_apart


def _dump(function: Callable[..., Any], directory: Path, *calls: torch.Tensor, **options: Any) -> Path:
    torch.compiler.reset()
    options = {"dump_tensor_data": True, "data_dump_dir": str(directory), **options}
    compiled = torch.compile(function, backend="npugraph_ex", options=options, fullgraph=True)
    for x in calls:
        with torch.no_grad():
            compiled(x.clone())
    return directory


def _chain(x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x)
    z = y * 2
    return torch.tanh(z) + y


def _other_chain(x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x)
    z = y * 2.0000002384185791015625
    return torch.tanh(z) + y


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    """One input."""
    return torch.tensor([[0.5, -1.0], [2.0, 3.0]], device="npu")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory, x: torch.Tensor) -> dict[str, Path]:
    """Dumps of two calls: twice of one function, once before the passes, and once of a function that is off by ULPs."""
    root = tmp_path_factory.mktemp("dumps")
    return {
        "one": _dump(_chain, root / "one", x, x + 1),
        "same": _dump(_chain, root / "same", x, x + 1),
        "before": _dump(_chain, root / "before", x, x + 1, data_dump_stage="original"),
        "off": _dump(_other_chain, root / "off", x, x + 1),
    }


def _call(folder: Path, number: int) -> Path:
    return next(path.parent for path in folder.rglob("index.json") if path.parent.name == f"call__{number}")


@pytest.mark.slow
@pytest.mark.parametrize("other", ["same", "before"])
def test_equal_dumps(dumps: dict[str, Path], other: str) -> None:
    """Two runs of one program, and the graph before and after the passes, have no difference; in-place forms are found again."""
    found = compare(_call(dumps["one"], 0), _call(dumps[other], 0))
    assert found.differences == []
    assert found.compared == 6


def test_the_first_difference_is_where_the_programs_part(dumps: dict[str, Path]) -> None:
    """Not the last operator and not the input: the product, whose factor is one ULP off, with its source line and worst element."""
    found = compare(_call(dumps["one"], 0), _call(dumps["off"], 0))
    first = found.differences[0]
    assert "mul" in first.operator
    assert first.ulps == 2  # the factor is off by one, and sigmoid(2) has a mantissa of 1.76
    assert first.source.startswith(__file__)
    assert "elements; the worst, at [" in first.what
    assert all("sigmoid" not in difference.operator for difference in found.differences)
    assert compare(_call(dumps["one"], 0), _call(dumps["off"], 0), within=4).differences == []


def test_other_inputs_are_the_first_difference(dumps: dict[str, Path]) -> None:
    """Another input is named before everything that follows from it, by the user's name."""
    first = compare(_call(dumps["one"], 0), _call(dumps["one"], 1)).differences[0]
    assert first.operator == "L['x']"


def _fused_wrongly(gm: torch.fx.GraphModule, *_: Any) -> None:
    (last,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    exponential = last.args[0]
    with gm.graph.inserting_after(last):
        other = gm.graph.call_function(torch.ops.aten.sigmoid.default, exponential.args)
    last.replace_all_uses_with(other)
    for node in (last, exponential):
        gm.graph.erase_node(node)


@pytest.mark.slow
def test_results_are_compared_where_a_pass_made_the_last_operator(tmp_path: Path, x: torch.Tensor) -> None:
    """A wrong fusion at the end of a graph leaves no node that both dumps have, but the result."""
    before, after = (
        _dump(
            lambda x: (x + 1, torch.tanh(torch.exp(x + 1))), tmp_path / stage, x, data_dump_stage=stage,
            post_grad_custom_post_pass=_fused_wrongly,
        )
        for stage in ("original", "optimized")
    )  # fmt: skip
    found = compare(before, after)
    assert [(one.node, one.operator) for one in found.differences] == [("result 1", "result")]
    assert found.differences[0].source.startswith(__file__)
    assert main(["diff", str(before), str(after)]) == 1


def test_the_command(dumps: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line for the first difference, a summary, and the status; a folder without a dump is an error."""
    one, off = str(_call(dumps["one"], 0)), str(_call(dumps["off"], 0))
    assert main(["diff", one, str(_call(dumps["same"], 0))]) == 0
    assert capsys.readouterr().out == "6 nodes compared, 0 differ; 0 only in the first, 0 only in the second\n"
    assert main(["diff", one, off]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "mul" in lines[0]
    assert lines[0].endswith("; 2 ULPs apart")
    assert main(["diff", one, off, "--all"]) == 1
    assert len(capsys.readouterr().out.splitlines()) > 2
    assert main(["diff", one, str(tmp_path)]) == 2
    assert "holds no dump" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "content", "words"),
    [
        ("*.pt", None, "is missing; expected: the values of one node"),
        ("*.pt", b"PK\x03\x04 half", "cannot be read"),
        ("*.pt", b"", "cannot be read (EOFError"),
        ("index.json", b'[{"node": "x", ', "cannot be read (JSONDecodeError: Expecting"),
        ("index.json", b'[{"node": "x", "file": "x.pt"}]', "an entry has no operator, source"),
        ("index.json", b"[3]", "expected: the list of nodes"),
        ("index.json", b"\xff", "cannot be read (UnicodeDecodeError"),
    ],
)
def test_a_damaged_dump(
    dumps: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pattern: str,
    content: bytes | None,
    words: str,
) -> None:
    """The message names the file, what was expected and what to do; the status is not the one of dumps that differ."""
    one, copied = _call(dumps["one"], 0), tmp_path / "copied"
    shutil.copytree(one, copied)
    path = min(copied.glob(pattern))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert main(["diff", str(one), str(copied)]) == 2
    said = capsys.readouterr().err
    assert f"npugraph-ex: {path} " in said
    assert words in said
    assert "copy it again" in said


def test_calls_are_paired(tmp_path: Path, dumps: dict[str, Path]) -> None:
    """Of whole runs, each call is compared with its own; runs without a common call are an error."""
    one = tmp_path / "one"
    two = tmp_path / "two"
    for number in (0, 1):
        for target, source in ((one, "one"), (two, "one" if number == 0 else "off")):
            folder = target / "graph__1" / f"call__{number}"
            shutil.copytree(_call(dumps[source], number), folder)
    found = compare(one, two)
    assert found.compared == 12
    assert {difference.call for difference in found.differences} == {"graph__1/call__1"}
    shutil.copytree(_call(dumps["one"], 0), one / "graph__1" / "call__2")
    found = compare(two, one)
    assert (found.calls_only_first, found.calls_only_second) == ([], ["graph__1/call__2"])
    assert not compare(one / "graph__1" / "call__0", one / "graph__1" / "call__0").calls_only_first
    shutil.copytree(one / "graph__1" / "call__0", tmp_path / "alone" / "graph__1" / "call__0")
    found = compare(tmp_path / "alone", one)
    assert (found.compared, found.equal, len(found.calls_only_second)) == (6, False, 2)
    for number in (3, 4):
        shutil.copytree(_call(dumps["one"], 0), tmp_path / "three" / "graph__2" / f"call__{number}")
    with pytest.raises(
        NpuGraphExError, match=r"graph__2/call__3, .*none in common. Name two folders of one graph each"
    ):
        compare(one, tmp_path / "three")
    shutil.copytree(_call(dumps["one"], 0), tmp_path / "three" / "graph__4" / "call__0")
    with pytest.raises(NpuGraphExError, match="none in common"):
        compare(one, tmp_path / "three")


@pytest.mark.parametrize("what", ["runs", "graphs"])
def test_calls_of_two_graphs_are_paired(tmp_path: Path, x: torch.Tensor, what: str) -> None:
    """By their numbers, where each folder holds one graph: of one program, before and after the passes, with other numbers."""
    options: dict[str, Any] = {"dump_tensor_data": True, "data_dump_dir": str(tmp_path / "both")}
    torch.compiler.reset()
    for stage, function in (("original", _chain), ("optimized", _other_chain)):
        if what == "runs":
            options["data_dump_dir"] = str(tmp_path / stage)
        compiled = torch.compile(function, backend="npugraph_ex", options={**options, "data_dump_stage": stage})
        with torch.no_grad():
            for value in (x, x + 1):
                compiled(value.clone())
    graphs = sorted({path.parent.parent for path in tmp_path.rglob("index.json")})
    assert len({path.name for path in graphs}) == 2
    first, second = graphs if what == "graphs" else sorted(tmp_path.iterdir(), reverse=True)
    found = compare(first, second)
    assert (found.compared, found.calls_only_first, found.calls_only_second) == (12, [], [])
    assert {difference.call for difference in found.differences} == {"call__0", "call__1"}
    assert compare(first, second, within=4).differences == []
    shutil.copytree(graphs[1], tmp_path / "a copy")
    assert compare(graphs[0], tmp_path / "a copy").compared == 12
    shutil.rmtree(next(path for path in second.rglob("call__1")))
    assert compare(first, second).calls_only_first == ["call__1"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ulps(dtype: torch.dtype) -> None:
    """Neighbours are one apart on both sides of zero and across powers of two; zeros and NaNs are equal."""
    values = torch.tensor([1.0, -1.0, 2.0, 0.0, float("nan"), float("inf")], dtype=dtype)
    up = torch.nextafter(values, torch.tensor(float("inf"), dtype=dtype))
    assert ulps_apart(values, up).tolist() == [1, 1, 1, 1, 0, 0]
    assert ulps_apart(values, values).tolist() == [0] * 6
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    assert ulps_apart(zeros, zeros.flip(0)).tolist() == [0, 0]
    tiny = torch.nextafter(zeros[0], torch.tensor(1.0, dtype=dtype))
    assert int(ulps_apart(tiny, -tiny)) == 2
    assert int(ulps_apart(values[4], values[0])) == torch.iinfo(torch.int64).max


def test_integers_are_apart_by_their_difference() -> None:
    """Bools and integers too."""
    assert ulps_apart(torch.tensor([-3, 5]), torch.tensor([4, 5])).tolist() == [7, 0]
    assert ulps_apart(torch.tensor([True, False]), torch.tensor([False, False])).tolist() == [1, 0]
