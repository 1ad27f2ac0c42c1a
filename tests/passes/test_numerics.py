"""The option `check_numerics`: a pass that keeps every shape and computes something else is found."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import cast

import pytest
import torch
from device_helpers import NPU
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import npugraph_ex
from npugraph_ex.config import Options
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.operators import OPERATORS, Operator, call
from npugraph_ex.passes import pipeline
from npugraph_ex.passes.base import Pass, PassContext
from npugraph_ex.report.passes import PassReport

aten = torch.ops.aten


def traced() -> fx.GraphModule:
    """`relu(x + y) * 2` on fake device tensors."""
    with FakeTensorMode():
        inputs = [torch.empty(3, 4, device="npu") for _ in range(2)]
        return make_fx(lambda x, y: [torch.relu(x + y) * 2])(*inputs)


def wrong(gm: fx.GraphModule, *_: object) -> None:
    """Turn the addition into a subtraction: same shapes, other values."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.target = aten.sub.Tensor


def run(gm: fx.GraphModule, *, passes: tuple[Pass, ...] | None = None, **options: object) -> list[str]:
    """Run the pipeline and return the outcomes of its passes."""
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    chosen = pipeline.PIPELINE if passes is None else passes
    return [record.outcome for record in pipeline.run(gm, inputs, Options.from_mapping(options), passes=chosen).passes]


def test_a_users_wrong_pass_raises() -> None:
    """The error names the pass and the value; without the option nobody notices."""
    run(traced(), post_grad_custom_post_pass=wrong)
    with pytest.raises(GraphVerificationError, match=r"post_grad_custom_post_pass.*mul.*other values"):
        run(traced(), post_grad_custom_post_pass=wrong, check_numerics=True)


def test_an_operator_that_writes_is_computed_by_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record says what it computes where torch has no kernel for the CPU, also where AOT wraps the write."""
    monkeypatch.setattr(OPERATORS, "_records", dict(OPERATORS._records))
    torch.library.define("numerics_tests::scale_", "(Tensor(a!) x, float by=1.0) -> ()")
    torch.library.register_fake("numerics_tests::scale_", lambda *_, **__: None)

    @Operator(name="numerics_tests::scale_", source="here", examples=(lambda: call(torch.ones(4), by=2.0),))
    def scaled(x: torch.Tensor, by: float = 1.0) -> None:
        x.mul_(by)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + y
        torch.ops.numerics_tests.scale_(z, 3.0)
        return z * 2

    def compiled(**options: object) -> torch.Tensor:
        torch.compiler.reset()
        made = torch.compile(program, backend="npugraph_ex", options={"check_numerics": True, **options})
        with torch.no_grad():
            return cast("torch.Tensor", made(torch.full((4,), 2.0, device=NPU), torch.ones(4, device=NPU)))

    assert compiled().tolist() == [18.0] * 4
    assert npugraph_ex.last_report().uncompared == ()
    with pytest.raises(BackendCompilerFailed, match=r"post_grad_custom_pre_pass.*mul.*other values"):
        compiled(post_grad_custom_pre_pass=wrong)


def test_a_wrong_formula_that_a_narrow_dtype_hides_is_found() -> None:
    """The two forms of GELU differ by less than a few roundings of float16; in float64 the difference shows."""

    def other_form(gm: fx.GraphModule, *_: object) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.gelu.default):
            node.kwargs = {"approximate": "tanh"}

    with FakeTensorMode():
        gm = make_fx(lambda x: [torch.nn.functional.gelu(x)])(torch.empty(16, 16, device="npu", dtype=torch.float16))
    with pytest.raises(GraphVerificationError, match=r"gelu has other values on .*, in float64: relative error"):
        run(gm, post_grad_custom_post_pass=other_form, check_numerics=True)


def test_a_built_in_wrong_pass_is_rolled_back(caplog: pytest.LogCaptureFixture) -> None:
    """A recoverable pass that changes values is undone and reported."""

    def run_wrong(gm: fx.GraphModule, context: PassContext) -> None:
        wrong(gm, context)

    gm = traced()
    with caplog.at_level(logging.WARNING):
        outcomes = run(gm, passes=(Pass("wrong", run_wrong),), check_numerics=True)
    assert outcomes == ["rolled back"]
    assert next(node.target for node in gm.graph.nodes if node.op == "call_function") is aten.add.Tensor
    assert "other values" in caplog.text


def test_right_passes_pass() -> None:
    """The pipeline's own passes survive the check, symbolic sizes and mutation included."""

    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = torch.cat([x + 1, y * 2]).relu()
        x.copy_(y.exp())
        return [z, z.sum()]

    with FakeTensorMode():
        inputs = [torch.empty(3, 4, device="npu") for _ in range(2)]
        gm = make_fx(torch.func.functionalize(program))(*inputs)
    assert "rolled back" not in run(gm, check_numerics=True)


def test_fusion_passes_the_check() -> None:
    """A fused operator may round less often; that is within the tolerance."""

    def program(x: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        y, _, total = torch.ops.npu.npu_add_rms_norm(x, r, g)
        quantised, scale = torch.ops.npu.npu_dynamic_quant(y)
        return [quantised, scale, total]

    with FakeTensorMode():
        inputs = [torch.empty(*size, device="npu", dtype=torch.float16) for size in ((4, 64), (4, 64), (64,))]
        gm = make_fx(program)(*inputs)
    assert "rolled back" not in run(gm, check_numerics=True)
    assert any("dynamic_quant" in str(node.target) and "add_rms" in str(node.target) for node in gm.graph.nodes)


def test_inputs_share_memory_as_the_graphs_do() -> None:
    """What is written through one input is read through another; copies apart would call a right rewrite wrong."""

    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [x.copy_(y ^ z)]

    with FakeTensorMode():
        x, z = (torch.empty(3, 4, device="npu", dtype=torch.int32) for _ in range(2))
        gm = make_fx(program)(x, x.as_strided(x.shape, x.stride()), z)
    assert "rolled back" not in run(gm, check_numerics=True)
    assert any(node.target is aten.bitwise_xor_.Tensor for node in gm.graph.nodes)


def rounds_less(gm: fx.GraphModule, *_: object) -> None:
    """Drop the casts to float16, as an operator does that computes several steps in float32."""
    for node in gm.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if node.kwargs == {"dtype": torch.float16}:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


AMPLIFYING = {
    "int8 products wrap": lambda x: (x.half().float() * 40).round().to(torch.int8) * 40,
    "float16 overflows": lambda x: ((x * 2e4).half().float() - (x * 4e4).half().float()).to(torch.int32),
    "a neighbour differs": lambda x: (x.half().float() * 30).round(),
    "a comparison": lambda x: (x.half().float() * 100).round() == (x.abs() * 100).round(),
}
"""One rounding, and what follows from it is entirely different in some elements."""
DECIDING: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch._ops.OpOverload | None]] = {
    "above its rounding": (lambda x: x.half().float() > x, aten.lt.Tensor),
    "not below its rounding": (lambda x: x.half().float() >= x, aten.le.Tensor),
    "what a cast loses": (lambda x: x.half().float() == x, None),
    "a choice": (lambda x: torch.where(x.half().float() > x, x, -x), aten.lt.Tensor),
    "one or minus one": (lambda x: (x.half().float() > x).int() * 2 - 1, aten.lt.Tensor),
    "steps of what is lost": (lambda x: ((x.half().float() - x) * 1e4).round().to(torch.int64), aten.rsub.Tensor),
    "what is lost": (lambda x: x.half().float() - x, aten.rsub.Tensor),
    "a neighbour of each differs": (lambda x: x.half().float() - x * 1.0000001, None),
}
"""Only roundings decide each element, with an operator for the first that has two operands; without one the casts go."""


@pytest.mark.parametrize("name", DECIDING)
def test_what_only_rounding_decides_is_not_judged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The graphs agree in float64, whatever the pass does to such a result. So the report and the log name it, once."""
    program, other = DECIDING[name]

    def decides_otherwise(gm: fx.GraphModule, *_: object) -> None:
        if other is None:
            rounds_less(gm)
        else:
            two = [node for node in gm.graph.nodes if node.op == "call_function" and len(node.all_input_nodes) > 1]
            two[0].target = other

    with FakeTensorMode():
        gm = make_fx(lambda x: [program(x)])(torch.empty(40, 10, device="npu"))

    def copies(gm: fx.GraphModule, *_: object) -> None:
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            output.args = ([gm.graph.call_function(aten.clone.default, (output.args[0][0],))],)

    passes = (Pass("once", decides_otherwise, recoverable=False), Pass("again", copies, recoverable=False))
    with caplog.at_level(logging.WARNING):
        run(gm, passes=passes, check_numerics=True)
    report = npugraph_ex.last_report()
    assert report is not None
    assert (report.compared, report.rounding) == (0, ())
    (reason,) = report.uncompared
    assert re.search(
        r"after pass once, \w+ has other values on random inputs: .* of 400 elements of \w+ are apart", reason
    )
    assert caplog.text.count(reason) == 1
    assert report.notes() == [f"check_numerics compares no values: {reason}."]


@pytest.mark.parametrize("name", AMPLIFYING)
def test_a_rounding_that_changes_what_follows_is_no_fault(name: str) -> None:
    """The report says that rounding explains the difference; a pass that also changes the numbers raises."""

    def rounds_less_and_is_wrong(gm: fx.GraphModule, *_: object) -> None:
        rounds_less(gm)
        (x,) = gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_after(x):
            x.replace_all_uses_with(
                gm.graph.call_function(aten.neg.default, (x,)), lambda user: user.target != aten.neg.default
            )

    with FakeTensorMode():
        x = torch.empty(40, 10, device="npu")
        graphs = [make_fx(lambda x: [AMPLIFYING[name](x)])(x) for _ in range(2)]
    run(graphs[0], passes=(Pass("rounds_less", rounds_less, recoverable=False),), check_numerics=True)
    report = npugraph_ex.last_report()
    assert report is not None
    assert (report.compared, report.uncompared) == (1, ())
    assert ["has other values" in difference for difference in report.rounding] == [True]
    compared, by_rounding = report.notes()
    assert re.search(r"check_numerics: 1 graph .* rounding only", compared)
    assert by_rounding.endswith(f": {report.rounding[0]}.")
    with pytest.raises(GraphVerificationError, match="other values"):
        run(graphs[1], passes=(Pass("wrong", rounds_less_and_is_wrong, recoverable=False),), check_numerics=True)


def test_a_clean_run_says_what_was_compared() -> None:
    """The report counts the graphs whose values are those of the first; without the option it says nothing."""

    def other_order(gm: fx.GraphModule, *_: object) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.args = node.args[::-1]

    def report(**options: object) -> PassReport:
        gm = traced()
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        return pipeline.run(gm, inputs, Options.from_mapping(options))

    clean = report(post_grad_custom_post_pass=other_order, check_numerics=True)
    assert clean.compared == sum(record.outcome == "changed" for record in clean.passes) > 1
    assert re.search(rf"check_numerics: {clean.compared} graphs .* no difference", clean.table())
    assert (report().compared, report().notes()) == (None, [])
