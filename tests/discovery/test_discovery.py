"""Hand-written rules are found again from the records of their operators alone, and what is printed of them fuses."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from fx_helpers import aot_graph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import npugraph_ex
from npugraph_ex.cli import main
from npugraph_ex.commands import advise
from npugraph_ex.commands.advise import _page, advising
from npugraph_ex.discovery import search, sizes
from npugraph_ex.discovery.rules import RuleVerdict, module_of
from npugraph_ex.discovery.search import Discovery, discover
from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.lifting import judging, trials
from npugraph_ex.lifting.proposal import Emit
from npugraph_ex.testing.validation import validate_module

WIDE, ROWS, HEADS = (3, 8), (8,), (2, 3, 2, 8)


def norm(x: Any, w: Any) -> Any:
    """As Llama has it."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def gemma_norm(x: Any, w: Any) -> Any:
    """With a weight that counts from one."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)


def norm_of_a_sum(x: Any, y: Any, w: Any) -> Any:
    """Both are results."""
    total = x + y
    return torch_npu.npu_rms_norm(total, w)[0], total


def layer_norm_of_a_sum(x: Any, y: Any, w: Any, b: Any) -> Any:
    """Likewise."""
    total = x + y
    return functional.layer_norm(total, ROWS, w, b, 1e-5), total


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    """Of halves."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def fast_gelu(x: Any) -> Any:
    """By a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def swiglu(x: Any) -> Any:
    """Of halves."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def group_norm_silu(x: Any, w: Any, b: Any) -> Any:
    """Of two groups."""
    return functional.silu(functional.group_norm(x, 2, w, b, 1e-5))


def router(x: Any) -> Any:
    """As Qwen2-MoE has it."""
    weights, experts = functional.softmax(x, dim=-1, dtype=torch.float).topk(2)
    return weights.type_as(x), experts


RULES: dict[Callable[..., Any], tuple[str, str, tuple[tuple[int, ...], ...]]] = {
    norm: ("lift_rms_norm", "npu_rms_norm", (WIDE, ROWS)),
    gemma_norm: ("lift_rms_norm", "npu_gemma_rms_norm", (WIDE, ROWS)),
    norm_of_a_sum: ("lift_add_rms_norm", "npu_add_rms_norm", (WIDE, WIDE, ROWS)),
    layer_norm_of_a_sum: ("lift_add_layer_norm", "npu_add_layer_norm", (WIDE, WIDE, ROWS, ROWS)),
    rotary: ("lift_rotary", "npu_rotary_mul", (HEADS, (2, 3, 1, 8), (2, 3, 1, 8))),
    fast_gelu: ("lift_activation", "npu_fast_gelu", (WIDE,)),
    swiglu: ("lift_swiglu", "npu_swiglu", (WIDE,)),
    group_norm_silu: ("lift_group_norm_silu", "npu_group_norm_silu", ((2, 4, 3), (4,), (4,))),
    router: ("lift_gating", "npu_moe_gating_top_k_softmax_v2", (WIDE,)),
}
"""The rule that a person wrote, and its operator."""


def found_in(function: Callable[..., Any], *operators: str) -> tuple[list[Discovery], list[torch.Tensor]]:
    """What the records bring, all of them if none is named."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator).half().npu() for shape in RULES[function][2]]
    return discover(aot_graph(function, *inputs), operators), inputs


@pytest.mark.slow
@pytest.mark.parametrize("function", RULES, ids=lambda function: RULES[function][0] + "-" + function.__name__)
def test_hand_written_rules_are_found_again(function: Callable[..., Any]) -> None:
    """From the records alone: no rule is read."""
    found, _ = found_in(function)
    assert f"npu::{RULES[function][1]}" in [one.operator for one in found]
    assert all(one.saves.kernels > 0 for one in found)


@pytest.mark.parametrize(("device", "found"), [("Ascend910B2", 0), ("Ascend910_9391", 0), ("Ascend950PR_9579", 1)])
def test_what_the_device_lacks_is_not_offered(monkeypatch: pytest.MonkeyPatch, device: str, found: int) -> None:
    """By the table of products in its document, A2 and A3 have no fused product of matrices, and 950 has one."""
    monkeypatch.setattr(torch.npu, "get_device_name", lambda *_: device)
    inputs = [torch.randn(size).half().npu() for size in ((4, 8), (8, 8), (4, 8))]
    gm = aot_graph(lambda x, y, z: x @ y + z, *inputs)
    judging.forget()
    assert len(discover(gm, ["npu::npu_fused_matmul"])) == found


@pytest.mark.slow
def test_what_is_written_fuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module registers rules, which fuse in the model and keep its values: for other sizes too, but for no other dtypes."""
    (found,), inputs = found_in(norm, "npu::npu_rms_norm")
    (tmp_path / "discovered_here.py").write_text(module_of([found]))
    monkeypatch.syspath_prepend(tmp_path)
    registered = []
    original = npugraph_ex.register_replacement
    monkeypatch.setattr(
        npugraph_ex, "register_replacement", lambda *given, **checks: registered.append(original(*given, **checks))
    )
    __import__("discovered_here")
    sys.modules.pop("discovered_here")
    torch.compiler.reset()
    x, w = inputs
    others = (
        ((torch.randn(5, 24).half().npu(), torch.randn(24).half().npu()), ""),
        ((x[None], w), "input_0 is torch.float16 of 3 dimensions; its example is torch.float16 of 2 dimensions"),
        ((x, w[:1]), "input_0 and input_1 have different sizes in dimension -1, 8 and 1"),
        ((x, w.float()), "input_1 is torch.float32 of 1 dimension; its example is torch.float16 of 1 dimension"),
    )
    with registered[0], torch.no_grad():
        result = torch.compile(norm, backend="npugraph_ex")(*inputs)
        report = npugraph_ex.last_report()
        reports = [
            npugraph_ex.explain(norm, *given, calls=1, dynamic=False).graphs[0].graph.report for given, _ in others
        ]
    assert report is not None
    report.require(1, registered[0].name)
    torch.testing.assert_close(result, norm(*inputs), rtol=2e-3, atol=1e-6)
    for other, (_, reason) in zip(reports, others, strict=True):
        assert other.fusions(registered[0].name) == (not reason)
        assert [miss.reason for miss in other.near_misses(registered[0].name)] == [reason][: bool(reason)]


@pytest.mark.slow
def test_what_is_written_is_proven(tmp_path: Path) -> None:
    """The command that the module names judges it; also where a size is a number of the pattern, as a group norm has it."""
    found, _ = found_in(group_norm_silu, "npu::npu_group_norm_silu")
    module = tmp_path / "discovered_there.py"
    module.write_text(module_of(found))
    before = USER_RULES.snapshot()
    try:
        (validation,) = validate_module(str(module), max_examples=8)
    finally:
        USER_RULES.drop([rule for rule in USER_RULES.snapshot() if rule not in before])
    assert validation.fused == validation.programs > 0, str(validation)
    assert validation.verdict.startswith("proven on"), str(validation)


TWO_LAYERS = """
import torch
from torch import nn

class Layer(nn.Module):
    def forward(self, x, w):
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

with torch.no_grad():
    first, second = Layer(), Layer()
    both = torch.compile(lambda x, w: second(first(x, w).tanh(), w), backend="npugraph_ex")
    both(torch.ones(2, 8).half().npu(), torch.ones(8).half().npu())
"""


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", ["no node", "tanh", "mul_3"])
def test_a_search_that_is_stopped_keeps_what_it_found(
    stopped_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Advice and rules so far are written, with the status of Ctrl-C; two layers that are alike make one rule.

    At the end of the script the rule is validated.
    """
    script, rules = tmp_path / "two_layers.py", tmp_path / "rules.py"
    script.write_text(TWO_LAYERS)
    ending_with = search._PartSearch.ending_with

    def stopping(self: Any, node: torch.fx.Node) -> Any:
        if node.name == stopped_at:
            raise KeyboardInterrupt
        return ending_with(self, node)

    monkeypatch.setattr(search._PartSearch, "ending_with", stopping)
    monkeypatch.setattr(search, "OPERATORS", {"npu::npu_rms_norm": search.OPERATORS["npu::npu_rms_norm"]})
    for variable in ("argv", "path"):
        monkeypatch.setattr(sys, variable, list(getattr(sys, variable)))
    monkeypatch.setattr(advise, "_EXAMPLES", 2)
    torch.compiler.reset()
    status = main(["advise", "--json", "--discover", str(rules), str(script)])
    said = capsys.readouterr()
    assert status == (0 if stopped_at == "no node" else 130)
    assert ("lift_rms_norm", 2) in [(one["rule"], one["times"]) for one in json.loads(said.out)["advice"]]
    assert rules.read_text().count("register_replacement(") == 1, said.err
    assert rules.read_text().count("# Validation: proven on 2\n") == (stopped_at == "no node"), said.err
    assert "1 rule\n" in said.err
    assert ("1 of 1 rule validated\n" in said.err) == (stopped_at == "no node")
    assert 1 <= said.err.count("nodes of graph") <= 5, "a line for each quarter of a graph, and one more at its end"


def test_what_validation_refutes_is_not_registered() -> None:
    """It stays to be read, with the reason."""
    found, _ = found_in(swiglu, "npu::npu_swiglu")
    before = USER_RULES.snapshot()
    text = module_of(found, {"search_1": RuleVerdict(ok=False, text="refuted; output 0 differs")})
    assert "# Validation: refuted; output 0 differs\n" in text
    exec(text, {"__name__": "discovered_wrong"})  # noqa: S102 - the module under test
    assert USER_RULES.snapshot() == before


def test_what_the_program_fuses_already_is_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the page says that the search found a rule, where nothing else is won."""
    monkeypatch.setattr(search, "OPERATORS", {"npu::npu_swiglu": search.OPERATORS["npu::npu_swiglu"]})
    said = {}
    for lift in ("off", "judged"):
        torch.compiler.reset()
        with advising(discovering=True) as found, torch.no_grad():
            torch.compile(swiglu, backend="npugraph_ex", options={"lift": lift})(
                torch.ones(4, 16, dtype=torch.float16, device="npu")
            )
        said[lift] = str(_page("script.py", found, Path("found.py")))
    assert re.search(r"found 1 rule .* 1 kernel less .* found\.py", said["off"])
    assert "found.py" not in said["judged"]
    assert "nothing to win" in said["judged"]


@pytest.mark.slow
def test_what_lifts_save_in_two_parts_is_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search counts what is left of its part, whichever lines the fusions have, and however many they are."""

    def twice(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x + y
        wide = total.float()
        first = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).half() * weight
        return functional.silu(first) * total

    names = ("npu::npu_add_rms_norm", "npu::npu_rms_norm", "npu::npu_swiglu")
    monkeypatch.setattr(search, "OPERATORS", {name: search.OPERATORS[name] for name in names})
    rows, weight = torch.ones(2, 8, 32, dtype=torch.float16, device="npu"), torch.ones(32, device="npu").half()
    kept = {}
    for lift in ("off", "judged"):
        torch.compiler.reset()
        with advising(discovering=True) as found, torch.no_grad():
            torch.compile(twice, backend="npugraph_ex", options={"lift": lift})(rows.mT.contiguous().mT, rows, weight)
        kept[lift] = [one.operator for one in found.rules]
    assert "npu::npu_add_rms_norm" in kept["off"]
    assert kept["judged"] == []


@pytest.mark.slow
def test_a_wrong_candidate_is_left_to_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values on one input are not enough: where every fingerprint fits, only the right operator is found."""
    monkeypatch.setattr(search, "_equal", lambda result, value: getattr(result, "shape", 0) == value.shape)
    found, _ = found_in(swiglu, "npu::npu_swiglu", "npu::npu_geglu", "npu::npu_fast_gelu", "npu::npu_silu")
    assert {one.operator for one in found} == {"npu::npu_swiglu"}


def split_at_four(x: Any) -> Any:
    """The first two parts of several."""
    gate, up = x.split(4, -1)[:2]
    return functional.silu(gate) * up


def softmax_of_scores(x: Any, mask: Any) -> Any:
    """With a mask for all."""
    return torch.softmax(x * 32**-0.5 + mask, -1)


@pytest.mark.parametrize("known", [True, False], ids=["constraint", "no constraint"])
def test_other_sizes_of_the_guard_are_tried(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd width has the pattern, and the operator refuses it; what no record knows is not written.

    Of another even width the operator gives another shape, so that the guard has the width.
    """
    x = torch.randn(3, 8).half().npu()
    if not known:
        monkeypatch.setattr(sizes, "record_of", lambda _: None)
    found = discover(aot_graph(split_at_four, x), ["npu::npu_swiglu"])
    assert [one.operator for one in found] == ["npu::npu_swiglu"] * known
    if known:
        names = {"__name__": "discovered_odd"}
        registered = []
        original = npugraph_ex.register_replacement
        monkeypatch.setattr(
            npugraph_ex, "register_replacement", lambda *given, **how: registered.append(original(*given, **how))
        )
        exec(module_of(found), names)  # noqa: S102 - the module under test
        torch.compiler.reset()
        with registered[0], torch.no_grad():
            compiled = torch.compile(split_at_four, backend="npugraph_ex", dynamic=False)
            for width, reason in (
                (8, ""),
                (9, "size 9 of dimension -1 of input_0 is above 8"),
                (12, "size 12 of dimension -1 of input_0 is above 8"),
            ):
                given = torch.randn(5, width, generator=torch.Generator().manual_seed(1)).half().npu()
                torch.testing.assert_close(compiled(given), split_at_four(given), rtol=2e-3, atol=1e-4)
                report = npugraph_ex.last_report()
                assert report is not None
                assert report.fusions(registered[0].name) == (width == 8)
                if reason:
                    assert [miss.reason for miss in report.near_misses(registered[0].name)] == [reason]


def test_what_an_operator_says_of_a_trial_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script does not call it; torch would log a traceback where a meta function fails."""
    refused: list[Exception] = []

    def made(_: object, emit: Emit, *__: object) -> list[torch.fx.Node]:
        (x,) = emit.graph.find_nodes(op="placeholder")
        try:
            return [emit(torch.ops.aten.mm.default, x, x)]
        except Exception as error:
            refused.append(error)
            raise

    monkeypatch.setattr(search._CandidateCall, "made", made)
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    log = logging.getLogger(FakeTensorMode.__module__)
    monkeypatch.setattr(log, "handlers", [*log.handlers, handler])
    assert found_in(swiglu, "npu::npu_swiglu")[0] == []
    assert refused
    assert not logged


def masked_softmax(x: Any, hidden: Any) -> Any:
    """A row without a key is NaN."""
    return torch.softmax((x * 0.25).masked_fill(hidden, float("-inf")), -1)


@pytest.mark.parametrize("keeps", [False, True], ids=["true hides", "true keeps"])
@pytest.mark.parametrize("tried", [True, False], ids=["masked rows", "no masked rows"])
def test_rows_that_are_masked_everywhere_are_tried(tried: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the operator gives a number; no other input tells the two apart."""
    if not tried:
        monkeypatch.setattr(trials, "_KINDS", [one for one in trials._KINDS if one[0] not in ("masked", "zero")])
    judging.forget()
    inputs = torch.randn(2, 1, 16).half().npu(), torch.zeros(2, 1, 16, dtype=torch.bool, device="npu")
    graph = aot_graph((lambda x, mask: masked_softmax(x, ~mask)) if keeps else masked_softmax, *inputs)
    found = discover(graph, ["npu::npu_scaled_masked_softmax"])
    judging.forget()
    assert [one.operator for one in found] == ["npu::npu_scaled_masked_softmax"] * (not tried)


def test_what_a_document_rules_out_is_not_found() -> None:
    """Small squares with a mask for all: a dropout's mask, rounded up to 128 bytes, happened to have room for them."""
    inputs = torch.randn(2, 5, 5).half().npu(), torch.randn(5, 5).half().npu()
    graph = aot_graph(softmax_of_scores, *inputs)
    assert discover(graph, ["npu::npu_dropout_with_add_softmax"]) == []
