"""Reinplacing: which operators become in-place, which must not, and that values and aliasing stay as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, check, compiled, random
from reinplacing import operators, outcomes, with_sum
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex import _torch_private, compile_fx, last_report
from npugraph_ex.graph.inplace import inplace_overload
from npugraph_ex.graph.metadata import fake_mode_of
from npugraph_ex.testing.generator.strategies import exact_programs, sample
from npugraph_ex.testing.oracle.tracing import trace
from npugraph_ex.testing.oracle.without_device import optimise

aten = torch.ops.aten


def test_intermediates_become_in_place() -> None:
    """A chain of elementwise operators works in one piece of memory; the first operator may not touch its input."""
    found = operators(lambda x: ((x + 1).relu() * 2).exp(), random(4, 4))
    assert found == ["aten.add.Tensor", "aten.relu_.default", "aten.mul_.Tensor", "aten.exp_.default"]


def test_writes_to_inputs_are_restored() -> None:
    """What AOT functionalized, operators and a copy, becomes the in-place operators that the user wrote."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5).add_(y)
        return y + 1

    found = operators(function, random(4), random(4))
    assert found == ["aten.mul_.Tensor", "aten.add_.Tensor", "aten.add.Tensor"]


@pytest.mark.parametrize("written", [lambda x: x, lambda x: x * 2], ids=["input", "intermediate"])
@pytest.mark.parametrize(
    ("dtype", "lazily"), [(torch.complex64, torch.conj), (torch.float32, torch._neg_view)], ids=["conj", "neg"]
)
def test_the_same_bytes_read_otherwise_are_another_value(
    dtype: torch.dtype, lazily: Callable[..., Any], written: Callable[..., Any]
) -> None:
    """A lazily conjugated or negated view lies in the very same bytes: assigning it is no copy of a value to itself."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = written(x)
        y.copy_(lazily(y))
        return torch.view_as_real(lazily(y).clone()) if dtype.is_complex else y * 3

    x = torch.randn(4, 4, dtype=dtype, device=NPU)
    assert "aten.copy_.default" in operators(function, x)
    report = last_report()
    assert report is not None
    assert "rolled back" not in [record.outcome for record in report.passes]


@pytest.mark.parametrize(
    ("name", "function", "kept"),
    [
        ("read later", with_sum(lambda a: (a.relu(), a * 2)), "aten.relu.default"),
        ("read later through a view", with_sum(lambda a: (a.relu(), a.t() * 2)), "aten.relu.default"),
        ("returned", with_sum(lambda a: (a, a.relu())), "aten.relu.default"),
        ("overlapping operand", with_sum(lambda a: a + a.t()), "aten.add.Tensor"),
        ("other dtype", lambda x: (x + 1) > 0, "aten.gt.Scalar"),
        ("smaller than the result", lambda x: (x[:1] + 1) * x, "aten.mul.Tensor"),
        ("expanded memory", lambda x: torch.ones(4, 1, device=NPU).add(1).expand(4, 4).relu() + x, "aten.relu.default"),
        ("an input that nobody writes", lambda x: x.relu(), "aten.relu.default"),
    ],
)
def test_not_in_place(name: str, function: Callable[..., Any], kept: str) -> None:
    """Each condition of the pass keeps an operator functional that would otherwise compute something else."""
    assert kept in operators(function, random(4, 4)), name


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: (x[0] + 1) * x[:1], "aten.mul.Tensor"),
        (lambda x: (x[:, :1] + 1).view(4) * x[:1], "aten.mul.Tensor"),
        (lambda x: x.sum() * x[:1, 0], "aten.mul.Tensor"),
        (lambda x: torch.addmm(x[0] + 1, x[:1], x), "aten.addmm.default"),
        (lambda x: (x + 1).t().contiguous().as_strided((16,), (1,)) * 2, "aten.clone.default"),
    ],
    ids=["row", "column", "scalar", "matrix product", "strides"],
)
def test_same_number_of_elements_is_not_enough(function: Callable[..., Any], kept: str) -> None:
    """A reinplace that compares numel: another shape or other strides with as many elements, dtype and device are refused.

    Refused by the pass itself: a wrong write that the verifier has to roll back is a failure here.
    """
    assert kept in operators(function, random(4, 4))
    report = last_report()
    assert report is not None
    assert "rolled back" not in [record.outcome for record in report.passes]


def test_a_view_of_the_result_that_outlives_a_later_write() -> None:
    """`y = x + 1; x.copy_(y); return y`: the result is not the input in eager mode, so the copy must stay."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        x.copy_(y)
        return y

    assert "aten.copy_.default" in operators(function, random(4))


def test_an_input_that_is_put_back_and_written_again() -> None:
    """What was saved of it is read after the second write, so it keeps memory of its own."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        saved = x.clone()
        x.copy_(saved)
        x.add_(y)
        return torch.cat([y, saved])

    assert "aten.clone.default" in operators(function, random(4), random(4))


def copies_itself(x: torch.Tensor) -> None:
    """Write to the whole input what it holds, by way of a copy."""
    x.copy_(x.clone())


def copies_a_part_of_itself(x: torch.Tensor) -> None:
    """Write to a view of the input what it holds."""
    part = x[1:]
    part.copy_(part)


@pytest.mark.parametrize("write", [copies_itself, copies_a_part_of_itself])
def test_an_input_is_still_written_where_nothing_changes(write: Callable[[torch.Tensor], None]) -> None:
    """A copy of an input to itself stays: callers were told that the graph writes this input, and nothing else does."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        write(x)
        return y + 1

    gm = make_fx(function, tracing_mode="fake")(random(4), random(4))  # AOT would write it with one more copy
    x, y = random(4), random(4)
    expected, before = y.cpu() + 1, x.cpu()
    torch.testing.assert_close(compile_fx(gm)(x, y)[0].cpu(), expected)
    torch.testing.assert_close(x.cpu(), before)
    report = last_report()
    assert report is not None
    assert "rolled back" not in [record.outcome for record in report.passes]
    left = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert left.count(aten.copy_.default) == 1
    assert aten.clone.default not in left


def test_an_input_is_still_written_beside_an_assignment_to_a_part() -> None:
    """The view that an assignment becomes lies where its base does: it writes nothing of the other input."""

    def function(x: torch.Tensor, same: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        copied = same.clone()
        x.copy_(copied)
        z[1:].add_(1)
        return z * 2

    x, z = random(4), random(4)
    gm = make_fx(torch.func.functionalize(function), tracing_mode="fake")(x, x[:], z)
    expected = (z.cpu() + torch.tensor([0, 1, 1, 1])) * 2
    torch.testing.assert_close(compile_fx(gm)(x, x[:], z)[0].cpu(), expected)
    report = last_report()
    assert report is not None
    assert "rolled back" not in [record.outcome for record in report.passes]


def test_disjoint_bytes_of_one_storage_do_not_disturb() -> None:
    """Two halves of one tensor are told apart by byte range: both become in-place."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = x * 2
        top, bottom = whole[:2], whole[2:]
        return top.relu().sum(), bottom.exp().sum()

    found = operators(function, random(4, 4))
    assert "aten.relu_.default" in found
    assert "aten.exp_.default" in found


def test_an_output_lies_in_memory_of_its_own() -> None:
    """A result that is returned is not computed into a part of a larger tensor: nothing may be seen beside it."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = x * 2
        return whole[:2].relu(), whole[2:].exp()

    found = operators(function, random(4, 4))
    assert "aten.relu.default" in found
    assert "aten.exp.default" in found


@pytest.mark.slow
def test_options_switch_the_passes_off() -> None:
    """`inplace_pass` rules intermediates, `input_inplace_pass` rules inputs, each alone."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return (x * 2).relu()

    assert operators(function, random(4)) == ["aten.add_.Tensor", "aten.mul.Tensor", "aten.relu_.default"]
    assert operators(function, random(4), inplace_pass=False)[-1] == "aten.relu.default"
    assert "aten.add.Tensor" in operators(function, random(4), input_inplace_pass=False)


@pytest.mark.slow
def test_symbolic_sizes() -> None:
    """With symbolic sizes whole storages are compared, and what is the same value is still recognised."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(y)
        return (y + 1).relu()

    check(function, [(random(size, 3), random(size, 3)) for size in (4, 5, 4, 6)], dynamic=True)


def test_an_operator_without_a_device_kernel_stays_functional(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher is asked whether the in-place overload has a kernel; a fallback to the CPU does not count."""
    inplace_overload.cache_clear()
    monkeypatch.setattr(_torch_private, "has_device_kernel", lambda operator: operator is not aten.relu_.default)
    try:
        found = operators(lambda x: (x + 1).relu().exp(), random(4))
    finally:
        inplace_overload.cache_clear()
    assert found == ["aten.add.Tensor", "aten.relu.default", "aten.exp_.default"]


@pytest.mark.parametrize("operator", [aten.t.default, aten.squeeze.default, aten.set.source_Tensor, aten.cat.default])
def test_what_has_no_in_place_form(operator: Any) -> None:
    """Views, operators that change metadata, and operators without an in-place overload are left alone."""
    assert inplace_overload(operator) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function", "shape"),
    [
        ("nested", lambda x, y: torch.cat([torch.cat([x + 1, y * 2]), x * y]), (4, 3)),
        ("empty", with_sum(lambda v, y: (v + (-y), (v + (-y)).clone())), (0, 3)),
        ("empty twice", with_sum(lambda v, _: (v, v.clone())), (0, 3)),
        ("itself", lambda x, y: x.copy_(x.clone()) + y, (4, 3)),
        ("itself, and then into a part of another", lambda x, y: y[:, :1].copy_(x.copy_(x)[:, :1]), (4, 3)),
        ("as many elements", lambda x, _: (x[0] + 1) * x[:1], (4, 3)),
        ("as many elements, turned", lambda x, _: (x[:, :1] + 1) * torch.ones(1, 4, device=NPU)[:, :1], (1, 3)),
        ("gaps", lambda x, _: torch.empty_strided((4, 3), (6, 1), device=NPU).copy_(x) + 1, (4, 3)),
    ],
)
def test_no_pass_has_to_be_rolled_back(name: str, function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """Programs that a pass once broke, and the verifier had to mend."""
    assert "rolled back" not in outcomes(function, random(*shape), random(*shape)), name


@pytest.mark.slow
def test_nothing_is_assumed_of_symbolic_sizes() -> None:
    """Whether an operator owns the memory it writes is not asked by comparing a size with a number: that would be a guard."""
    for seed in (15, 37):
        program = sample(exact_programs(dynamic=True), seed)
        graph = trace(program.function(), program.inputs, program.sizes[0], dynamic=True, functional=program.functional)
        environment = fake_mode_of(graph.graph).shape_env
        before = list(environment.guards)
        optimise(graph, {})
        assert [guard.expr for guard in environment.guards] == [guard.expr for guard in before]


def test_a_result_has_no_storage_of_unknown_size() -> None:
    """A scatter copies the storage of its base; a result computed in that copy would keep all of it."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x, y, (4,), (1,), 0).view(-1).sin()

    fast = compiled(program)
    for room in (4, 100):
        x = torch.ones(room, device=NPU)[:4].view(2, 2)
        with torch.no_grad():
            assert fast(x, x.view(-1) + 1).untyped_storage().nbytes() == 16


def test_a_result_is_not_computed_in_a_part() -> None:
    """An undeclared view of a part looks like memory of its own; a result in it would keep all that it is a part of."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._unsafe_view.default((x + 1)[1:], [6, 2]).neg()

    with torch.no_grad():
        assert compiled(program)(random(4, 4)).untyped_storage().nbytes() == 48


def test_an_unbacked_size_keeps_the_pass() -> None:
    """The pass asks no guard of such a size: it failed there, and was rolled back."""
    graph, x = compiled(lambda x: ((x * 3 + 1).relu() * 2).exp(), dynamic=None), random(4, 3)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    torch.testing.assert_close(graph(x), ((x * 3 + 1).relu() * 2).exp())
    report = last_report()
    assert report is not None
    assert {"rolled back", "failed"}.isdisjoint(record.outcome for record in report.passes)
