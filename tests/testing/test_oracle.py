"""The oracle notices each kind of difference, and says nothing when all is well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from npugraph_ex import _torch_private, testing
from npugraph_ex.aclgraph import scopes
from npugraph_ex.aclgraph.address_guard import AddressGuard
from npugraph_ex.aclgraph.compiled_graph import CompiledGraph
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.passes import numerics
from npugraph_ex.testing import Case, Input
from npugraph_ex.testing.oracle import checking
from npugraph_ex.testing.oracle.host import callable_of
from npugraph_ex.testing.oracle.observation import observe, visible_difference
from npugraph_ex.testing.oracle.reference64 import run_reference
from npugraph_ex.testing.oracle.tracing import trace

# The second operand is made from the first, so that something stands in front of the pair.
PAIR = """
def program(x0, x1):
    v0 = torch.ops.aten.silu.default(x0)
    y, rstd, total = torch.ops.npu.npu_add_rms_norm.default(x0, v0, x1)
    q, scale = torch.ops.npu.npu_dynamic_quant.default(y)
    return (q, scale, total)
"""
INPUTS = (Input(("s0", 64), seed=1), Input((64,), seed=3))
SIZES = ({"s0": 3}, {"s0": 5}, {"s0": 3}, {"s0": 3})


@pytest.mark.parametrize("route", ["graph", "compile"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_right_program_has_no_failures(route: str, dynamic: bool) -> None:
    """The pair is fused once, by either route, with static and with symbolic shapes."""
    sizes = SIZES if dynamic else SIZES[:1] * 4
    outcome = testing.check(Case(PAIR, INPUTS, sizes, route=route, dynamic=dynamic, expected=1))
    assert outcome.failures == []
    assert 0 < outcome.worst_ulp < 4


def test_a_program_is_checked_as_its_case() -> None:
    """What a strategy draws can be given as it is, and what it expects is asked for."""
    program = testing.sample(testing.planted_programs(pattern="add_rms_norm_cast"), 1)
    by_itself, by_case = testing.check(program), testing.check(Case.of(program))
    assert by_itself.ok, by_itself.failures
    assert by_itself.fusions == by_case.fusions == program.expected == 1
    too_many = testing.check(dataclasses.replace(program, expected=3))
    assert too_many.failures[0].startswith("fused 1 times instead of 3")


def test_a_wrong_count_is_a_failure() -> None:
    """Expecting two fusions where there is one."""
    outcome = testing.check(Case(PAIR, INPUTS, SIZES[:1] * 4, expected=2))
    assert outcome.failures[0].startswith("fused 1 times instead of 2")


def test_an_exception_is_a_failure_not_a_crash() -> None:
    """The program itself raises; the outcome says what."""
    broken = "def program(x0):\n    return torch.ops.aten.mm.default(x0, x0)\n"
    outcome = testing.check(Case(broken, (Input((2, 3)),)))
    assert outcome.failures[0].startswith("in eager mode it raised RuntimeError")
    assert not outcome.runnable


@pytest.mark.parametrize("after", ["y = torch.ops.aten.mm.default(x0, x0)", "y = x0"], ids=["raises", "forgets"])
def test_a_program_leaves_no_scope_open(after: str) -> None:
    """One that raises inside a scope, and one that does not close it: neither decides how the next is compiled."""
    enter = "torch.ops.npugraph_ex.scope_enter.default(['_user_stream_label'], ['a'])"
    broken = f"def program(x0):\n    {enter}\n    {after}\n    return (y,)\n"
    outcome = testing.check(Case(broken, (Input((2, 3)),)))
    assert not outcome.ok
    assert scopes.here.opened == []


def test_a_program_of_one_call_is_refused() -> None:
    """Nothing would ever be replayed with other values."""
    with pytest.raises(ValueError, match="two calls"):
        Case(PAIR, INPUTS, SIZES[:1])


def test_metadata_and_aliasing_are_compared() -> None:
    """Another stride, another dtype and another owner of the memory are each seen."""
    x = torch.ones(2, 3)
    right = observe([x], [x + 1, x.t()])
    assert visible_difference(right, observe([x], [x + 1, x.t()])) is None
    assert "strides" in str(visible_difference(right, observe([x], [torch.ones(3, 2).t(), x.t()])))
    assert "float64" in str(visible_difference(right, observe([x], [(x + 1).double(), x.t()])))
    assert "input 0" in str(
        visible_difference(right, observe([x], [x + 1, x.t().clone(memory_format=torch.preserve_format)]))
    )


@pytest.mark.parametrize(("given", "says"), [
    (lambda y: y.view(-1).view(2, 3), "a view"),
    (lambda y: torch.cat([y, y])[:2].data, "of a storage of 48 bytes"),
    (lambda y: torch.cat([y, y])[2:].data, "element 6"),
], ids=["a view", "a larger storage", "not at its beginning"])  # fmt: skip
def test_how_results_are_kept_is_compared(given: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    """A view where eager mode makes none, a result in more memory than its own."""
    y = torch.ones(2, 3)
    right, wrong = observe([], [y + 1]), observe([], [given(y + 1)])
    assert says in str(visible_difference(right, wrong))
    assert visible_difference(right, wrong, kept_as=False) is None


def test_a_view_of_a_lost_tensor_may_become_a_tensor_of_its_own() -> None:
    """More can be done with that; but a view of an input, or of another result, stays one."""
    x = torch.ones(2, 3)
    view, own = (x + 1).t(), torch.full((2, 3), 2.0).t().detach()
    assert visible_difference(observe([x], [view]), observe([x], [own])) is None
    assert "a view" in str(visible_difference(observe([x], [own]), observe([x], [view])))
    whole = x + 1
    for expected in (observe([x], [x.t()]), observe([x], [whole, whole.t()])):
        other = torch.full((2, 3), 2.0)
        different = observe([x], [other, other.detach().t()] if len(expected.outputs) == 2 else [x.detach().t()])
        assert visible_difference(expected, different) is not None


@pytest.mark.slow
def test_programs_are_drawn_that_write_moved_inputs_under_frozen_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that takes every input as frozen is found among the first random programs; as it is, they are right."""
    programs = [testing.sample(testing.exact_programs(), seed) for seed in range(6)]
    assert any(Case.of(program).options.get("frozen_parameter") for program in programs)
    assert all(testing.check(program).ok for program in programs)
    monkeypatch.setattr(InputPlan, "addresses", lambda plan, _: (0,) * len(plan.in_place))
    monkeypatch.setattr(CompiledGraph, "_guard", lambda *_: AddressGuard((), ()))
    found = [testing.check(program).kind for program in programs]
    assert any(kind.startswith("replay") for kind in found), found


def test_version_counters_lazy_bits_and_bases_are_compared() -> None:
    """Two results written as one to autograd, a result without elements no longer conjugated, a view of a hidden base."""
    y, z = torch.ones(2), torch.ones(0, dtype=torch.complex64)
    assert "version counter" in str(visible_difference(observe([y], [y.data]), observe([y], [y.detach()])))
    assert "conjugated" in str(visible_difference(observe([], [z.conj()]), observe([], [z.conj().resolve_conj()])))
    assert "view of no input" in str(visible_difference(observe([], [y[1:], y]), observe([], [y.detach()[1:], y])))


def test_version_counters_of_different_calls_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of two calls that are right on their own, in memory of their own, and share a counter are a failure."""
    compile_graph, first = checking.compile_graph, list[torch.Tensor]()

    def sharing(*args: Any, **options: Any) -> Callable[..., Any]:
        compiled = compile_graph(*args, **options)

        def run(*inputs: Any) -> list[torch.Tensor]:
            results = []
            for result in compiled(*inputs):
                first.append(result)
                results.append(first[0].detach())
                results[-1].data = result  # keeps the counter
            return results

        return run

    monkeypatch.setattr(checking, "compile_graph", sharing)
    source = "def program(x0):\n    return (torch.ops.aten.add.Tensor(x0, 1.0),)\n"
    outcome = testing.check(Case(source, (Input((3, 4)),)))
    (failure,) = outcome.failures
    assert "version counters" in failure


@pytest.mark.slow
def test_programs_are_drawn_whose_numeric_check_moves_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that leaves the process's generator elsewhere is found by random programs."""
    monkeypatch.setattr(numerics, "_on_the_cpu", _torch_private.real_execution)
    found = testing.find_failure(testing.integer_programs(), examples=32, seed="c", route="graph")
    assert found is not None
    assert found[0].options["check_numerics"]
    assert "compiling moved a random generator" in found[1].failures[0]


@pytest.mark.slow
def test_programs_are_drawn_whose_operators_take_only_some_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that refuses a program, because it drew what an operator does not take, is found by random programs."""

    def refuse(_: object, reason: str) -> None:
        raise GraphVerificationError(reason)

    drawn_inputs = numerics.drawn_inputs
    monkeypatch.setattr(numerics, "drawn_inputs", lambda gm: [next(drawn_inputs(gm))])
    monkeypatch.setattr(numerics.NumericCheck, "_leave_out", refuse)
    found = testing.find_failure(
        testing.exact_programs(), examples=60, route="fx", options={"check_numerics": True}, shrinking_tries=0
    )
    assert found is not None
    assert "index_select" in found[1].failures[0]


def test_the_reference_is_exact() -> None:
    """In float64 the reference of 1 + 2**-20 in float16 is not rounded to 1."""
    source = "def program(x0):\n    return (torch.ops.aten.add.Tensor(x0, 2.0**-20),)\n"
    spec = Input((1,))
    gm = trace(Case(source, (spec,)).function(), (spec,), {}, dynamic=False, functional=True)
    one = torch.ones(1, dtype=torch.float16)
    assert run_reference(gm, [one]).values[0].item() == 1 + 2.0**-20


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_bags_of_indices_that_are_not_contiguous(device: str) -> None:
    """The CPU's kernels read the next elements of memory in their place; neither the reference nor the device may do so."""
    bags = torch.ops.aten._embedding_bag_forward_only.default
    weight, indices, offsets = (
        torch.arange(6.0).view(3, 2),
        torch.tensor([2, 9, 0, 9, 1, 9]),
        torch.tensor([0, 9, 2, 9]),
    )
    run = callable_of(bags) if device == "cpu" else bags
    given = [x.to(device) for x in (weight, indices, offsets)]
    found = run(given[0], given[1][::2], given[2][::2])[0]
    assert found.tolist() == [[4.0 + 0.0, 5.0 + 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("cast", ["npu_dtype_cast.default(v, 5)", "npu_dtype_cast.default(v, dtype=15, input_dtype=5)"])
def test_the_reference_widens_dtypes_that_are_written_as_codes(cast: str) -> None:
    """A cast to float16 or bfloat16 by its code rounds nothing in the reference."""
    source = f"def program(x0):\n    v = torch.ops.aten.add.Tensor(x0, 2.0**-20)\n    return (torch.ops.npu.{cast},)\n"
    spec = Input((1,))
    gm = trace(Case(source, (spec,)).function(), (spec,), {}, dynamic=False, functional=True)
    assert run_reference(gm, [torch.ones(1, dtype=torch.float16)]).values[0].item() == 1 + 2.0**-20


def test_small_values_make_epsilon_count() -> None:
    """A right fusion at 0.001 stays right: the judge has no blind eye for small numbers."""
    small = tuple(dataclasses.replace(spec, scale=0.001) for spec in INPUTS)
    assert testing.check(Case(PAIR, small, SIZES[:1] * 4, expected=1)).ok
    with testing.mutant("quant-drops-epsilon"):
        assert not testing.check(Case(PAIR, small, SIZES[:1] * 4, expected=1)).ok


def test_ulps_are_of_the_digits_that_a_value_has() -> None:
    """A float32 cast of a bfloat16 norm is right to bfloat16's digits; in ulps of float32 it would be 30,000 off."""
    source = (
        "def program(x0, x1, x2):\n"
        "    y, _, total = torch.ops.npu.npu_add_rms_norm.default(x0, x1, x2)\n"
        "    return (torch.ops.aten._to_copy.default(y, dtype=torch.float32), total)\n"
    )
    inputs = tuple(Input(shape, "bfloat16", seed=seed) for seed, shape in enumerate(((16, 64), (16, 64), (64,))))
    outcome = testing.check(Case(source, inputs, ({}, {}), route="fx", expected=1))
    assert outcome.ok
    assert 0.3 < outcome.worst_ulp <= 1


def test_a_size_that_an_operator_reads_stays_a_symbol() -> None:
    """Torch makes a number of a size that an operator reads as one; the calls of a case have other sizes, too."""
    source = (
        "def program(q, k):\n"
        "    keys = k[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)\n"
        "    return (torch.nn.functional.scaled_dot_product_attention(q, keys, keys),)\n"
    )
    outcome = testing.check(_of_shared_heads(source))
    assert outcome.failures == []


def test_a_size_is_no_user_of_a_value_on_the_way() -> None:
    """As in the graphs of a compilation, sizes are those of inputs: heads that are repeated vanish with their attention."""
    source = (
        "def program(q, k):\n"
        "    keys = k[:, :, None].repeat(1, 1, 2, 1, 1).flatten(1, 2)\n"
        "    return (torch.nn.functional.scaled_dot_product_attention(q, keys, keys),)\n"
    )
    outcome = testing.check(_of_shared_heads(source, lift="exact"))
    assert outcome.failures == []
    assert outcome.report.fusions("lift_shared_heads") == 1


def _of_shared_heads(source: str, **options: Any) -> Case:
    inputs = tuple(Input(("s0", heads, 5, 16), "float16", seed=heads) for heads in (4, 2))
    return Case(source, inputs, sizes=({"s0": 4}, {"s0": 4}, {"s0": 6}), dynamic=True, options=options)
