"""What the tables of must-fuse and must-not-fuse graphs share: how a graph is made, counted, and run in each way.

Graph by graph: counts, reasons, and values in float64 on the references, where nothing is rounded in between, so that
the graphs before and after fusion must agree to the bit. All graphs of a table at once, in one compile, on the device:
eager mode, the fused graph run operator by operator, and the captured graph, replayed on inputs that it was not captured
with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, optimise, targets
from torch import fx
from torch.utils import _pytree as pytree

import npugraph_ex
from npugraph_ex.operators import CpuInterpreter
from npugraph_ex.report import graphs
from npugraph_ex.report.passes import PassReport

Function = Callable[..., Any]
Spec = tuple[tuple[int, ...], torch.dtype]
Edit = Callable[[fx.GraphModule], None]


def tensors(specs: Sequence[Spec], seed: int = 1, device: str = "npu") -> list[torch.Tensor]:
    """One tensor for each shape and dtype; none trivial, none near zero on average."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape, dtype in specs:
        if dtype.is_floating_point:
            made.append((torch.randn(shape, generator=generator) + 0.25).to(dtype))
        else:
            made.append(torch.randint(-5, 6, shape, generator=generator).to(dtype))
    return [tensor.to(device) for tensor in made]


def wide_inputs(gm: fx.GraphModule) -> list[Any]:
    """Inputs for the graph on the CPU, every floating one in float64."""
    generator = torch.Generator().manual_seed(2)
    made: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            made.append(value.node.hint)
            continue
        shape = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
        if value.dtype.is_floating_point:
            made.append(torch.randn(shape, generator=generator, dtype=torch.float64) + 0.25)
        else:
            made.append(torch.randint(-5, 6, shape, generator=generator).to(value.dtype))
    return made


class _Wide(CpuInterpreter):
    """Runs a graph in float64 throughout: a cast to a narrower floating dtype is none."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one operator with every floating dtype, written out or as a code, replaced by float64."""
        args, kwargs = pytree.tree_map(
            lambda leaf: torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf,
            (args, kwargs),
        )
        if getattr(target, "__name__", "") == "npu_dtype_cast.default":
            args = (args[0], torch.float64)
        return super().call_function(target, args, kwargs)


def in_float64(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The graph's results on ``wide_inputs``."""
    with torch.no_grad():
        return outputs(_Wide(gm).run(*copies(inputs)))


def copies(values: Sequence[Any]) -> list[Any]:
    """The same values in memory of their own."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def coarsest(specs: Sequence[Spec]) -> float:
    """The relative step of the coarsest floating dtype among the inputs, which bounds what rounding may change."""
    return max(torch.finfo(dtype).eps for _, dtype in specs if dtype.is_floating_point)


def assert_close(expected: torch.Tensor, actual: torch.Tensor, coarse: float) -> None:
    """Integers differ by one step at most and rarely; floating values by a few roundings of step ``coarse``."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert actual.device == expected.device
    if not expected.numel():
        return
    expected, actual = expected.cpu(), actual.cpu()  # a comparison on the device is a dozen kernels
    if torch.equal(expected, actual):  # mostly; a comparison of float16 with a tolerance takes a hundred times as long
        return
    if not expected.dtype.is_floating_point:
        far = (expected.int() - actual.int()).abs()
        assert int(far.max()) <= 1, far
        assert float((far == 0).float().mean()) > 0.75
        return
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(actual, expected, rtol=4 * coarse, atol=coarse * max(scale, 1e-6))


def outputs(result: Any) -> list[torch.Tensor]:
    """The tensors that a function returned."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


@dataclass(frozen=True)
class Table:
    """The graphs of one rule.

    Attributes:
        rule: its name.
        operator: the fused operator that it puts into the graph.
        must_fuse: for each graph, how many fusions there must be.
        must_not_fuse: for each graph, what the reason must contain; empty where nothing resembles the pattern.
        edits: graphs that are edited after tracing, by name: the graph, the edit and the reason.
        specs: the inputs of every graph that is not in ``other_specs``.
        other_specs: for graphs that take other inputs.
        unknown: graphs that are not run: an operator has no reference, or draws random numbers.
        exact: whether the fused operator rounds no differently in float64.
    """

    rule: str
    operator: str
    must_fuse: Mapping[Function, int]
    must_not_fuse: Mapping[Function, str]
    edits: Mapping[str, tuple[Function, Edit, str]]
    specs: Sequence[Spec]
    other_specs: Mapping[Function, Sequence[Spec]] = field(default_factory=dict)
    unknown: Sequence[Function] = ()
    exact: bool = True

    def specs_of(self, function: Function) -> Sequence[Spec]:
        """The shapes and dtypes of the inputs of one graph."""
        return self.other_specs.get(function, self.specs)

    def check_size(self) -> None:
        """Each side of the table has at least twelve graphs that run on the device."""
        assert len(self.must_fuse) >= 12
        assert len(self.runnable()) - len(self.must_fuse) + len(self.edits) >= 12

    def runnable(self) -> list[Function]:
        """The graphs that run on the device as they are."""
        return [f for f in (*self.must_fuse, *self.must_not_fuse) if f not in self.unknown]

    def check_fused(
        self, function: Function, *, dynamic: bool, specs: Sequence[Spec] = (), count: int | None = None
    ) -> PassReport:
        """As many fusions as the table says, no near-miss, and the same float64 values."""
        gm = aot_graph(function, *tensors(specs or self.specs_of(function)), dynamic=dynamic)
        wide = wide_inputs(gm)
        before = in_float64(gm, wide)
        report = optimise(gm, fusion_rules={self.rule: True})
        wanted = self.must_fuse[function] if count is None else count
        assert report.fusions(self.rule) == wanted, report.table()
        assert report.near_misses(self.rule) == (), report.table()
        assert targets(gm).count(self.operator) == wanted
        self._assert_same_values(before, in_float64(gm, wide))
        return report

    def check_refused(
        self, function: Function, reason: str | None = None, *, edit: Edit = lambda _: None, specs: Sequence[Spec] = ()
    ) -> None:
        """No fusion by the rule, a near-miss with ``reason`` (none when empty), and the same float64 values."""
        reason = self.must_not_fuse[function] if reason is None else reason
        gm = aot_graph(function, *tensors(specs or self.specs_of(function)))
        edit(gm)
        wide = wide_inputs(gm)
        before = in_float64(gm, wide) if function not in self.unknown else []
        report = optimise(gm, fusion_rules={self.rule: True})
        reasons = " / ".join(miss.reason for miss in report.near_misses(self.rule))
        assert report.fusions(self.rule) == 0, report.table()
        assert reason in reasons, reasons
        assert bool(reasons) == bool(reason), reasons
        self._assert_same_values(before, in_float64(gm, wide) if function not in self.unknown else [])

    def _assert_same_values(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        close = 0 if self.exact else 1e-14
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new, old, rtol=close, atol=close, equal_nan=True)

    def check_on_device(self, *, dynamic: bool) -> None:
        """Graphs in one compile: eager mode, the captured graph, and its replay on other values agree.

        With symbols for sizes these are all graphs; where sizes are numbers, the ones that fuse, which also run uncaptured.
        """
        graphs = self.runnable() if dynamic else [*self.must_fuse]
        self._check_together(graphs, seeds=(1, 2), dynamic=dynamic)  # the second call replays
        if not dynamic:
            self._check_together(graphs, seeds=(3,), dynamic=False, force_eager=True)

    def _check_together(
        self, functions: Sequence[Function], *, seeds: Sequence[int], dynamic: bool, force_eager: bool = False
    ) -> None:
        def run_all(inputs: list[list[torch.Tensor]]) -> list[Any]:
            return [function(*own) for function, own in zip(functions, inputs, strict=True)]

        torch.compiler.reset()
        options = {"force_eager": force_eager, "fusion_rules": {self.rule: True}}
        compiled = torch.compile(run_all, backend="npugraph_ex", options=options, dynamic=dynamic, fullgraph=True)
        inputs = [tensors(self.specs_of(function)) for function in functions]

        def call(seed: int) -> None:
            # In the memory of the call before, whose results are gone: anything else would be captured again.
            for function, own in zip(functions, inputs, strict=True):
                for tensor, value in zip(own, tensors(self.specs_of(function), seed), strict=True):
                    tensor.copy_(value)
            eager_inputs = [copies(own) for own in inputs]
            with torch.no_grad():
                expected, actual = run_all(eager_inputs), compiled(inputs)
            for function, *parts in zip(functions, expected, actual, eager_inputs, inputs, strict=True):
                self._assert_close(function, *parts)

        # Else torch takes floats of the functions for symbols at first, and begins anew once it has made numbers of them.
        with torch._dynamo.config.patch(specialize_float=True):
            for seed in seeds:
                call(seed)
        report = npugraph_ex.last_report()
        assert report is not None
        assert report.fusions(self.rule) == sum(self.must_fuse.values()), report.table()
        assert all(record.outcome != "rolled back" for record in report.passes), report.table()

    def check_edit_on_device(self, name: str) -> None:
        """An edited graph, fused nowhere, computes run, captured and replayed what it computes operator by operator."""
        function, edit, _ = self.edits[name]
        gm = aot_graph(function, *tensors(self.specs_of(function)))
        edit(gm)
        gm.recompile()
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        specs = [(tuple(value.shape), value.dtype) for value in values]
        for eager in (True, False):
            options = {"force_eager": eager, "fusion_rules": {self.rule: True}}
            compiled = npugraph_ex.compile_fx(fx.GraphModule(gm, copy.deepcopy(gm.graph)), values, options)
            for seed in (1, 2, 3):
                left, right = (tensors(specs, seed) for _ in range(2))
                with torch.no_grad():
                    expected, actual = gm(*left), compiled(*right)
                self._assert_close(function, expected, actual, left, right)
                del actual  # while results are alive, the next call is captured anew
            record = graphs.graph_records()[-1]
            assert record.report.fusions(self.rule) == 0, record.report.table()
            assert record.fate == ("force_eager" if eager else "captured")

    def _assert_close(self, function: Function, expected: Any, actual: Any, left: Any, right: Any) -> None:
        """Outputs, and inputs after the call, agree."""
        try:
            for old, new in zip((*outputs(expected), *left), (*outputs(actual), *right), strict=True):
                assert_close(old, new, coarsest(self.specs_of(function)))
        except AssertionError as error:
            raise AssertionError(f"in {function.__name__}: {error}") from error


class TableTests:
    """The tests of one table: a module's own class has it as ``table``. ``conftest`` hands out its rows."""

    table: Table

    def test_it_is_large_enough(self) -> None:
        """Twelve graphs a side, and all of them run on the device."""
        self.table.check_size()

    @pytest.mark.slow
    def test_fuses_and_computes_the_same(self, fusing: Function, dynamic: bool) -> None:
        """The expected number of fusions; in float64 equal to the bit, or nearly where the operator rounds otherwise."""
        self.table.check_fused(fusing, dynamic=dynamic)

    def test_is_left_alone_with_a_reason(self, refused: Function) -> None:
        """No fusion, and the report says why wherever the graph looks like the pattern."""
        self.table.check_refused(refused)

    @pytest.mark.slow
    def test_scopes_and_writes_keep_operators_apart(self, edited: str) -> None:
        """Two streams, two core limits, a write in between: the operators stay as they are, and run as before."""
        function, edit, reason = self.table.edits[edited]
        self.table.check_refused(function, reason, edit=edit)
        self.table.check_edit_on_device(edited)

    @pytest.mark.slow
    def test_eager_fused_and_replayed_agree(self, dynamic: bool) -> None:
        """Every graph of the table, on the device."""
        self.table.check_on_device(dynamic=dynamic)


def hand_out_rows(metafunc: pytest.Metafunc) -> None:
    """Parametrise one test of ``TableTests`` with the rows of its table."""
    table = metafunc.cls.table
    rows = {"fusing": table.must_fuse, "refused": table.must_not_fuse, "edited": table.edits}
    for name in rows.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, list(rows[name]), ids=lambda row: row if isinstance(row, str) else row.__name__)
    if "dynamic" in metafunc.fixturenames:
        metafunc.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def find(gm: fx.GraphModule, name: str) -> fx.Node:
    """The last call of the operator called ``name``."""
    return [
        n for n in gm.graph.nodes if n.op == "call_function" and getattr(n.target, "__name__", "").split(".")[0] == name
    ][-1]


def on_stream(name: str, label: str = "side") -> Edit:
    """Puts the last call of an operator on another stream."""

    def edit(gm: fx.GraphModule) -> None:
        find(gm, name).meta["stream_label"] = label

    return edit


def limited_cores(name: str) -> Edit:
    """Gives the last call of an operator a core limit of its own."""

    def edit(gm: fx.GraphModule) -> None:
        find(gm, name).meta["core_limit"] = (4, 8)

    return edit


def written_before(name: str, argument: int = 0) -> Edit:
    """Writes the graph's input number ``argument`` just before the last call of an operator."""

    def edit(gm: fx.GraphModule) -> None:
        target = find(gm, name)
        source = gm.graph.find_nodes(op="placeholder")[argument]
        with gm.graph.inserting_before(target):
            write = gm.graph.call_function(torch.ops.aten.mul_.Tensor, (source, 2))
        write.meta["val"] = source.meta["val"]

    return edit


def edits_at(function: Function, name: str) -> dict[str, tuple[Function, Edit, str]]:
    """The edits after which no pattern that ends with the last call of an operator may fuse, each with its reason."""
    return {
        "other stream": (function, on_stream(name), "has 'side'"),
        "core limit": (function, limited_cores(name), "core_limit"),
        "input written in between": (function, written_before(name), "writes arg0_1 between the matched operators"),
    }
