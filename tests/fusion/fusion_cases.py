"""What the tables of must-fuse and must-not-fuse graphs share: how a graph is made, counted, and run in each way.

Values are compared between eager mode, the fused graph run operator by operator, and the captured graph, replayed on
inputs that it was not captured with; all on the device. In float64, on the references, nothing is rounded in between,
and the graphs before and after fusion must agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from fx_helpers import aot_graph, optimise, targets
from torch import fx
from torch.utils import _pytree as pytree

import npugraph_ex
from npugraph_ex.reference.interpreter import CpuInterpreter

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


def assert_same_bits(left: Sequence[Any], right: Sequence[Any]) -> None:
    """Equal dtype, shape and values; NaN equals NaN."""
    for old, new in zip(left, right, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def coarsest(specs: Sequence[Spec]) -> float:
    """The relative step of the coarsest floating dtype among the inputs, which bounds what rounding may change."""
    return max(torch.finfo(dtype).eps for _, dtype in specs if dtype.is_floating_point)


def assert_close(expected: torch.Tensor, actual: torch.Tensor, coarse: float) -> None:
    """Integers differ by one step at most and rarely; floating values by a few roundings of step ``coarse``."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    if not expected.dtype.is_floating_point:
        far = (expected.int() - actual.int()).abs().cpu()
        assert int(far.max()) <= 1, far
        assert float((far == 0).float().mean()) > 0.75
        return
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(actual, expected, rtol=4 * coarse, atol=coarse * max(scale, 1e-6))


def outputs(result: Any) -> list[torch.Tensor]:
    """The tensors that a function returned."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def check_fused(
    rule: str, operator: str, function: Function, specs: Sequence[Spec], count: int, *, dynamic: bool
) -> None:
    """``count`` fusions, no near-miss, the same float64 values to the bit, and close device values in all three ways."""
    gm = aot_graph(function, *tensors(specs), dynamic=dynamic)
    wide = wide_inputs(gm)
    before = in_float64(gm, wide)
    report = optimise(gm)
    assert report.fusions(rule) == count, report.table()
    assert report.near_misses(rule) == (), report.table()
    assert targets(gm).count(operator) == count
    assert_same_bits(before, in_float64(gm, wide))
    check_on_device(function, specs, dynamic=dynamic, rule=rule, count=count)


def check_on_device(function: Function, specs: Sequence[Spec], *, dynamic: bool, rule: str, count: int) -> None:
    """Eager mode, the fused graph uncaptured, and its replay agree on the device; without fusions, the replay alone."""
    for options in ({"force_eager": True}, {})[not count :]:
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(function, backend="npugraph_ex", options=options, dynamic=dynamic, fullgraph=True)
            for seed in (1, 2):  # the second call replays, on other values
                eager_inputs, inputs = tensors(specs, seed), tensors(specs, seed)
                expected, actual = outputs(function(*eager_inputs)), outputs(compiled(*inputs))
                for old, new in zip(expected, actual, strict=True):
                    assert_close(old, new, coarsest(specs))
                for old, new in zip(eager_inputs, inputs, strict=True):
                    assert_close(old, new, coarsest(specs))
        report = npugraph_ex.last_report()
        assert report is not None
        assert report.fusions(rule) == count, report.table()
        assert all(record.outcome != "rolled back" for record in report.passes), report.table()


def check_refused(
    rule: str, function: Function, specs: Sequence[Spec], reason: str, *, edit: Edit | None = None
) -> None:
    """No fusion by the rule, a near-miss with ``reason`` (none when empty), and nothing computed differently."""
    gm = aot_graph(function, *tensors(specs))
    if edit is not None:
        edit(gm)
    report = optimise(gm)
    reasons = " / ".join(miss.reason for miss in report.near_misses(rule))
    assert report.fusions(rule) == 0, report.table()
    assert reason in reasons, reasons
    assert bool(reasons) == bool(reason), reasons
    if edit is None:
        check_on_device(function, specs, dynamic=False, rule=rule, count=0)


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
