"""Nested compile regions: one trace for equal layers, and the graph, values, fusions and streams that there are without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from device_helpers import NPU, check, compiled, random
from torch._dynamo.exc import BackendCompilerFailed

import npugraph_ex
from npugraph_ex import last_report
from npugraph_ex.report import graphs

Function = Callable[..., Any]


def in_regions(function: Function) -> Function:
    """The function as a nested compile region."""
    return torch.compiler.nested_compile_region(function)


def twice(function: Function, wrap: Function) -> Function:
    """A program that calls `function` twice, each time through `wrap`."""
    region = wrap(function)

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any]:
        return region(x, y), region(y + 1, x)

    return program


def layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rule add_rms_norm_dynamic_quant fuses, and a sum that ends in the next region's norm."""
    y, _, added = torch_npu.npu_add_rms_norm(x, residual, torch.ones_like(x[0]))
    quantised, scale = torch_npu.npu_dynamic_quant(y)
    return quantised * scale[:, None].half(), added


def stack(wrap: Function) -> Function:
    """Three layers, each through `wrap`."""
    region = wrap(layer)

    def program(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(3):
            x, residual = region(x, residual)
        return x, residual

    return program


def optimised(function: Function, calls: list[tuple[torch.Tensor, ...]], **how: Any) -> tuple[list[str], list[Any]]:
    """The operators of the optimised graph, in order, and the results of the calls."""
    run = compiled(function, **how)
    with torch.no_grad():
        results = [run(*[value.clone() for value in call]) for call in calls]
    return [call.operator for call in graphs.graph_records()[-1].after], results


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_regions_change_neither_graph_nor_values(dynamic: bool) -> None:
    """Three layers in regions become the operators of three layers, fused in each, with equal values in every replay."""
    calls = [(random(rows, 16, dtype=torch.float16), random(rows, 16, dtype=torch.float16)) for rows in (4, 4, 4, 6)]
    wanted, without = optimised(stack(lambda function: function), calls, dynamic=dynamic)
    found, results = optimised(stack(in_regions), calls, dynamic=dynamic)
    assert found == wanted
    assert sum("npu_add_rms_norm_dynamic_quant" in name for name in found) == 3
    for one, other in zip(results, without, strict=True):
        for have, want in zip(one, other, strict=True):
            torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0)


def constants(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Holds a constant tensor."""
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device="npu"), y * 2


def nothing(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    """Returns None beside a tensor."""
    return None, x + y


def parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Takes a value apart."""
    left, right = (x + y).chunk(2)
    return left.t() @ right


inner = in_regions(lambda x, y: torch.relu(x) + y)


def region_in_region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Calls another region twice."""
    return inner(x, y) * inner(y, x)


def condition(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Holds an operator with subgraphs of its own."""
    return torch.cond(x.sum() > 0, lambda a, b: a + b, lambda a, b: a - b, (x, y))


def chosen(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Has a size that depends on data."""
    return x[y > 0].sum() + x


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes an argument."""
    x.add_(1)
    return x * y


def written_in_part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes views of both arguments."""
    x[1:3].copy_(y[:2])
    y.index_copy_(0, torch.tensor([0, 2], device="npu"), x[:2])
    return x.sum(0)


def viewed_undeclared(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a value that is also read through a view whose schema declares none."""
    total = x + y
    return total, torch.ops.aten._unsafe_view.default(total, [2, 8]) * 2


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [nothing, parts, region_in_region, condition, chosen, written, written_in_part])
def test_values_of_regions(function: Function, dynamic: bool) -> None:
    """What a region holds, returns and writes is what it is in eager mode, with the same strides, over several calls."""
    check(twice(function, in_regions), [(random(4, 4), random(4, 4)) for _ in range(4)], dynamic=dynamic)


def test_an_undeclared_view_in_a_region_lies_in_its_argument() -> None:
    """In the second call, too: the next operator was computed over a result there, and the pass was rolled back."""
    check(twice(viewed_undeclared, in_regions), [(random(4, 4), random(4, 4)) for _ in range(2)])
    report = last_report()
    assert report is not None
    assert {"rolled back", "failed"}.isdisjoint(record.outcome for record in report.passes)


def test_constants_of_regions() -> None:
    """A constant tensor of a region is one of the graph's; with symbolic sizes, Dynamo itself fails."""
    check(twice(constants, in_regions), [(random(4, 4), random(4, 4)) for _ in range(3)])


def test_an_intermediate_that_a_region_writes() -> None:
    """An intermediate keeps its strides after a region wrote a transposed sum into it."""

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch.add(y.t(), 1, out=x)
        return x * y

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value, other = x + 1, x + 2
        return region(value, y), value, region(other, y), other  # Dynamo itself inlines a region of one call

    check(program, [(random(4, 4), random(4, 4)) for _ in range(3)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_an_argument_that_begins_inside_of_its_storage(dynamic: bool) -> None:
    """A region writes the argument, then a view of it that AOT describes by its place in the storage."""
    region = torch.compiler.nested_compile_region(lambda x: x.add_(1).sum())

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        views = [x, x.t(), y, *([y[:2].t(), y[2:].t()] if not dynamic else [])]
        return tuple(region(view) * 2 + region(view) for view in views)

    check(program, [[torch.cat([random(2, 4), random(4, 4)])[2:] for _ in range(2)] for _ in range(2)], dynamic=dynamic)


def test_what_a_region_in_a_region_writes() -> None:
    """The counts that only the inner region writes are right after each call, and the outer region may write, too."""

    @torch.compiler.nested_compile_region
    def counted(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        counts.add_(1)
        return x * counts

    @torch.compiler.nested_compile_region
    def outer(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return counted(x + 1, counts) + counted(x, counts)

    @torch.compiler.nested_compile_region
    def writing(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        result = counted(x, counts)
        x.mul_(2)
        return result

    for region in (outer, writing):
        check(
            lambda x, y, region=region: (region(x, y), region(x + y, y)), [(random(4, 4), random(4)) for _ in range(3)]
        )


def test_a_region_that_writes_through_as_strided() -> None:
    """Where the argument begins inside of its storage, the write goes to the storage's first elements, in both calls."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((8,), (1,), 0).add_(1) * 2

    region = torch.compiler.nested_compile_region(program)
    fast = compiled(lambda x: (region(x), x.add_(1), region(x)))
    homes = [torch.zeros(12, device=NPU) for _ in range(2)]
    for _ in range(3):
        eager = program(homes[0][4:]), homes[0][4:].add_(1), program(homes[0][4:])
        torch.testing.assert_close(fast(homes[1][4:]), eager, rtol=0, atol=0)
        torch.testing.assert_close(*homes, rtol=0, atol=0)


@pytest.mark.slow
def test_equal_layers_are_traced_once_and_keep_weights_of_their_own() -> None:
    """Layers called through one region have their own weights, gradients included."""
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)).npu()

    def through(wrap: Function) -> Function:
        region = wrap(lambda layer, x: torch.tanh(layer(x)) + x)

        def program(x: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                x = region(layer, x)
            return x.square().sum()

        return program

    run = compiled(through(in_regions))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the second form of the backward
        for _ in range(3):
            x, gradients = random(4, 8), []
            for function in (through(lambda function: function), run):
                layers.zero_grad()
                function(x).backward()
                gradients.append([weight.grad.cpu() for weight in layers.parameters()])  # type: ignore[union-attr]
            torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The operators whose metadata is derived by execution."""
    from npugraph_ex.graph import metadata, nested_regions

    seen: list[object] = []
    true = metadata.derive
    monkeypatch.setattr(
        nested_regions.metadata, "derive", lambda node, mode: (seen.append(node.target), true(node, mode))[1]
    )
    return seen


def test_only_the_first_call_derives_metadata(counted: list[object]) -> None:
    """Further calls with equal arguments take the first one's metadata, in memory of their own."""
    region = in_regions(lambda x, y: torch.relu(x) * y + 1)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = region(x, y)
        return x

    check(program, [(random(4, 4), random(4, 4)) for _ in range(2)])
    assert counted.count(torch.ops.aten.relu.default) == 1


@pytest.mark.slow
def test_streams_in_regions_are_ordered() -> None:
    """A stream scope in a region is a stream of the graph, so what no event orders is found."""

    def scoped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with npugraph_ex.scope.npu_stream_switch("side"):
            doubled = x * 2
        return doubled + y

    run = compiled(twice(scoped, in_regions), stream_check="raise")
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="mul before add"):
        run(random(4, 4), random(4, 4))
    check(twice(scoped, in_regions), [(random(4, 4), random(4, 4)) for _ in range(3)], stream_check="repair")


@pytest.mark.slow
def test_what_cannot_be_inlined_and_writes_is_refused() -> None:
    """A region that writes and has sizes that depend on data names its line and the way out."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x[y > 0].sum()

    run = compiled(twice(program, in_regions))
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="nested_compile_region") as raised:
        run(random(4, 4), random(4, 4))
    assert "test_nested_regions.py:" in str(raised.value)
