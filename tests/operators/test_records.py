"""Records of operators: each in the file of its name, wrong ones refused by record and field, a user's own as good as ours."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import npu_emulator
from npu_emulator.clock.roofline import LAUNCH_US
from npugraph_ex import operators
from npugraph_ex.fusion.arguments import effective_arguments
from npugraph_ex.graph.parts import writes_by_index
from npugraph_ex.operators import (
    OPERATORS,
    Operator,
    OperatorRecordError,
    PreparedGraph,
    Work,
    call,
    formula_of,
    record_of,
    refused,
)


@pytest.fixture(autouse=True)
def _own_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that a test adds are gone after it."""
    monkeypatch.setattr(OPERATORS, "_records", dict(OPERATORS._records))


@pytest.fixture
def scaled() -> torch._ops.OpOverload:
    """An operator of a library of ours: ``x * by``, and what a dtype code means to it."""
    with torch.library._scoped_library("npugraph_ex_records", "DEF") as library:
        library.define("scaled(Tensor x, float by=2.0, int? dtype=None) -> Tensor")
        library.define("scaled.twice(Tensor x, Tensor y) -> Tensor")
        yield torch.ops.npugraph_ex_records.scaled.default


def scale(x: torch.Tensor, by: float = 2.0, dtype: int | None = None) -> torch.Tensor:
    """The formula of ``scaled``."""
    return x * by


def example() -> operators.Call:
    """One call of ``scaled``."""
    return call(torch.randn(3))


def test_each_file_holds_the_record_of_its_name() -> None:
    """A reader finds an operator by its name, and a file without a record is found out."""
    files = {module.name for module in pkgutil.iter_modules(operators.__path__) if not module.name.startswith("_")}
    named = {name.split("::")[1].split(".")[0].removeprefix("_") for name in OPERATORS}
    assert files <= named
    assert len(files) > 20


@pytest.mark.parametrize("name", OPERATORS)
def test_every_record_says_where_it_is_from(name: str) -> None:
    """Each has a source; each formula has an example, and so is checked."""
    assert OPERATORS[name].source
    assert bool(OPERATORS[name].examples) == (OPERATORS[name].formula is not None)


def test_examples_are_the_same_each_time_and_move_no_generator() -> None:
    """Two askers get equal tensors, and random numbers go on as if nobody had asked."""
    before = torch.get_rng_state()
    first, second = (OPERATORS["npu::npu_add_rms_norm"].calls()[0].args for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_users_record_is_used_as_ours_are(scaled: torch._ops.OpOverload) -> None:
    """Its formula computes on the CPU, and its synonyms make calls equal, also where the operator was looked at before."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    written, omitted = (graph.call_function(scaled, arguments) for arguments in ((x, 3.0, 1), (x, 3.0)))
    graph.output((written, omitted))
    assert effective_arguments(written) != effective_arguments(omitted)

    Operator(name="npugraph_ex_records::scaled", examples=(example,), synonyms={"dtype": {1: None}})(scale)
    assert effective_arguments(written) == effective_arguments(omitted)
    results = PreparedGraph(graph).run(torch.tensor([1.0, 2.0]))
    assert [result.tolist() for result in results] == [[3.0, 6.0], [3.0, 6.0]]


@pytest.mark.parametrize(
    ("name", "expected"), [("npu_scatter_nd_update", True), ("npu_scatter_nd_update_", True), ("npu_swiglu", False)]
)
def test_where_an_operator_writes_is_asked_of_its_record(name: str, expected: bool) -> None:
    """The stream check takes the whole of a tensor whose written elements only an index tensor tells."""
    graph = fx.Graph()
    x, indices, updates = (graph.placeholder(argument) for argument in ("x", "indices", "updates"))
    arguments = (x, indices, updates) if expected else (x,)
    node = graph.call_function(getattr(torch.ops.npu, name).default, arguments)
    assert writes_by_index(node) == expected


def test_a_second_record_of_a_name_is_refused_and_the_same_one_replaces() -> None:
    """Whoever describes an operator anew is told who did before; a cell that runs twice is no second description."""
    with pytest.raises(
        OperatorRecordError, match=r"'npu::npu_swiglu', field name: .*operators\.npu_swiglu\.npu_swiglu"
    ):
        Operator(name="npu::npu_swiglu", examples=(example,))(scale)
    for source in ("first", "second"):
        with pytest.warns(RuntimeWarning, match="no operator mine::scaled"):  # the device cannot run it
            Operator(name="mine::scaled", examples=(example,), source=source)(scale)
    assert OPERATORS["mine::scaled"].source == "second"


def _both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _as_wide(x: torch.Tensor, y: torch.Tensor) -> None:
    if x.shape != y.shape:
        raise refused("scaled", "y.shape", y.shape, f"that of x, {tuple(x.shape)}")


def _squared(x: torch.Tensor, y: torch.Tensor) -> Work:
    return Work(products=1e12, elements=y.numel())


def _record_both(**fields: Any) -> Callable[..., torch.Tensor]:
    """Bring ``scaled.twice`` to the device; return it."""
    Operator(
        name="npugraph_ex_records::scaled.twice", examples=(lambda: call(torch.ones(2), torch.ones(2)),), **fields
    )(_both)
    return torch.ops.npugraph_ex_records.scaled.twice


@pytest.mark.usefixtures("scaled")
def test_an_overload_has_a_record_of_its_own() -> None:
    """It computes on the device, and the default overload goes on without one; facts of an operator are those of its overloads."""
    twice = _record_both()
    assert twice(torch.ones(2).npu(), torch.ones(2).npu()).tolist() == [2.0, 2.0]
    packet = torch.ops.npugraph_ex_records.scaled
    assert (formula_of(packet.twice), formula_of(packet.default)) == (_both, None)
    base = Operator(name="npugraph_ex_records::scaled", examples=(example,))
    base(scale)
    assert formula_of(packet.default) is scale
    assert formula_of(torch.ops.npu.npu_fused_infer_attention_score.out) is None
    assert record_of(torch.ops.npu.npu_fused_infer_attention_score.out).host_arguments


@pytest.mark.usefixtures("scaled")
def test_constraints_refuse_before_anything_is_launched() -> None:
    """A wrong call raises at the call with the device's code, in a capture too, and the capture goes on."""
    twice = _record_both(constraints=_as_wide)
    x, y, graph = torch.ones(2).npu(), torch.ones(1).npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        with pytest.raises(
            RuntimeError, match=r"scaled: y\.shape should be that of x, \(2,\); it is \(1,\)\..* 161002"
        ) as caught:
            twice(x, y)
        out = twice(x, x)
    graph.replay()
    assert caught.value.code == 161002
    assert out.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("scaled")
def test_work_is_priced() -> None:
    """10^12 operations on float16 take as long as the chip's peak says, whatever the tensors' size."""
    twice, chip = _record_both(work=_squared), npu_emulator.chips.DEFAULT
    x = torch.ones(2).npu().half()
    with npu_emulator.timeline() as timeline:
        twice(x, x)
    assert timeline.spans[-1].duration - LAUNCH_US == pytest.approx(1e18 / chip.half_flops)


def _other(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("name", {"name": "npu.scaled"}),
        ("name", {"name": "npu::scaled.default"}),
        ("dtypes", {"dtypes": torch.half}),
        ("constraints", {"constraints": _other}),
        ("work", {"work": _other}),
        ("examples", {"examples": ()}),
        ("examples", {"examples": example}),
        ("examples", {"examples": (call(1),)}),
        ("dtypes", {"dtypes": ("float16",)}),
        ("writes", {"writes": "cache"}),
        ("writes", {"writes": ("cache",)}),
        ("host_arguments", {"host_arguments": ("lengths",)}),
        ("synonyms", {"synonyms": {"dst_type": {1: None}}}),
        ("near_misses", {"near_misses": {"dst_type": (16,)}}),
        ("before_rounding", {"before_rounding": _other}),
        ("workspace", {"workspace": "mine::space"}),
        ("schema", {"schema": "(Tensor x) -> Tensor"}),
        ("formula", {"formula": scale}),
    ],
)
def test_a_wrong_field_is_named(field: str, fields: dict[str, Any]) -> None:
    """The error names the record and the field at once, not at the first compilation; nothing was added."""
    given: dict[str, Any] = {"name": "mine::scaled", "examples": (example,), **fields}
    with pytest.raises(OperatorRecordError) as caught:
        Operator(**given)(scale)
    assert f"Operator {given['name']!r}, field {field}: " in str(caught.value)
    assert given["name"] not in OPERATORS


def test_what_is_no_field_is_named() -> None:
    """A typing error of a client gets the nearest field and all of them; a record without its name is no bare TypeError."""
    with pytest.raises(
        OperatorRecordError, match=r"no field 'dtype'; did you mean 'dtypes'\? it has name, formula, source,"
    ):
        Operator(name="mine::scaled", dtype=(torch.float16,))  # type: ignore[call-arg]
    for given in (("mine::scaled",), ()):
        with pytest.raises(OperatorRecordError, match=r"by name, its own among them"):
            Operator(*given, examples=())  # type: ignore[call-arg]


def test_importing_the_library_loads_no_record() -> None:
    """Four hundred operators must cost those nothing who only import."""
    program = (
        "import sys, npugraph_ex; assert not [name for name in sys.modules if name.startswith('npugraph_ex.operators')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_listeners_hear_of_new_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that was started before a record came gets its kernel all the same."""
    heard: list[tuple[str, Callable[..., Any] | None]] = []
    monkeypatch.setattr(OPERATORS, "_listeners", [])
    OPERATORS.listen(lambda name, record: heard.append((name, record.formula)))
    Operator(name="mine::scaled", examples=(example,))(scale)
    assert heard == [("mine::scaled", scale)]


def test_the_documented_record_runs_on_the_device() -> None:
    """The page's own examples: the operators compute on an NPU, one into its argument, and their examples are there for checks."""
    page = (Path(__file__).parent.parent.parent / "docs" / "reference" / "operators.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        # The documentation's own code, under a name that no other test of the page defines.
        exec(block.replace("mine::", "of_the_page::"), {})  # noqa: S102
    x = torch.randn(4, 16)
    assert torch.equal(torch.ops.of_the_page.scaled_silu(x.npu(), 3.0).cpu(), torch.nn.functional.silu(x) * 3.0)
    out = torch.empty(4, 16).npu()
    torch.ops.of_the_page.fill_scaled(out, x.npu(), 3.0)
    assert torch.equal(out.cpu(), x * 3.0)
    for name in ("scaled_silu", "fill_scaled"):
        assert OPERATORS[f"of_the_page::{name}"].calls()[0].kwargs == {"scale": 2.0}
