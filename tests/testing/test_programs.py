"""The generator draws what it claims, its programs run as printed, and inputs are what their data says."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import fx

from npugraph_ex import testing
from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.testing import Case, Input, Program, make_inputs
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex.testing.generator.inputs import Dim, refill, size_of
from npugraph_ex.testing.generator.near_misses import NEAR_MISSES, applicable
from npugraph_ex.testing.generator.numbers import numbers_in_graph
from npugraph_ex.testing.generator.patterns import with_style
from npugraph_ex.testing.generator.program import Ref, Step
from npugraph_ex.testing.generator.sized_patterns import sized
from npugraph_ex.testing.generator.strategies import exact_programs, planted_programs, sample
from npugraph_ex.testing.oracle.tracing import trace

RULE = "add_rms_norm_dynamic_quant"
SIZES = ({"s0": 6, "s1": 5}, {"s0": 1, "s1": 7})


def _drawn(strategy: Any, count: int) -> list[Program]:
    found: list[Program] = []
    chosen = settings(
        max_examples=count, database=None, deadline=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    def keep(program: Program) -> None:
        found.append(program)

    chosen(given(strategy)(keep))()
    return found


@pytest.fixture(scope="module")
def planted() -> list[Program]:
    """Many programs that must be fused."""
    return _drawn(testing.programs(pattern=RULE), 400)


@pytest.mark.slow
def test_the_generator_covers_what_it_claims(planted: list[Program]) -> None:
    """Dtypes, layouts, aliases, writes, symbolic shapes, ranks and sizes of one all occur, none of them rarely."""
    inputs = [spec for program in planted for spec in program.inputs]
    seen = Counter(spec.layout for spec in inputs)
    seen.update(program.dtype for program in planted)
    seen["alias"] = sum(spec.alias_of is not None for spec in inputs)
    seen["dynamic"] = sum(program.dynamic for program in planted)
    seen["inline writes"] = sum(not program.functional for program in planted)
    seen["writes"] = sum(any("_." in step.operator for step in program.steps) for program in planted)
    seen["rank 3"] = sum(any(len(spec.shape) == 3 for spec in program.inputs) for program in planted)
    seen["one row"] = sum(program.sizes[0]["s0"] == 1 for program in planted)
    seen["on a stream"] = sum("scope_enter" in program.source for program in planted)
    seen["late argument"] = sum("late = " in program.source for program in planted)
    seen["small values"] = sum(spec.scale == 0.001 for spec in inputs)
    wanted = (
        "contiguous", "transposed", "strided", "offset", "inside", "expanded", "float16", "bfloat16", "alias", "dynamic",
        "inline writes",
        "writes", "rank 3", "one row", "small values", "on a stream", "late argument",
    )  # fmt: skip
    assert {name: seen[name] for name in wanted if seen[name] < 3} == {}


@pytest.mark.parametrize("rule", ["muls_add", "swiglu_quant", "transpose_batchmatmul"])
def test_what_takes_float32_is_planted_in_it(rule: str) -> None:
    """And fuses; where the operator takes tensors without elements, there are some."""
    drawn = [sample(planted_programs(pattern=rule, dynamic=False), seed) for seed in range(80)]
    single = [program for program in drawn if program.dtype == "float32"]
    assert len(single) > 10
    outcome = testing.check(Case.of(single[0], route="fx"))
    assert (outcome.failures, outcome.fusions) == ([], 1)
    assert any(program.sizes[0]["s0"] == 0 for program in drawn) == (rule == "muls_add")


@pytest.mark.slow
def test_programs_differ() -> None:
    """Hardly two of the sampled programs are one, and the same seed samples the same."""
    maker = planted_programs(pattern=RULE)
    sampled = [sample(maker, seed) for seed in range(200)]
    assert len(set(sampled)) > 0.98 * len(sampled)
    assert sample(maker, 7) == sampled[7]


def test_a_pattern_for_symbols_is_what_each_call_would_trace() -> None:
    """Steps and results of a pattern for symbolic sizes are those of its search function on the sizes of any call."""
    burnt_in = set[bool]()
    for pattern in testing.registered_patterns():
        dtypes = {argument.name: argument.dtype for argument in pattern.arguments}
        shapes: dict[str, tuple[Dim, ...]] = {
            argument.name: tuple(
                dim for size in argument.dims for dim in (batch if size == pattern.leading else (size,))
            )
            for batch in [("s0", "s1") if pattern.rows else ("s0",)]
            for argument in pattern.arguments
        }
        found = [sized(pattern, shapes, dtypes, pattern.rule.scalars, sizes) for sizes in SIZES]
        for one, sizes in zip(found, SIZES, strict=True):
            concrete = {name: [size_of(dim, sizes) for dim in shape] for name, shape in shapes.items()}
            wanted = pattern.trace(concrete, dtypes, pattern.rule.scalars)
            assert one.traced.steps == wanted.steps
            for name, (shape, dtype) in wanted.metas.items():
                symbolic, kept = one.results[name]
                assert (tuple(size_of(dim, sizes) for dim in symbolic), kept) == (shape, dtype)
        assert found[0].burnt_in == (found[0].traced.steps != found[1].traced.steps)
        burnt_in.add(found[0].burnt_in)
    assert burnt_in == {True, False}


@pytest.mark.slow
def test_functionalised_programs_compute_the_same() -> None:
    """Random programs with writes through views: the recorded functional graph leaves eager mode's values everywhere."""
    written = 0
    for seed in range(60):
        program = sample(exact_programs(dynamic=False), seed)
        if any(spec.alias_of is not None for spec in program.inputs):
            continue
        written += any("_." in step.operator for step in program.steps)
        graph = trace(program.function(), program.inputs, program.sizes[0], dynamic=False, functional=True)
        wanted, found = (make_inputs(program.inputs, sizes=program.sizes[0]) for _ in range(2))
        outputs = zip(program.function()(*wanted), graph(*found), strict=True)
        assert all(torch.equal(a, b) for a, b in (*outputs, *zip(wanted, found, strict=True))), program
    assert written > 20


def test_integers_are_written_where_they_were_copied() -> None:
    """Values of the program's own are written, too; neighbours are subtracted, and a copy may be spelled as arithmetic."""
    steps = [step for seed in range(80) for step in sample(exact_programs(), seed).steps]
    assert sum("_." in step.operator and step.args[0].name.startswith("v") for step in steps) > 20
    assert sum(step.operator == "aten.sub.Tensor" for step in steps) > 20
    assert any(step.operator == "aten.mul.Tensor" and step.args[1] == 1 for step in steps)


def test_copies_are_viewed_undeclared() -> None:
    """Every kind of such a view is drawn, of copies of every spelling; the copy goes on where its views were read at once."""
    programs = [sample(exact_programs(), seed) for seed in range(400)]
    viewed, copied, kept, put = set[str](), set[str](), 0, 0
    for program in programs:
        made = {name: step for step in program.steps for name in step.results}
        for place, step in enumerate(program.steps):
            put += step.operator == "prims.device_put.default"
            if "unsafe" in step.operator:
                source = made[step.args[0].name]
                viewed.add(step.operator)
                copied.add(source.operator)
                kept += any(source.results[0] in _read(later) for later in program.steps[place + 1 :])
    assert viewed == {
        f"aten.{name}"
        for name in (
            "_unsafe_view.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default", "unsafe_chunk.default",
        )
    }  # fmt: skip
    assert copied >= {"aten.clone.default", "aten._to_copy.default", "aten.mul.Tensor", "aten.slice.Tensor"}
    assert kept > 10
    assert put > 10


@pytest.mark.slow
def test_parts_of_values_are_written() -> None:
    """Parts of every kind, from each other without a copy between, by index and by mask; with symbolic sizes, too."""
    into, across, ways, symbolic = set[str](), 0, set[str](), 0
    for seed in range(600):
        program = sample(exact_programs(), seed)
        made = {name: step for step in program.steps for name in step.results}
        for step in program.steps:
            target = made.get(step.args[0].name) if not step.results and step.args else None
            if target is None or target.operator.split(".")[1] not in _PARTS:
                continue
            into.add(target.operator)
            ways.add(step.operator)
            sources = [made.get(name) for name in _read(step)[1:]]
            beside = any(one is not None and one.operator in into and one.args[0] == target.args[0] for one in sources)
            across += beside
            symbolic += beside and program.dynamic
    assert into == {f"aten.{name}.{overload}" for name, overload in _PARTS.items()}
    assert across > 20
    assert symbolic > 3
    assert ways >= {f"aten.{name}" for name in ("copy_.default", "neg_.default", "index_put_.default")}
    assert ways >= {f"aten.{name}" for name in ("masked_fill_.Scalar", "index_fill_.int_Scalar")}


_PARTS = {"slice": "Tensor", "select": "int", "split": "Tensor", "diagonal": "default", "as_strided": "default"}


def _read(step: Step) -> list[str]:
    return [value.name for value in step.args if isinstance(value, Ref)]


def test_most_fusions_are_counted_exactly(planted: list[Program]) -> None:
    """Only where layouts may forbid the fusion is the count left open."""
    assert sum(program.expected == 1 for program in planted) > 0.6 * len(planted)


@pytest.mark.slow
def test_every_near_miss_is_drawn_and_named() -> None:
    """Each way of spoiling the pattern occurs and must not be fused."""
    kinds = set[str | None]()
    for rule, count in ((RULE, 200), ("muls_add", 200), ("add_rms_norm_quant", 200), ("transpose_batchmatmul", 40)):
        maker = testing.planted_programs(pattern=rule, near_miss=True)
        programs = [testing.sample(maker, seed) for seed in range(count)]
        assert {program.expected for program in programs} == {0}
        kinds |= {program.near_miss for program in programs}
    assert kinds == set(NEAR_MISSES)


def test_every_rule_has_near_misses() -> None:
    """Also one whose pattern random programs contain by chance: its near-misses stand alone."""
    with client_operators():
        for rule in RULE_NAMES:
            assert any(map(applicable, testing.registered_patterns(rule))), rule


def test_a_users_rule_may_take_any_dtype_and_size() -> None:
    """What the default rules refuse for their fused operators is no near-miss of another rule."""

    def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * y

    with register_replacement(gated, lambda x, y: y * torch.sigmoid(x), [torch.empty(4, 8)] * 2) as rule:
        (pattern,) = testing.registered_patterns(rule.name)
        assert not {"dtype", "empty"} & set(applicable(pattern))
        found = testing.find_failure(testing.programs(pattern=rule.name, near_miss=True), examples=12, seed=1)
    assert found is None


def test_the_end_of_a_slice_is_no_number() -> None:
    """`w[3:]` ends at the largest integer, which stands for the end; inputs near it would make every product overflow."""
    graph = fx.Graph()
    part = graph.call_function(torch.ops.aten.slice.Tensor, (graph.placeholder("w"), 0, 48, sys.maxsize))
    graph.output(graph.call_function(torch.ops.aten.slice.Tensor, (part, 0, -40, sys.maxsize)))
    assert {48.0, 40.0} <= set(numbers_in_graph(graph)) <= {48.0, 40.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "near_misses"),
    [
        ("fusion-ignores-other-users", {"extra user"}),
        ("fusion-ignores-writes-between", {"argument mutation"}),
        ("matcher-takes-any-number", {"keyword"}),
        ("muls-add-rounds-numbers", {"number"}),
    ],
)
def test_what_catches_a_broken_matcher_at_muls_add(mutant: str, near_misses: set[str]) -> None:
    """Each of its near-misses is fused by the matcher that does not look at what it is about, and by no other fault."""
    maker = planted_programs(pattern="muls_add", near_miss=True)
    drawn = [sample(maker, seed) for seed in range(60)]
    with testing.mutant(mutant):
        caught = {program.near_miss for program in drawn if not testing.check(Case.of(program, route="fx")).ok}
    assert caught == near_misses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "near_misses"),
    [("fusion-ignores-streams", {"stream boundary"}), ("fusion-closes-cycles", {"cyclic input", "late input"})],
)
def test_what_catches_a_fusion_out_of_order(mutant: str, near_misses: set[str]) -> None:
    """Each near-miss is about the check that refuses it, and no other is."""
    kinds = ("stream boundary", "cyclic input", "late input", "wrong dim", "extra user")
    makers = {kind: planted_programs(pattern=RULE, near_miss=kind) for kind in kinds}
    drawn = [(kind, sample(maker, seed)) for kind, maker in makers.items() for seed in range(6)]
    with testing.mutant(mutant):
        caught = {kind for kind, program in drawn if not testing.check(Case.of(program, route="fx")).ok}
    assert caught == near_misses


@pytest.mark.slow
def test_streams_and_late_arguments_are_no_near_misses() -> None:
    """A pattern that runs on a stream of its own, or gets an argument after a result was used, fuses once all the same."""
    maker = planted_programs(pattern=RULE)
    drawn = [program for program in (sample(maker, seed) for seed in range(120)) if program.expected]
    for marker in ("scope_enter", "late = "):
        marked = [program for program in drawn if marker in program.source][:6]
        assert len(marked) == 6
        assert [testing.check(Case.of(program, route="graph")).failures for program in marked] == [[]] * 6


def test_an_axis_that_means_the_same_is_no_near_miss() -> None:
    """Dropped, the axis of `npu_quantize` is 1: of three dimensions not the last; where it multiplies, any but -2 is the last."""
    drawn = [
        sample(planted_programs(pattern="add_rms_norm_quant", near_miss="dropped keyword"), seed) for seed in range(20)
    ]
    assert not any("div_mode=False" in program.source or "axis" in program.source for program in drawn)
    assert all(any(len(spec.shape) == 3 for spec in program.inputs) or "s1" in str(program.inputs) for program in drawn)


def test_a_wrong_name_says_what_there_is() -> None:
    """Rule and near-miss names are checked before anything is drawn."""
    with pytest.raises(ValueError, match="extra user"):
        _drawn(testing.programs(pattern=RULE, near_miss="typo"), 1)
    with pytest.raises(ValueError, match=RULE):
        testing.registered_patterns("typo")


def test_the_source_is_the_program() -> None:
    """The rendered function computes what the steps say."""
    steps = (
        Step("aten.add.Tensor", (Ref("x0"), 2.0), (), ("v0",)),
        Step("aten.cat.default", ((Ref("x0"), Ref("v0")), 0), (), ("v1",)),
    )
    program = Program((Input((2,), "float32"),), steps, ("v1",))
    assert program.source == (
        "def program(x0):\n"
        "    v0 = torch.ops.aten.add.Tensor(x0, 2.0)\n"
        "    v1 = torch.ops.aten.cat.default([x0, v0], 0)\n"
        "    return (v1,)\n"
    )
    assert program.function()(torch.zeros(2))[0].tolist() == [0.0, 0.0, 2.0, 2.0]


def test_inputs_lie_near_numbers() -> None:
    """At a number, beside it, of its magnitude, of either sign; others are as they were; what a dtype lacks is left out."""
    values, plain = (Input((256, 500), around=near).values({}, 0) for near in ((128.0, 1e9, 0.0), ()))
    beside = values.float().mean(1)[values.float().std(1) < 100]
    assert {round(mean / 128) for mean in beside.tolist()} >= {-4, -2, -1, 1, 2, 4}, "rows that lie beside one number"
    mixed = (values == plain).any(1)
    values, plain = values[mixed], plain[mixed]
    assert 170 < len(values) < 214
    assert {-128.125, -128.0, -127.875, 127.875, 128.0, 128.125, 0.0} <= set(values.flatten().tolist())
    assert 0.4 < float((values == plain).float().mean()) < 0.6
    assert values.isfinite().all()
    assert bool((values > 140).any())
    assert bool(((values > 10) & (values < 100)).any())
    special = Input((500,), "bfloat16", around=(math.inf, math.nan)).values({}, 0)
    assert special.isnan().any()
    assert special.isposinf().any()
    assert not special.isneginf().any()  # a row with both has no sum
    whole = Input((500,), "int32", around=(6.0,)).values({}, 0)
    assert {5, 6, 7, -5, -6, -7} <= set(whole.tolist())
    assert set(Input((500,), "uint8", around=(6.0,)).values({}, 0).tolist()) >= {0, 5, 6, 7}


def test_large_values_are_finite() -> None:
    """What is beyond a dtype's range is its largest number; infinities come only where they are asked for."""
    for grows in (False, True):
        values = Input((4, 1000), "float16", scale=30000.0, grows=grows).values({}, 0)
        assert values.isfinite().all()
        assert float(values.max()) == 65504.0


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8"])
def test_corners_are_integers_whose_sums_and_products_are_the_smallest(dtype: str) -> None:
    """Doubles, sums, products and shifts of two tensors reach it exactly; every second element is any number, as without."""
    x, y = (Input((8, 64), dtype, seed=seed, corners=True).values({}, 0) for seed in (1, 2))
    limits, half = torch.iinfo(x.dtype), 1 << (torch.iinfo(x.dtype).bits - 2)
    often = {half, half // 2, -half, -half // 2} if limits.min else {2 * half, half, half // 2}
    assert {0, limits.min, limits.max, *often} <= set(x.flatten().tolist())
    apart = (x != 0) & (y != 0) & (x != limits.min) & (y != limits.min)
    for reached in (x + y, x * y):
        assert bool(((reached == limits.min) & apart).any())
    for reached in (x + x, x << 2):
        assert bool(((reached == limits.min) & (x != 0)).any())
    same = x == Input((8, 64), dtype, seed=1).values({}, 0)
    assert bool(same.view(-1, 4)[:, 2:].all())
    assert float(same.view(-1, 4)[:, :2].float().mean()) < 0.1


def test_values_that_grow_are_larger_at_the_end() -> None:
    """Of a small and of a large tensor, along each dimension; the dtype and the other elements' order stay."""
    for shape in ((30, 40), (90, 100)):
        values, plain = (Input(shape, "float16", grows=grows).values({}, 0) for grows in (True, False))
        assert values.dtype == torch.float16
        ratio = values.double() / plain.double()
        assert 0.24 < float(ratio[0, 0]) < 0.26
        assert 3.9 < float(ratio[-1, -1]) < 4.1
        assert 0.95 < float(ratio[0, -1]) < 1.05
    assert torch.equal(Input((5,), "int32", grows=True).values({}, 0), Input((5,), "int32").values({}, 0))


def test_masks_of_few_values_have_whole_rows() -> None:
    """Rows of a large mask that are all true, all false and mixed, along either dimension; a mask of any value has none."""
    for call in range(8):
        mask = Input((100, 90), "bool", whole=1).values({}, call)
        along = [dim for dim in (0, 1) if bool(mask.all(dim).any())]
        assert len(along) == 1
        kept = mask.sum(along[0])
        assert {0, mask.shape[along[0]]} < set(kept.tolist())
    for seed in range(20):  # of few rows, too, in the first call
        small = Input((3, 8), "bool", whole=1, seed=seed).values({}, 0)
        assert bool(small.all(1).any())
        assert not bool(small.any(1).all())
    plain = Input((100, 90), "bool").values({}, 0)
    assert not any(bool(plain.all(dim).any()) or not bool(plain.any(dim).all()) for dim in (0, 1))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "offset", "inside"])
def test_a_layout_changes_memory_and_not_values(layout: Any) -> None:
    """The same values whatever the layout; the layout is really there; another call has other values."""
    spec = Input((3, 4), layout=layout, seed=5)
    (tensor,) = make_inputs([spec], device="cpu")
    (plain,) = make_inputs([Input((3, 4), seed=5)], device="cpu")
    assert torch.equal(tensor, plain)
    assert {"transposed": (1, 3), "strided": (8, 2)}.get(layout, (4, 1)) == tensor.stride()
    assert tensor.storage_offset() == {"offset": 1, "inside": 3}.get(layout, 0)
    assert (tensor.untyped_storage().nbytes() > 2 * (tensor.storage_offset() + 12)) == (layout in ("inside", "strided"))
    assert not torch.equal(make_inputs([spec], call=1, device="cpu")[0], plain)


@pytest.mark.parametrize(("layout", "strides"), [("expanded", (0, 4, 1)), ("row", (0, 0, 1)), ("column", (1, 0, 0))])
def test_an_expanded_tensor_has_less_memory_than_elements(layout: Any, strides: tuple[int, ...]) -> None:
    """Its values are so, too; another call's can be written into it; without elements there is a place for none."""
    spec = Input((3, 2, 4), "int32", layout, seed=5)
    (tensor,) = make_inputs([spec], device="cpu")
    assert tensor.stride() == strides
    assert torch.equal(tensor, spec.values({}, 0))
    refill([tensor], [spec], {}, 1)
    assert torch.equal(tensor, spec.values({}, 1))
    assert make_inputs([Input((0, 4), layout=layout)], device="cpu")[0].shape == (0, 4)


@pytest.mark.slow
def test_what_is_varied_in_programs_of_integers() -> None:
    """Nothing writes a tensor whose rows are one; equal sizes, own values and returned views all occur."""
    drawn, seen = [sample(exact_programs(), seed) for seed in range(150)], Counter[str]()
    for program in drawn:
        seen["equal sizes"] += program.dynamic and any(sizes["s0"] == sizes["s1"] for sizes in program.sizes)
        seen["own values"] += any(step.args[:1] == step.args[1:] for step in program.steps if not step.results)
        seen["returned views"] += any(name.startswith("w") for name in program.outputs)
        assert all(spec.alias_of is None for spec in program.inputs if spec.is_expanded)
    expanded = [program for program in drawn if any(spec.is_expanded for spec in program.inputs)]
    writing = [program for program in expanded if any(not step.results for step in program.steps)][:12]
    assert [testing.check(Case.of(program, route="fx")).failures for program in writing] == [[]] * 12
    assert min(seen[what] for what in ("equal sizes", "own values", "returned views")) >= 5


def test_an_alias_shares_memory() -> None:
    """A write through one name is seen through the other; a forward reference is refused."""
    first, second = make_inputs([Input((2,)), Input((2,), alias_of=0)], device="cpu")
    first.zero_()
    assert second.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="earlier"):
        make_inputs([Input((2,), alias_of=0)], device="cpu")


def test_symbols_take_each_calls_sizes() -> None:
    """A product of symbols is evaluated."""
    (tensor,) = make_inputs([Input(("s0*4", "s1"))], sizes={"s0": 2, "s1": 3}, device="cpu")
    assert tensor.shape == (8, 3)


def test_spellings_are_the_same_call() -> None:
    """Default arguments left out, written out, or by keyword."""
    step = Step("npu.npu_add_rms_norm.default", (Ref("a"), Ref("b"), Ref("c"), 1e-6), (), ("y", "r", "x"))
    assert with_style(step, "omitted").args == step.args[:3]
    assert with_style(step, "keyword").kwargs == (("epsilon", 1e-6),)
    written = with_style(Step("npu.npu_dynamic_quant.default", (Ref("y"),)), "written")
    assert dict(written.kwargs)["quant_mode"] == "pertoken"


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "offset", "inside", "expanded"])
def test_symbols_stay_symbols_in_every_layout(layout: Any) -> None:
    """Tracing for symbolic shapes fixes no size: the shape is still a symbol, and no guard says which number it is."""
    spec = Input(("s0", 4), layout=layout)
    sizes = {"s0": 5}
    graph = trace(Program((spec,), (), ("x0",)).function(), (spec,), sizes, dynamic=True, functional=True).graph
    (node,) = graph.find_nodes(op="placeholder")
    value = node.meta["val"]
    assert isinstance(value.shape[0], torch.SymInt)
    assert not value.fake_mode.shape_env.replacements
    (real,) = make_inputs([spec], sizes={"s0": int(value.shape[0])}, device="cpu")
    assert [int(stride) for stride in value.stride()] == list(real.stride())


@pytest.mark.slow
def test_operators_of_a_client_may_come_again() -> None:
    """The second time they are other objects: what was traced for the first ones is not matched with."""
    for _ in range(2):
        with client_operators():
            program = testing.sample(testing.planted_programs(pattern="qk_norm_rope", dynamic=False), 1)
            assert testing.check(testing.Case.of(program, route="fx")).failures == []
