"""Scopes: which core limit and deterministic level is in force at each operator, in eager mode and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._ops import OpOverload

import npugraph_ex
from npugraph_ex import scope
from npugraph_ex.aclgraph.scopes import here
from npugraph_ex.errors import ScopeError
from npugraph_ex.frontend.entry.explain import Watch
from npugraph_ex.passes import scopes
from npugraph_ex.passes.base import PassContext

FREE = (24, 48)
_seen: list[tuple[tuple[int, int], int]] = []

_library = torch.library.Library("nge_scope_test", "DEF")
_library.define("look(Tensor x) -> Tensor")
torch.library.register_fake("nge_scope_test::look", torch.empty_like, lib=_library)


@torch.library.impl(_library, "look", "PrivateUse1")
def _look(x: torch.Tensor) -> torch.Tensor:
    """Note what is in force when the kernel is launched."""
    limits = torch.npu.get_stream_limit(torch.npu.current_stream())
    level = torch_npu._C._npu_get_deterministic_level()
    _seen.append(((limits["cube_core_num"], limits["vector_core_num"]), level))
    return x + 1


look = torch.ops.nge_scope_test.look


@pytest.fixture(autouse=True)
def _captures_are_known() -> None:
    """Nothing here looks for races, and with the log on a kernel that fails says so later."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Each test starts with nothing compiled and leaves no scope open and no limit set."""
    torch.compiler.reset()
    _seen.clear()
    with torch.no_grad():
        yield
    assert here.opened == []
    assert torch.npu.get_stream_limit(torch.npu.current_stream()) == {"cube_core_num": 24, "vector_core_num": 48}
    assert torch_npu._C._npu_get_deterministic_level() == 0
    assert not torch.are_deterministic_algorithms_enabled()


def nested(x: torch.Tensor) -> torch.Tensor:
    """Operators before, inside, further inside, after the inner and after both scopes."""
    x = look(x)
    with scope.limit_core_num(4, 8):
        x = look(x)
        with scope.deterministic(1), scope.limit_core_num(2, -1):
            x = look(x)
        x = look(x)
    return look(x)


NESTED = [(FREE, 0), ((4, 8), 0), ((2, 8), 1), ((4, 8), 0), (FREE, 0)]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function under this backend."""
    return torch.compile(function, backend="npugraph_ex", fullgraph=True, options=options)


def test_eager_scopes_nest_and_inherit() -> None:
    """An inner scope keeps what it does not say itself; each exit puts back what was before."""
    assert nested(torch.zeros(2, device="npu")).cpu().tolist() == [5, 5]
    assert _seen == NESTED


@pytest.mark.parametrize("options", [{}, {"force_eager": True}, {"check_numerics": False, "inplace_pass": False}])
def test_compiled_scopes_are_those_of_eager(options: dict[str, object]) -> None:
    """Each operator is captured, or run, under the limit and level of its scope; values are eager's at every call."""
    fast = compiled(nested, **options)
    results = [fast(torch.full((2,), float(start), device="npu")) for start in range(3)]
    assert [result.cpu().tolist() for result in results] == [[5, 5], [6, 6], [7, 7]]
    assert _seen[:5] == NESTED


def test_a_dump_runs_under_the_scopes(tmp_path: Any) -> None:
    """The instrumented run sets them too."""
    compiled(nested, dump_tensor_data=True, data_dump_dir=str(tmp_path))(torch.zeros(2, device="npu"))
    assert _seen == NESTED


def test_torch_npus_names_reach_this_library() -> None:
    """`torch.npu.npugraph_ex.scope` is the same pair, eager and compiled."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.npu.npugraph_ex.scope.limit_core_num(3, 5), torch.npu.npugraph_ex.scope.deterministic(2):
            return look(x)

    function(torch.zeros(1, device="npu"))
    compiled(function)(torch.zeros(1, device="npu"))
    assert _seen == [((3, 5), 2)] * 2


def test_another_level_compiles_anew() -> None:
    """The level is guarded: each value has its own graph, also where Dynamo takes the number for a varying one."""

    def function(x: torch.Tensor, level: int) -> torch.Tensor:
        with scope.deterministic(level):
            return look(x)

    watch, fast = Watch(), compiled(function)
    for level in (0, 1, 2, 1, 0):
        fast(torch.zeros(1, device="npu"), level)
    assert [level for _, level in _seen] == [0, 1, 2]
    assert len(watch.explanation().graphs) == 3


def test_a_scope_around_the_call_is_part_of_the_key() -> None:
    """Compiled code called under a limit is captured under it, and not replayed without it."""
    fast, x = compiled(look), torch.zeros(1, device="npu")
    for _ in range(2):
        fast(x)
        with scope.limit_core_num(6, 6):
            fast(x)
    assert [limit for limit, _ in _seen] == [FREE, (6, 6)]


def test_a_streams_limit_is_inherited_by_the_capture() -> None:
    """What torch.npu.set_stream_limit said of the current stream holds for the stream of the capture."""
    stream = torch.npu.current_stream()
    torch.npu.set_stream_limit(stream, 7, 9)
    try:
        compiled(look)(torch.zeros(1, device="npu"))
    finally:
        torch.npu.reset_stream_limit(stream)
    assert _seen == [((7, 9), 0)]


def test_another_stream_in_eager_mode() -> None:
    """`stream=` limits that stream and not the current one."""
    side, x = torch.npu.Stream(), torch.zeros(1, device="npu")
    with scope.limit_core_num(5, 5, stream=side):
        look(x)
        with torch.npu.stream(side):
            look(x)
    with torch.npu.stream(side):
        look(x)
    assert [limit for limit, _ in _seen] == [FREE, (5, 5), FREE]


def test_an_exception_closes_the_scopes() -> None:
    """A kernel that fails inside a scope leaves no limit behind, in eager mode and in compiled code run uncaptured."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with scope.limit_core_num(4, 8):
            return look(x).index_select(0, y)

    bad = torch.tensor([10], device="npu")
    for attempt in (function, compiled(function, force_eager=True)):
        with pytest.raises((RuntimeError, IndexError)):
            attempt(torch.zeros(2, device="npu"), bad)
    assert [limit for limit, _ in _seen] == [(4, 8)] * 2


def test_nothing_is_fused_across_a_limit() -> None:
    """Two operators of a default rule in two scopes stay two, and the report says why."""

    def function(x: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with scope.limit_core_num(4, 8):
            y, _, total = torch_npu.npu_add_rms_norm(x, x, gamma)
        return (*torch_npu.npu_dynamic_quant(y), total)

    halves = {"device": "npu", "dtype": torch.float16}
    (entry,) = npugraph_ex.explain(function, torch.randn(4, 32, **halves), torch.ones(32, **halves)).graphs
    assert entry.graph.report.fusions() == 0
    (miss,) = entry.graph.report.near_misses("add_rms_norm_dynamic_quant")
    assert "core_limit" in miss.reason


@pytest.mark.parametrize("wrong", [0, -2, True, 1.5, "4", None])
def test_wrong_core_counts_are_refused(wrong: Any) -> None:
    """The message names the argument, what is allowed and what came."""
    with pytest.raises(ScopeError, match=r"op_vectorcore_num takes an int >= 1.*got"):
        scope.limit_core_num(4, wrong)


@pytest.mark.parametrize("wrong", [-1, 4, True, "1", None])
def test_wrong_levels_are_refused(wrong: Any) -> None:
    """As for core counts."""
    with pytest.raises(ScopeError, match="level takes"):
        scope.deterministic(wrong)


def test_more_cores_than_the_device_has() -> None:
    """The device's own number is in the message, and nothing was changed."""
    with pytest.raises(ScopeError, match=r"limit of 25 cores.*the device has: 24"), scope.limit_core_num(25, 8):
        pass


def _graph(*calls: tuple[str, tuple[Any, ...]]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name, args in calls:
        if name == "relu":
            x = graph.call_function(torch.ops.aten.relu.default, (x,))
        else:
            graph.call_function(getattr(torch.ops.air, name).default, args)
    graph.output((x,))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([("scope_enter", (["_op_aicore_num"], ["4"])), ("relu", ())], "opens a scope that the graph does not close"),
        ([("relu", ()), ("scope_exit", ())], "closes a scope, and none is open"),
        ([("scope_enter", (["_op_cores"], ["4"])), ("scope_exit", ())], "knows the keys .*; got _op_cores"),
        ([("scope_enter", (["_op_aicore_num"], ["four"])), ("scope_exit", ())], "whole number as text, got 'four'"),
        ([("scope_enter", (["_op_aicore_num"], [])), ("scope_exit", ())], "one value for each key"),
    ],
)
def test_a_users_pass_that_does_not_balance_scopes(calls: list[Any], message: str) -> None:
    """Scope nodes that a pass inserted, in TorchAir's namespace, are validated with the node's name."""
    with pytest.raises(ScopeError, match=message):
        scopes.label(_graph(*calls), PassContext(npugraph_ex.config.Options(), ()))


def test_a_users_pass_may_insert_scopes() -> None:
    """Nodes between `air.scope_enter` and `air.scope_exit` run under what they say."""

    def insert(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=look.default)
        with gm.graph.inserting_before(node):
            gm.graph.call_function(
                torch.ops.air.scope_enter.default, (["_op_aicore_num", "_op_vectorcore_num"], ["2", "3"])
            )
        with gm.graph.inserting_after(node):
            gm.graph.call_function(torch.ops.air.scope_exit.default)

    for name in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass"):
        torch.compiler.reset()
        assert compiled(look, **{name: insert})(torch.zeros(1, device="npu")).item() == 1
    assert [limit for limit, _ in _seen] == [(2, 3)] * 2


@pytest.mark.parametrize("option", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
@pytest.mark.parametrize("target", [torch.ops.air.scope_enter.default, torch.ops.air.scope_exit.default])
def test_a_users_pass_is_named_that_leaves_a_scope_open(option: str, target: OpOverload) -> None:
    """And the node, with what a pass must do; nobody speaks of the user's own `with` blocks, as after a graph break."""

    def half(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=look.default)
        with gm.graph.inserting_before(node):
            gm.graph.call_function(target, (["_op_aicore_num"], ["2"]) if target.name() == "air::scope_enter" else ())

    with pytest.raises(Exception, match=r"Pass .*half.* left \w+ \(air\.scope_(enter|exit)\.default\) alone") as raised:
        compiled(look, **{option: half})(torch.zeros(1, device="npu"))
    assert "ScopeError" in repr(raised.value) + str(raised.value)
    assert "graph break" not in str(raised.value)


def test_work_of_the_host_in_a_stream_scope() -> None:
    """A tensor on the CPU that is made inside the scope and read or returned outside has no stream that could keep its memory."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with scope.npu_stream_switch("side"):
            made = torch.arange(8) * 2
            more = made + 1
        return x + (made * 3).to(x.device) + more.to(x.device), made

    x = torch.ones(8, device="npu")
    compiled = torch.compile(function, backend="npugraph_ex", fullgraph=True, options={"force_eager": True})
    assert [got.tolist() for got in compiled(x)] == [expected.tolist() for expected in function(x)]


def test_a_limit_of_a_whole_graph_costs_two_nodes() -> None:
    """Neighbours under one limit share one pair of scope nodes, whatever views lie between them."""
    graphs: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        context = PassContext(npugraph_ex.config.Options(), inputs)
        scopes.label(gm, context)
        scopes.lower(gm, context)
        graphs.append(gm)
        return gm.forward

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope.limit_core_num(4, 8):
            x = x.relu()
        with scope.limit_core_num(4, 8):
            return x.t().exp()

    torch.compile(function, backend=backend)(torch.zeros(2, 2, device="npu"))
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert names[0] == "npugraph_ex.scope_enter.default"
    assert names[-1] == "npugraph_ex.scope_exit.default"
    assert len(names) == 5
