"""Reinplacing: which operators become in-place, which must not, and that values and aliasing stay as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, check, random, through_aot
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex import _torch_private, compile_fx, last_report
from npugraph_ex.passes.inplace import inplace_overload
from npugraph_ex.passes.metadata import fake_mode_of
from npugraph_ex.testing.fx_level import optimise
from npugraph_ex.testing.strategies import exact_programs, sample
from npugraph_ex.testing.tracing import trace

aten = torch.ops.aten


def operators(function: Callable[..., Any], *inputs: torch.Tensor, **options: object) -> list[str]:
    """The optimised operators of a program whose values are right, over three calls with new inputs."""
    check(function, [tuple(torch.randn_like(value) for value in inputs) for _ in range(3)], **options)
    return through_aot(function, *inputs, **options)[1]


def with_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give `function` an intermediate, x + 1, in place of the first input."""
    return lambda x, *others: function(x + 1, *others)


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


def test_assignment_to_a_slice_is_restored() -> None:
    """`x[1:] = y` becomes a view and a copy into it: nothing else is copied."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[1:] = y
        return y * 2

    found = operators(function, random(4, 4), random(3, 4))
    assert "aten.slice_scatter.default" not in found
    assert found.count("aten.copy_.default") == 1


def assign(values: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Overwrite the whole input with what is computed from it, and read it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.copy_(values(x))
        return x + 1

    return function


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (assign(lambda x: x * 2 + 1), ["mul_.Tensor", "add_.Tensor", "add.Tensor"]),
        (lambda x: assign(lambda y: y * 3)(x + 1), ["add.Tensor", "mul_.Tensor", "add_.Tensor"]),
        (
            assign(lambda x: assign(lambda y: y * 3)(x).exp()),
            ["mul_.Tensor", "add_.Tensor", "exp_.default", "add.Tensor"],
        ),
        (assign(lambda x: (x * 2).half()), ["mul_.Tensor", "_to_copy.default", "copy_.default", "add.Tensor"]),
        (assign(lambda x: x.roll(1)), ["roll.default", "copy_.default", "add.Tensor"]),
        (
            assign(lambda x: (x + x.sum()) * x),
            ["sum.default", "add.Tensor", "mul_.Tensor", "copy_.default", "add.Tensor"],
        ),
    ],
    ids=["input", "intermediate", "twice", "other dtype", "no in-place form", "read once more"],
)
def test_assignment_to_the_whole(function: Callable[..., Any], expected: list[str]) -> None:
    """`x.copy_(f(x))` does not read `x` but in `f`: what can work in place does, and the assignment costs nothing then."""
    assert operators(function, random(4, 4)) == [f"aten.{name}" for name in expected]


def _assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:] = (x + y).relu()
    return x.sum()


def _copied_over(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1)[:]
    rows.copy_((rows + y.view(-1)).relu())
    return (rows * 2).exp()


def _worked_on(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    x[:].mul_(2)
    x[:, ::1].exp_()
    return x + 1


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_assigned, ["add_.Tensor", "relu_.default", "sum.default"]),
        (lambda x, y: _assigned(x * 3, y), ["mul.Tensor", "add_.Tensor", "relu_.default", "sum.default"]),
        (_copied_over, ["add_.Tensor", "relu_.default", "mul.Tensor", "exp_.default"]),
        (_worked_on, ["add_.Tensor", "mul_.Tensor", "exp_.default", "add.Tensor"]),
    ],
    ids=["input", "intermediate", "through views", "in place"],
)
def test_a_view_of_everything(function: Callable[..., Any], expected: list[str]) -> None:
    """`x[:]` is `x`: what is assigned to it or done to it needs no copy; AOT's scatter keeps nothing of what was there."""
    found = operators(function, random(4, 4), random(4, 4))
    assert [name for name in found if name != "aten.view.default"] == [f"aten.{name}" for name in expected]


def _kept(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    old = x * 1
    before = x.t()
    new = (x + y).relu()
    late = before.sum(0)  # of the bytes as they were
    x[:] = new
    return old.sum() + late


def _returned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    new = (x + y).relu()
    x[:] = new
    return new


def _written_between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    new = (x + y).relu()
    x[:] = new
    new.add_(1)  # of the values alone
    return new.sum()


def _turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:] = x.t() + x
    return y + 1


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (_kept, "aten.add.Tensor"),
        (_returned, "aten.copy_.default"),
        (_written_between, "aten.copy_.default"),
        (_turned, "aten.copy_.default"),
        (lambda x, y: x[:3].copy_((x[:3] + y[:3]).relu()).sum(), "aten.copy_.default"),
        (lambda x, y: x[::2].copy_((x[::2] + y[::2]).relu()).sum(), "aten.copy_.default"),
        (lambda x, y: x[1:].copy_(x[:3] * y[1:]).sum(), "aten.copy_.default"),
        (lambda x, y: x[:].copy_((x * y).half()).sum(), "aten.copy_.default"),
        (lambda x, y: x[:].copy_(y[0] * 2).sum(), "aten.copy_.default"),
        (lambda x, y: x[:].copy_(y.t() * 2).sum(), "aten.copy_.default"),
    ],
    ids=[
        "old value read later", "value returned", "value written later", "overlapping views", "first rows", "every second",
        "overlapping rows", "other dtype", "broadcast", "other strides",
    ],
)  # fmt: skip
def test_a_view_of_everything_with_something_else(function: Callable[..., Any], kept: str) -> None:
    """Other bytes, other layouts, other users: what has to be computed in memory of its own is, and values are right."""
    assert kept in operators(function, random(4, 4), random(4, 4))
    report = last_report()
    assert report is not None
    assert "rolled back" not in [record.outcome for record in report.passes]


def test_a_view_up_to_a_size_that_varies() -> None:
    """`x[:n]` is not taken for all of `x` where `n` is a symbol, even if they are equal at the first call."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[: y.size(0)] = y * 2
        return x.sum()

    compiled = torch.compile(function, backend="npugraph_ex", dynamic=True)
    for rows, given in ((6, 4), (6, 6), (9, 5), (5, 5)):
        x, y = random(rows, 4), random(given, 4)
        there, here = x.cpu(), y.cpu()
        expected = function(there, here)
        torch.testing.assert_close(compiled(x, y).cpu(), expected)
        torch.testing.assert_close(x.cpu(), there)


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


def test_options_switch_the_passes_off() -> None:
    """`inplace_pass` rules intermediates, `input_inplace_pass` rules inputs, each alone."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return (x * 2).relu()

    assert operators(function, random(4)) == ["aten.add_.Tensor", "aten.mul.Tensor", "aten.relu_.default"]
    assert operators(function, random(4), inplace_pass=False)[-1] == "aten.relu.default"
    assert "aten.add.Tensor" in operators(function, random(4), input_inplace_pass=False)


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


@pytest.fixture(scope="module")
def update() -> Any:
    """A custom operator with two mutated arguments and a result."""

    @torch.library.custom_op("npugraph_ex_tests::update", mutates_args=("a", "c"))
    def operator(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        a.add_(b)
        c.mul_(2)
        return a + c

    operator.register_fake(lambda a, _b, _c: torch.empty_like(a))
    return torch.ops.npugraph_ex_tests.update


PLAIN = {"inplace_pass": False, "input_inplace_pass": False, "remove_noop_ops": False}


@pytest.mark.parametrize("options", [{}, PLAIN], ids=["passes on", "passes off"])
@pytest.mark.parametrize("version", [1, 2])
def test_custom_operators_that_mutate(update: Any, version: int, options: dict[str, bool]) -> None:
    """Either wrapper of AOT around an operator with several mutated arguments is unwrapped, and needless copies go."""

    def function(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch = b + 1
        first = update(x, b, scratch)
        second = update(x[1:], b[1:], scratch[1:])
        return first, second, scratch

    wrappers = []

    def note(gm: torch.fx.GraphModule, _inputs: object, _config: object) -> None:
        wrappers.extend(str(node.target) for node in gm.graph.nodes if "auto_functionalized" in str(node.target))

    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        found = operators(function, random(4, 3), random(4, 3), post_grad_custom_pre_pass=note, **options)
    assert set(wrappers) == {"auto_functionalized" if version == 1 else "auto_functionalized_v2"}
    assert found.count("npugraph_ex_tests.update.default") == 2
    assert not any("auto_functionalized" in name for name in found)
    # The first version writes views back through their base, which takes a copy of it.
    assert options or version == 1 or "aten.clone.default" not in found


@pytest.mark.parametrize("version", [1, 2])
def test_a_mutating_custom_operator_costs_no_copy(update: Any, version: int) -> None:
    """On whole tensors no copy is left, whichever wrapper AOT takes."""

    def function(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch = b + 1
        return update(x, b, scratch), scratch

    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        found = operators(function, random(4, 3), random(4, 3))
    launched = [name for name in found if name != "aten.as_strided.default"]  # a view
    assert launched == ["aten.add.Tensor", "npugraph_ex_tests.update.default"]


def test_concatenation_is_computed_in_place() -> None:
    """Members that only the concatenation uses are computed into their slices; others are copied."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + 1, y, x * y])

    found = operators(function, random(4, 3), random(4, 3))
    assert "aten.cat.default" not in found
    assert found.count("aten.add.out") + found.count("aten.mul.out") == 2
    assert "aten.cat.default" in operators(function, random(4, 3), random(4, 3), remove_cat_ops=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.cat([(x + 1).double(), y.double()]),
        lambda x, y: torch.cat([x + 1, (y * 2).half()]),
        lambda x, y: torch.cat([x + 1, y * 2], dim=1),
        lambda x, y: torch.cat([x + 1, y * 2], dim=-1).sum(),
        with_sum(lambda a, _: torch.cat([a, a])),
        with_sum(lambda a, y: (torch.cat([a, y * 2]), a)),
        lambda x, y: torch.cat([torch.empty(0, device=NPU), x + 1, y * 2]),
        lambda x, y: torch.cat([(x + 1)[:0], x + 1, y * 2]),
        lambda x, y: torch.cat([torch.cat([x + 1, y * 2]), x * y]),
        lambda x, _: torch.cat([x + 1]),
    ],
    ids=["double", "mixed", "dim 1", "last", "twice", "used elsewhere", "legacy empty", "empty", "nested", "one"],
)
def test_concatenations_are_right_or_left_alone(function: Callable[..., Any]) -> None:
    """Whatever the members and the dimension, values, strides and dtypes are eager's."""
    check(function, [(random(4, 3), random(4, 3)) for _ in range(3)])


def test_channels_last_concatenation() -> None:
    """Strides of a channels-last concatenation come out as in eager mode."""

    def make() -> torch.Tensor:
        return random(2, 3, 4, 4).to(memory_format=torch.channels_last)

    check(lambda x, y: torch.cat([x + 1, y * 2], dim=1), [(make(), make()) for _ in range(3)])


def outcomes(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    """What became of each pass, for a program whose values are right."""
    operators(function, *inputs)
    report = last_report()
    assert report is not None
    return [record.outcome for record in report.passes]


@pytest.mark.parametrize(
    ("name", "function", "shape"),
    [
        ("nested", lambda x, y: torch.cat([torch.cat([x + 1, y * 2]), x * y]), (4, 3)),
        ("empty", with_sum(lambda v, y: (v + (-y), (v + (-y)).clone())), (0, 3)),
        ("empty twice", with_sum(lambda v, _: (v, v.clone())), (0, 3)),
        ("itself", lambda x, y: x.copy_(x.clone()) + y, (4, 3)),
        ("as many elements", lambda x, _: (x[0] + 1) * x[:1], (4, 3)),
        ("as many elements, turned", lambda x, _: (x[:, :1] + 1) * torch.ones(1, 4, device=NPU)[:, :1], (1, 3)),
        ("gaps", lambda x, _: torch.empty_strided((4, 3), (6, 1), device=NPU).copy_(x) + 1, (4, 3)),
    ],
)
def test_no_pass_has_to_be_rolled_back(name: str, function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """Programs that a pass once broke, and the verifier had to mend."""
    assert "rolled back" not in outcomes(function, random(*shape), random(*shape)), name


def test_nothing_is_assumed_of_symbolic_sizes() -> None:
    """Whether an operator owns the memory it writes is not asked by comparing a size with a number: that would be a guard."""
    for seed in (15, 37):
        program = sample(exact_programs(dynamic=True), seed)
        graph = trace(program.function(), program.inputs, program.sizes[0], dynamic=True, functional=program.functional)
        environment = fake_mode_of(graph.graph).shape_env
        before = list(environment.guards)
        optimise(graph, {})
        assert [guard.expr for guard in environment.guards] == [guard.expr for guard in before]
